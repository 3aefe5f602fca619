"""The ops that write a weight's gradient straight into its slot, and the modules that use them.

[Note: same forward]
A packed module computes the very products that the plain one does, in the same order and dtype, so its output is the
plain one bit for bit. `F.linear` adds the bias inside the product for some inputs (two dimensions; contiguous ones of
more, depending on the release of torch) and after it for others, and the gradient of the bias follows the same choice.
Which it does is read off the graph of a tiny plain call, once.

[Note: autocast]
Autocast casts a weight once and keeps the cast for all uses inside its context, but a cast that is made while gradients
are off (as they are inside an autograd Function) would be kept without its history, and plain uses of the same weight
would then silently get no gradient. So a Function here never lets autocast see a float32 weight: it casts itself and
keeps the cast for backward, as plain does. A weight that is used again while that cast is alive takes the plain path,
whose cast is shared, so that a layer called a hundred times does not keep a hundred casts.
"""

import functools
import sys
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from leangrad import _torch

from .slots import SLOTS, Compute, Slot, deliver

#: Elements that are widened at a time: large enough to be fast, too small to matter.
_BLOCK = 1 << 14

_LOW_OR_SINGLE = (torch.float32, torch.bfloat16, torch.float16)


def write_product(x: Tensor, g: Tensor, out: Tensor | None, add: bool, columns_first: bool) -> Tensor:
    """x.T @ g for x (n, in) and g (n, out), as an (in, out) matrix: new, written over `out`, or added to it.

    `columns_first` says that the matrix lies column by column, as a Linear's transposed weight does: then the product
    that is computed is its transpose, which is also what autograd does.
    """
    left, right = (g.t(), x) if columns_first else (x.t(), g)
    if out is None:
        product = left.mm(right)
        return product.t() if columns_first else product
    into = out.t() if columns_first else out
    if into.dtype == left.dtype:
        if add:
            into.addmm_(left, right)
        else:
            torch.mm(left, right, out=into)
    elif writes_wider(left.device, left.dtype, into.dtype):
        torch.addmm(into, left, right, out_dtype=into.dtype, beta=int(add), out=into)
    elif add:
        _add_narrower(into, left.mm(right))
    else:
        into.copy_(left.mm(right))
    return out


def _add_narrower(into: Tensor, product: Tensor) -> None:
    """Add a product of a narrower dtype: in blocks, because on CPU an add of two dtypes first widens one of them."""
    if into.device.type != "cpu":
        into.add_(product)
        return
    rows = max(1, _BLOCK // max(1, product.shape[1]))
    for block, addend in zip(into.split(rows), product.split(rows), strict=True):
        block.add_(addend)


_wider: dict[tuple[torch.device, torch.dtype, torch.dtype], bool] = {}


def writes_wider(device: torch.device, dtype: torch.dtype, wider: torch.dtype) -> bool:
    """Whether a product of `dtype` matrices can be written in a wider dtype with no temporary; tried once."""
    key = (device, dtype, wider)
    if device.type != "cuda":
        return False
    if key not in _wider:
        ones = torch.ones(16, 16, dtype=dtype, device=device)
        into = torch.full((16, 16), 2.0, dtype=wider, device=device)
        try:
            torch.addmm(into, ones, ones, out_dtype=wider, beta=1, out=into)
            _wider[key] = bool((into == 18).all())
        except (RuntimeError, TypeError):
            _wider[key] = False
    return _wider[key]


def write_sum(g: Tensor, out: Tensor | None, add: bool) -> Tensor:
    """The sum of g over all its leading dimensions: new, written over `out`, or added to it."""
    dims = tuple(range(g.dim() - 1))
    if out is None:
        return g.sum(dims)
    if add:
        return out.add_(g.sum(dims))
    if out.dtype == g.dtype:
        return torch.sum(g, dims, out=out)
    return out.copy_(g.sum(dims))


class PackedProduct(torch.autograd.Function):
    """x @ W (+ b) whose backward writes the gradients of the parameters into their slots.

    Keeps x and W for backward, and nothing else: the bytes of the plain product.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        is_transposed: bool,
        adds_inside: bool,
        dtype: torch.dtype,
    ) -> Tensor:
        """The product in `dtype`, which `x` already has; W is `weight.T` where `is_transposed`."""
        w = weight.to(dtype)
        if w is not weight:
            slot = SLOTS.get(weight)
            assert slot is not None
            slot.cast = TensorWeakRef(w)
        matrix = w.t() if is_transposed else w
        y = x.new_empty(*x.shape[:-1], matrix.shape[1])
        rows, y_rows = x.flatten(0, -2), y.flatten(0, -2)
        if bias is None:
            torch.mm(rows, matrix, out=y_rows)
        elif adds_inside:
            torch.addmm(bias.to(dtype), rows, matrix, out=y_rows)
        else:
            torch.mm(rows, matrix, out=y_rows)
            y.add_(bias.to(dtype))
        ctx.save_for_backward(x, w if ctx.needs_input_grad[0] else None)
        # Parameters are held as they are: in backward their `.grad` is written, and their values are not read, except
        # under create_graph, which checks the version.
        ctx.weight, ctx.bias, ctx.version = weight, bias, weight._version
        ctx.is_transposed, ctx.adds_inside = is_transposed, adds_inside
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """dx is returned, dW and db are written into their slots, or returned where autograd has to take them."""
        x, w = ctx.saved_tensors
        rows = g.flatten(0, -2)
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            if torch.is_grad_enabled() and w.dtype != ctx.weight.dtype:
                w = _weight_as_it_was(ctx).to(w.dtype)
            dx = _input_gradient(x, rows, w if ctx.is_transposed else w.t())
        if ctx.needs_input_grad[1]:
            dw = deliver(ctx, 1, ctx.weight, _weight_gradient(ctx, x, rows), "its layer writes the product")
        if ctx.needs_input_grad[2]:
            addend = rows if ctx.adds_inside else g
            db = deliver(ctx, 2, ctx.bias, lambda out, add: write_sum(addend, out, add), "its layer writes the sum")
        return dx, dw, db, None, None, None


def _weight_as_it_was(ctx: Any) -> Tensor:
    weight: Tensor = ctx.weight
    if weight._version != ctx.version:
        raise RuntimeError(
            "create_graph=True differentiates through a weight that was changed in place after the forward pass "
            f"(version {weight._version}, expected {ctx.version}); run backward before the change"
        )
    return weight


def _input_gradient(x: Tensor, g: Tensor, transposed: Tensor) -> Tensor:
    """g @ W.T in the shape of x. For an x that lies column by column autograd computes the transpose of that."""
    if x.dim() == 2 and x.stride(0) == 1 and x.stride(1) == x.shape[0]:
        return transposed.t().mm(g.t()).t()
    return g.mm(transposed).view(x.shape)


def _weight_gradient(ctx: Any, x: Tensor, g: Tensor) -> Compute:
    weight, is_transposed = ctx.weight, ctx.is_transposed
    matrix = weight.t() if is_transposed else weight
    columns_first = matrix.stride(0) == 1 and matrix.stride(1) == matrix.shape[0]

    def compute(out: Tensor | None, add: bool) -> Tensor:
        into = out if out is None or not is_transposed else out.t()
        result = write_product(x.flatten(0, -2), g, into, add, columns_first)
        return result.t() if is_transposed else result

    return compute


class PackedLookup(torch.autograd.Function):
    """`F.embedding` whose backward adds the rows it was given straight into the weight's slot. Keeps the indices."""

    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, indices: Tensor, padding_index: int) -> Tensor:
        """weight[indices]."""
        ctx.save_for_backward(indices)
        ctx.weight, ctx.padding_index = weight, padding_index
        return torch.embedding(weight, indices, padding_index)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None, None]:
        """The rows of g, summed by index."""
        (indices,), count = ctx.saved_tensors, ctx.weight.shape[0]

        def compute(out: Tensor | None, add: bool) -> Tensor:
            if out is None:
                dense: Tensor = torch.ops.aten.embedding_dense_backward(g, indices, count, ctx.padding_index, False)
                return dense
            return add_rows(
                out if add else out.zero_(), indices.reshape(-1), g.reshape(-1, out.shape[1]), ctx.padding_index
            )

        return deliver(ctx, 0, ctx.weight, compute, "its layer adds the rows"), None, None


def add_rows(out: Tensor, indices: Tensor, rows: Tensor, padding_index: int) -> Tensor:
    """out[indices[i]] += rows[i] for every i whose index is not `padding_index`; the same sum on every run."""
    if padding_index >= 0:
        rows = rows.masked_fill((indices == padding_index).unsqueeze(1), 0)
    rows = rows.to(out.dtype)
    # Bitwise what autograd's own backward gives on CPU: in bfloat16 index_add_ rounds in another order. On CUDA
    # index_add_ adds in no fixed order.
    if out.device.type == "cpu" and out.dtype in (torch.float32, torch.float64):
        return out.index_add_(0, indices, rows)
    return out.index_put_((indices.long(),), rows, accumulate=True)


def _slot_for(weight: object, input: object) -> Slot | None:
    """The slot of a weight that may be written in the backward of this call, or None: then the call is plain."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    slot = SLOTS.get(weight)
    if slot is None or not weight.requires_grad or type(input) not in (Tensor, nn.Parameter):  # type: ignore[attr-defined]
        return None
    if _torch.transforms_active() or _torch.forward_mode_active():
        return None
    return slot


def _product_dtype(slot: Slot, x: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype | None:
    """The dtype that this product is computed in, or None where only the plain call knows."""
    tensors = (x, weight) if bias is None else (x, weight, bias)
    if any(t.device != x.device for t in tensors):
        return None
    if not torch.is_autocast_enabled(x.device.type):
        return x.dtype if x.is_floating_point() and all(t.dtype == x.dtype for t in tensors) else None
    dtype = torch.get_autocast_dtype(x.device.type)
    if any(t.dtype not in _LOW_OR_SINGLE for t in tensors):
        return None
    is_cast_alive = slot.cast is not None and slot.cast() is not None
    if weight.dtype != dtype and is_cast_alive and not _torch.saved_tensor_hooks_active():
        slot.why_added = "used more than once under autocast: later uses share autocast's own cast"
        return None
    return dtype


@functools.cache
def linear_adds_inside(dims: int, is_contiguous: bool, device: torch.device) -> bool:
    """Whether `F.linear` adds its bias inside the product, and not after it. See [Note: same forward]."""
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        x = torch.zeros([2] * dims, device=device)
        weight, bias = torch.zeros(2, 2, device=device, requires_grad=True), torch.zeros(2, device=device)
        y = torch.nn.functional.linear(x if is_contiguous else x.transpose(0, 1), weight, bias)
    return y.grad_fn is not None and y.grad_fn.name() != "AddBackward0"


def _packed_linear(self: nn.Linear, input: Tensor) -> Tensor:
    slot = _slot_for(self.weight, input)
    if slot is not None and input.dim() >= 2 and (dtype := _product_dtype(slot, input, self.weight, self.bias)):
        adds_inside = self.bias is not None and linear_adds_inside(input.dim(), input.is_contiguous(), input.device)
        return PackedProduct.apply(input.to(dtype), self.weight, self.bias, True, adds_inside, dtype)  # type: ignore[no-any-return]
    return type(self).forward(self, input)


def _packed_conv1d(self: Any, x: Tensor) -> Tensor:
    slot = _slot_for(self.weight, x)
    if slot is not None and x.is_contiguous() and (dtype := _product_dtype(slot, x, self.weight, self.bias)):
        return PackedProduct.apply(x.to(dtype), self.weight, self.bias, False, True, dtype)  # type: ignore[no-any-return]
    return type(self).forward(self, x)  # type: ignore[no-any-return]


def _packed_embedding(self: nn.Embedding, input: Tensor) -> Tensor:
    slot = _slot_for(self.weight, input)
    if slot is None or self.max_norm is not None or self.scale_grad_by_freq or self.sparse:
        return type(self).forward(self, input)
    padding_index = -1 if self.padding_idx is None else self.padding_idx
    return PackedLookup.apply(self.weight, input, padding_index)  # type: ignore[no-any-return]


_WRITERS: dict[Callable[..., Any], Callable[..., Any]] = {}


def register_writer(plain_forward: Callable[..., Any], packed_forward: Callable[..., Any]) -> None:
    """Say that modules whose class has `plain_forward` are to call `packed_forward` once they are packed.

    `packed_forward(module, ...)` must return what `plain_forward` returns, and call `deliver` in its backward.
    """
    assert isinstance(packed_forward, FunctionType)
    # A bound method is pickled by its name: a saved module is to come back with the forward of its class.
    packed_forward.__name__ = "forward"
    _WRITERS[plain_forward] = packed_forward


register_writer(nn.Linear.forward, _packed_linear)
register_writer(nn.Embedding.forward, _packed_embedding)


def teach(module: nn.Module) -> bool:
    """Let the module write its weight's gradient, if it can: its class, parameters and state_dict stay as they are."""
    _register_conv1d()
    packed_forward = _WRITERS.get(type(module).forward)
    if packed_forward is None or "forward" in module.__dict__:
        return False
    module.forward = MethodType(packed_forward, module)
    return True


def unteach(module: nn.Module) -> None:
    """Give the module the forward of its class back."""
    method = module.__dict__.get("forward")
    if isinstance(method, MethodType) and method.__func__ in _WRITERS.values():
        del module.__dict__["forward"]


def _register_conv1d() -> None:
    """transformers is not imported for its Conv1D: a model that has one has imported it."""
    conv1d = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    if conv1d is not None and conv1d.forward not in _WRITERS:
        register_writer(conv1d.forward, _packed_conv1d)
