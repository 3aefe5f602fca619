"""The ops that write a weight's gradient straight into its slot.

[Note: autocast]
Autocast casts a weight once and caches the cast for all uses inside its context. A cast that is made with grad mode off
(as inside an autograd Function) would be cached without its history, and plain uses of the same weight would then
silently get no gradient. So a Function here never lets autocast see a float32 weight: it casts the weight itself and
keeps the cast for backward, as plain PyTorch does. If a weight is used again while that cast is alive, the call is
plain, and plain casts are shared: so a layer that is called a hundred times does not keep a hundred casts.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from leangrad import _torch
from leangrad.ledger.observe.active_region import ledger_saves
from leangrad.ops.linear import write_wider, writes_wider
from leangrad.overridable import overridable

from .slots import SLOTS, Compute, deliver

#: Elements that are widened at a time: large enough to be fast, too small to matter.
_BLOCK = 1 << 14

_PRODUCT, _SUM = "its layer writes the product", "its layer writes the sum"  # what the report says


def write_product(x: Tensor, g: Tensor, out: Tensor | None, add: bool, like: Tensor, is_transposed: bool) -> Tensor:
    """Compute the gradient of a weight for x (n, in) and g (n, out): a new tensor, or over `out`, or added to `out`.

    like: the weight, for its shape and strides.
    is_transposed: the weight is (out, in) and its gradient gᵀx; else it is (in, out) and its gradient xᵀg.

    Autograd computes xᵀg, unless the matrix W that x is multiplied by lies column by column in memory: then gᵀx. This
    function computes the same product, and transposes it if need be.
    """
    first, second = (1, 0) if is_transposed else (0, 1)  # the dimensions of `like` that are those of W
    by_columns = like.stride(first) == 1 and like.stride(second) == like.shape[first]
    left, right = (g.t(), x) if by_columns else (x.t(), g)
    turns = by_columns != is_transposed
    if out is None:
        product = left.mm(right)
        return product.t() if turns else product
    into = out.t() if turns else out
    if into.dtype == left.dtype:
        if add:
            into.addmm_(left, right)
        else:
            torch.mm(left, right, out=into)
    elif writes_wider(left.device, left.dtype, into.dtype):
        write_wider(left, right, into, add)
    elif add:
        _add_narrower(into, left.mm(right))
    else:
        into.copy_(left.mm(right))
    return out


def _add_narrower(into: Tensor, product: Tensor) -> None:
    """Add a product of a narrower dtype; on a CPU in blocks, because an add of two dtypes first widens one of them."""
    if into.device.type != "cpu":
        into.add_(product)
        return
    rows = max(1, _BLOCK // max(1, product.shape[1]))
    for block, addend in zip(into.split(rows), product.split(rows), strict=True):
        block.add_(addend)


def write_sum(g: Tensor, out: Tensor | None, add: bool) -> Tensor:
    """Compute the sum of g over all its leading dimensions: a new tensor, or over `out`, or added to `out`."""
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

    Keeps x and W for backward, and nothing else, as the plain product does.
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
        """Returns the product in `dtype`, which `x` already has; W is `weight.T` if `is_transposed`."""
        w, b = _in_dtype(weight, dtype), None if bias is None else _in_dtype(bias, dtype)
        if w is not weight:
            slot = SLOTS.get(weight)
            assert slot is not None
            slot.cast = TensorWeakRef(w)
        matrix = w.t() if is_transposed else w
        y = x.new_empty(*x.shape[:-1], matrix.shape[1])
        rows, y_rows = _rows(x), _rows(y)
        if b is not None and adds_inside:
            torch.addmm(b, rows, matrix, out=y_rows)
        else:
            torch.mm(rows, matrix, out=y_rows)
            if b is not None:
                y.add_(b)
        # The cast of a weight is kept for backward, as in plain PyTorch. Under a ledger, which rebuilds such casts of
        # plain ops, it is not kept.
        ctx.keeps_cast = w is weight or not ledger_saves()
        ctx.save_for_backward(x, w if ctx.needs_input_grad[0] and ctx.keeps_cast else None)
        # The parameters themselves, because backward writes their `.grad`. It reads the value of `ctx.weight` only to
        # cast it again, and then it checks the version.
        ctx.weight, ctx.bias, ctx.version = weight, bias, _torch.version(weight)
        ctx.is_transposed, ctx.adds_inside = is_transposed, adds_inside
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Returns dx; writes dW and db into their slots, or returns them if autograd has to accumulate them."""
        x, w = ctx.saved_tensors
        rows = _rows(g)
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            if not ctx.keeps_cast or (torch.is_grad_enabled() and w.dtype != ctx.weight.dtype):
                w = _weight_as_it_was(ctx).to(x.dtype)
            dx = _input_gradient(x, rows, w if ctx.is_transposed else w.t())
        if ctx.needs_input_grad[1]:

            def compute(out: Tensor | None, add: bool) -> Tensor:
                return write_product(_rows(x), rows, out, add, ctx.weight, ctx.is_transposed)

            dw = deliver(ctx, 1, ctx.weight, compute, _PRODUCT)
        if ctx.needs_input_grad[2]:
            addend = rows if ctx.adds_inside else g
            db = deliver(ctx, 2, ctx.bias, lambda out, add: write_sum(addend, out, add), _SUM)
        return dx, dw, db, None, None, None


packed_product = overridable(PackedProduct.apply, product=True)


def _weight_as_it_was(ctx: Any) -> Tensor:
    weight: Tensor = ctx.weight
    version = _torch.version(weight)
    if version != ctx.version:
        raise RuntimeError(
            "backward reads a weight in autocast's dtype, or with create_graph=True, that was changed in place after "
            f"the forward pass (version {version}, expected {ctx.version}); run backward before the change"
        )
    return weight


def _input_gradient(x: Tensor, g: Tensor, transposed: Tensor) -> Tensor:
    """Returns g @ W.T in the shape of x. If x lies column by column, it is computed transposed, as autograd does."""
    if x.dim() == 2 and x.stride(0) == 1 and x.stride(1) == x.shape[0]:
        return transposed.t().mm(g.t()).t()
    dx = g.mm(transposed)
    return dx if x.dim() == 2 else dx.view(x.shape)


def _in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _rows(tensor: Tensor) -> Tensor:
    """Returns the tensor as a matrix, with all leading dimensions as one."""
    return tensor if tensor.dim() == 2 else tensor.flatten(0, -2)


class NodeWriter:
    """Writes the gradients of the parameters among the tensors of a node of `single_node`, such as that of an MLP."""

    def __init__(self, node: Any, tensors: Sequence[Tensor | None]) -> None:
        self._node, self._tensors = node, tensors

    def product(self, index: int, x: Tensor, g: Tensor) -> Tensor | None:
        """Returns gᵀ x for the weight at `index`, or None if it was written or is not part of this backward."""
        weight = self._tensors[index]
        assert weight is not None
        return self._deliver(index, lambda out, add: write_product(x, g, out, add, weight, True), _PRODUCT)

    def sum(self, index: int, g: Tensor) -> Tensor | None:
        """Returns Σ_rows g for the bias at `index`, or None if it was written or is not part of this backward."""
        return self._deliver(index, lambda out, add: write_sum(g, out, add), _SUM)

    def _deliver(self, index: int, compute: Compute, how: str) -> Tensor | None:
        place = sum(tensor is not None for tensor in self._tensors[:index])  # a node has no edge for None
        return deliver(self._node, place, self._tensors[index], compute, how)


def node_writer(node: Any, tensors: Sequence[Tensor | None]) -> NodeWriter | None:
    """Returns a `NodeWriter` if any of the node's tensors is a packed parameter, else None."""
    if not SLOTS or all(SLOTS.get(tensor) is None for tensor in tensors):
        return None
    return NodeWriter(node, tensors)


class PackedLookup(torch.autograd.Function):
    """`F.embedding` whose backward adds the rows of its gradient straight into the weight's slot. Keeps the indices."""

    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, indices: Tensor, padding_index: int) -> Tensor:
        """Returns weight[indices]."""
        ctx.save_for_backward(indices)
        ctx.weight, ctx.padding_index = weight, padding_index
        return torch.embedding(weight, indices, padding_index)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None, None]:
        """Add the rows of g to the weight's gradient, by index; returns that if autograd has to accumulate it."""
        (indices,), count = ctx.saved_tensors, ctx.weight.shape[0]

        def compute(out: Tensor | None, add: bool) -> Tensor:
            if out is None:
                dense: Tensor = torch.ops.aten.embedding_dense_backward(g, indices, count, ctx.padding_index, False)
                return dense
            return add_rows(
                out if add else out.zero_(), indices.reshape(-1), g.reshape(-1, out.shape[1]), ctx.padding_index
            )

        return deliver(ctx, 0, ctx.weight, compute, "its layer adds the rows"), None, None


packed_lookup = overridable(PackedLookup.apply)


def add_rows(out: Tensor, indices: Tensor, rows: Tensor, padding_index: int) -> Tensor:
    """out[indices[i]] += rows[i] for every i whose index is not `padding_index`; the same sum on every run."""
    if padding_index >= 0:
        rows = rows.masked_fill((indices == padding_index).unsqueeze(1), 0)
    rows = rows.to(out.dtype)
    # The same bits as autograd's own backward on a CPU. In bfloat16 index_add_ rounds in another order there; on CUDA
    # it adds in no fixed order.
    if out.device.type == "cpu" and out.dtype in (torch.float32, torch.float64):
        return out.index_add_(0, indices, rows)
    return out.index_put_((indices.long(),), rows, accumulate=True)
