"""Logits that are computed only when somebody needs their values.

`LazyLogits` is what a projection to a vocabulary returns instead of its output: a tensor with shape, dtype, device and
a place in the autograd graph, but no memory. `F.cross_entropy` on it runs `linear_cross_entropy`, which never has all
logits at once. Views, slices of rows, casts, multiples and a tanh give another `LazyLogits`. All else computes the
values, once, by the ops that plain PyTorch would have run, and goes on with those.

[Note: the graph] The tensor that the module returns is the output of a node, `_Project`, whose inputs are x, W and b.
Whoever uses it gets stand-ins for these three from a second node, `_Open`, whose input is that tensor: the loss and the
values are ordinary functions of them. In backward `_Open` wraps their three gradients into one `ProjectedGradient`, a
tensor with the shape of the logits and no memory either, and `_Project` unwraps it. So who follows the graph from the
loss to the logits and on to the parameters finds what he expects. A hook on the logits would find no values in such a
gradient: where there is one, the loss is computed from values, and those are the output of a node behind the logits
(`_Values`). What is derived from logits has a node behind them too (`_Derive`), for whoever hands it to a Function.

[Note: changes] Until the values are computed x, W and b have to stay as they were. Their versions are compared, and
`ChangedError` is raised where one has changed.

[Note: in place] Who writes into lazy logits writes into their values, from which the tensor is a copy then, in the
graph too (`_Replace`). Lazy views of it would not see that: it is an error where there are any.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leangrad.errors import ChangedError, LeangradError
from leangrad.functional import autocast_enabled
from leangrad.loss.lazy.gradient import Parts, ProjectedGradient, projected, without_memory
from leangrad.overridable import overridable
from leangrad.packed.slots import SLOTS, deliver

__all__ = ["HANDLERS", "LazyLogits", "derive", "is_hooked", "project"]

Op = Callable[..., Tensor]  # of logits, and of others


def project(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, asked: Callable[[bool], None] = lambda _: None
) -> LazyLogits:
    """`F.linear(x, weight, bias)`, put off.

    asked: called with True when a loss is computed from it for a gradient, with False when its values are.

    >>> logits = project(torch.ones(2, 3), torch.ones(5, 3))
    >>> logits.shape, logits.view(-1).sum()
    (torch.Size([2, 5]), tensor(30.))
    """
    source = _Source(x, weight, bias, asked)
    if torch.is_grad_enabled() and any(source.needs):
        logits: LazyLogits = _project(source, x, weight, bias)
    else:
        logits = _Rows(source).empty(source.shape, source.dtype)
    source.root = weakref.ref(logits)
    return logits


class _Source:
    """The call that was put off: its arguments as they were, and its autocast."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, asked: Callable[[bool], None]) -> None:
        self.x, self.weight, self.bias = x.detach(), weight.detach(), None if bias is None else bias.detach()
        self.needs = tuple(t is not None and t.requires_grad for t in (x, weight, bias))
        self.asked = asked
        self.root: Callable[[], LazyLogits | None] = lambda: None  # what the module has returned
        self.shape = (*x.shape[:-1], len(weight))
        self.is_autocast = autocast_enabled(x.device.type)
        self.dtype = torch.get_autocast_dtype(x.device.type) if self.is_autocast else x.dtype
        self._states = self._now()
        self._opened: tuple[Tensor, Tensor, Tensor | None] | None = None

    def autocast(self) -> torch.autocast:
        """That of the module's call."""
        return torch.autocast(
            self.x.device.type, dtype=self.dtype if self.is_autocast else None, enabled=self.is_autocast
        )

    def _now(self) -> list[Any]:
        tensors = (self.x, self.weight, self.bias)
        return [None if t is None else (t._version, t.untyped_storage().nbytes()) for t in tensors]

    def check(self) -> None:
        """See [Note: changes]."""
        for name, before, now in zip(("input", "weight", "bias"), self._states, self._now(), strict=True):
            if before != now:
                raise _changed(name)

    def open(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """X, W and b for a loss; see [Note: the graph]."""
        self.check()
        if not torch.is_grad_enabled() or not any(self.needs):
            return self.x, self.weight, self.bias
        if self._opened is None:
            root = self.root()
            assert root is not None  # what was derived from it holds it
            self._opened = _Open.apply(root, self)
        return self._opened


def _changed(name: str) -> ChangedError:
    return ChangedError(
        f"expected logits to be read before the {name} of their projection changes, as an optimizer's step changes it: "
        "their values were not computed until now. Take what you need of them before that, such as logits.argmax(-1) "
        "or logits.clone(), or use leangrad.lean(model, exact=True)"
    )


class _Rows:
    """Some of the logits: x's rows through ``picks``; of these y = before·z, or after·tanh(before·z)."""

    def __init__(self, source: _Source) -> None:
        self.source = source
        self.picks: tuple[Op, ...] = ()
        self.ops: tuple[tuple[Op, tuple[Tensor, ...]], ...] = ()  # what is done to the values of these rows
        self.bias: Tensor | None = None  # what is added to them first, beside the projection's own
        self.bias_version = 0
        self.is_transposed = False  # the vocabulary is the second of three dimensions
        self.before, self.after = 1.0, None  # type: float, float | None
        self.parent: LazyLogits | None = None  # what this was derived from
        self.values: Tensor | None = None  # once they are computed
        self.children: weakref.WeakSet[LazyLogits] = weakref.WeakSet()

    def empty(self, shape: Any, dtype: torch.dtype) -> LazyLogits:
        """The tensor that stands for them, which has no place in the graph yet."""
        logits: LazyLogits = without_memory(LazyLogits, shape, dtype, self.source.x.device)
        logits._rows = self
        return logits

    def compute(self) -> Tensor:
        """The values, in the graph of x, W and b."""
        x, weight, bias = self.source.open()
        for pick in self.picks:
            x = pick(x)
        with self.source.autocast():
            values = F.linear(x, weight, bias)
        self.check_bias()
        for op, others in self.ops:
            values = op(values, *others)
        return values

    def check_bias(self) -> None:
        """See [Note: changes]."""
        if self.bias is not None and self.bias._version != self.bias_version:
            raise _changed("bias")


class LazyLogits(Tensor):
    """See the top of this file."""

    _rows: _Rows

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        first = args[0] if args else kwargs.get("input")
        with torch._C.DisableTorchFunctionSubclass():
            if type(first) is LazyLogits and first._rows.values is None:
                if name in _NATIVE:
                    return func(*args, **kwargs)
                handler = HANDLERS.get(name)
                if handler is not None:
                    result = handler(*args, **kwargs)
                    if result is not NotImplemented:
                        return result
            if type(first) is LazyLogits and _writes(name):
                return _write(func, first, args, kwargs)
            return func(*_with_values(args), **_with_values(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """A call from within torch, below autograd."""
        return func(*_with_values(args, graded=False), **_with_values(kwargs or {}, graded=False))


# ------------------------------------------------------------------------------------------------------------ the graph


class _Project(torch.autograd.Function):
    """Logits of x, W and b."""

    @staticmethod
    def forward(ctx: Any, source: _Source, x: Tensor, weight: Tensor, bias: Tensor | None) -> LazyLogits:
        ctx.save_for_backward(x, weight)
        ctx.dtypes = [None if t is None else t.dtype for t in (x, weight, bias)]
        ctx.parameters = [None if SLOTS.get(t) is None else t for t in (x, weight, bias)]  # packed ones
        ctx.dtype = source.dtype
        return _Rows(source).empty(source.shape, source.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        parts = g.parts if type(g) is ProjectedGradient else Parts(dense=g)
        if parts.dense is not None:
            parts = parts.plus(_dense_parts(ctx, parts.dense))
        found: list[Tensor | None] = [None]
        for place, (gradient, dtype, parameter) in enumerate(zip(parts[:3], ctx.dtypes, ctx.parameters, strict=True)):
            if gradient is None:
                found.append(None)
            elif parameter is None or torch.is_grad_enabled():
                found.append(gradient.to(dtype))
            else:
                found.append(deliver(ctx, place, parameter, partial(_write_gradient, gradient, dtype)))
        return tuple(found)


def _write_gradient(gradient: Tensor, dtype: torch.dtype, out: Tensor | None, add: bool) -> Tensor:
    if out is None:
        return gradient.to(dtype)
    return out.add_(gradient) if add else out.copy_(gradient)


_project = overridable(_Project.apply)


def _dense_parts(ctx: Any, g: Tensor) -> Parts:
    """The gradients of a plain projection, which can be differentiated again."""
    x, weight = (t.to(ctx.dtype) for t in ctx.saved_tensors)
    _, needs_x, needs_weight, needs_bias = ctx.needs_input_grad
    rows = g.reshape(-1, g.shape[-1])
    return Parts(
        (rows @ weight).reshape(x.shape) if needs_x else None,
        rows.t() @ x.reshape(-1, x.shape[-1]) if needs_weight else None,
        rows.sum(0) if needs_bias else None,
    )


class _Open(torch.autograd.Function):
    """Stand-ins for x, W and b."""

    @staticmethod
    def forward(ctx: Any, logits: LazyLogits, source: _Source) -> tuple[Tensor | None, ...]:
        ctx.like = source.shape, source.dtype, source.x.device
        ctx.set_materialize_grads(False)
        found = [None if t is None else t.detach() for t in (source.x, source.weight, source.bias)]
        ctx.mark_non_differentiable(
            *(t for t, needed in zip(found, source.needs, strict=True) if t is not None and not needed)
        )
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(g is None for g in gradients):
            return None, None
        return projected(Parts(*gradients), *ctx.like), None


class _Values(torch.autograd.Function):
    """The values of lazy logits, for whose gradient somebody waits."""

    @staticmethod
    def forward(ctx: Any, logits: LazyLogits) -> Tensor:
        values = logits._rows.compute()
        return values if values._base is None else values.clone()  # a Function's view could not be written to

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class _Derive(torch.autograd.Function):
    """Lazy logits of others."""

    @staticmethod
    def forward(ctx: Any, logits: LazyLogits, op: Op, make: Callable[[], LazyLogits], *others: Tensor) -> LazyLogits:
        ctx.rows, ctx.op, ctx.others = logits._rows, op, others
        return make()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        is_graded = torch.is_grad_enabled()
        with torch.no_grad():
            values = ctx.rows.compute()
        with torch.enable_grad():
            inputs = [values.requires_grad_(), *(t.detach().requires_grad_() for t in ctx.others)]
            found, *rest = torch.autograd.grad(ctx.op(*inputs), inputs, g, create_graph=is_graded)
        return found, None, None, *rest


class _Replace(torch.autograd.Function):
    """Lazy logits that are from now on a copy of ``values``."""

    @staticmethod
    def forward(ctx: Any, logits: LazyLogits, values: Tensor) -> LazyLogits:
        ctx.mark_dirty(logits)
        return logits

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:
        return None, g


def _values(logits: LazyLogits) -> Tensor:
    """What ``logits`` stands for, as a tensor in the graph."""
    rows = logits._rows
    values = rows.values
    is_graded = torch.is_grad_enabled() and logits.requires_grad
    if values is not None and (values.requires_grad or not is_graded):
        return values
    if is_graded:
        rows.source.asked(False)
    with torch.set_grad_enabled(is_graded):
        values = _Values.apply(logits) if is_graded and is_hooked(logits) else rows.compute()
    rows.values = values
    return values


def _with_values(tree: Any, *, graded: bool = True) -> Any:
    if type(tree) is LazyLogits:
        if graded:
            return _values(tree)
        with torch.no_grad():
            return _values(tree)
    if type(tree) in (tuple, list):
        return type(tree)(_with_values(one, graded=graded) for one in tree)
    if type(tree) is dict:
        return {key: _with_values(one, graded=graded) for key, one in tree.items()}
    return tree


def _writes(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in _WRITERS


def _write(func: Callable[..., Any], logits: LazyLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """See [Note: in place]."""
    rows = logits._rows
    if rows.parent is not None or any(child._rows.values is None for child in rows.children):
        raise LeangradError(
            "expected logits that nothing was derived from before they are written to, got a view of them or one with "
            "views; write to logits.clone(), or use leangrad.lean(model, exact=True)"
        )
    values = _values(logits)
    result = func(values, *_with_values(args[1:]), **_with_values(kwargs))
    rows.values = values
    if values.requires_grad:
        _Replace.apply(logits, values)
    return logits if result is values else result


def derive(
    logits: LazyLogits,
    op: Op,
    *,
    shape: Any = None,
    dtype: torch.dtype | None = None,
    pick: Op | None = None,
    before: float | None = None,
    after: float | None = None,
    bias: Tensor | None = None,
    is_transposed: bool = False,
    is_detached: bool = False,
) -> LazyLogits:
    """Lazy logits that ``op`` makes of others.

    pick: what it does to x, if it takes rows; else it changes values. before, after: those of what it gives.
    """
    rows = logits._rows
    new = _Rows(rows.source)
    new.picks = rows.picks if pick is None else (*rows.picks, pick)
    new.before = rows.before if before is None else before
    new.after = rows.after if after is None else after
    others = () if bias is None else (bias,)
    new.ops = rows.ops if pick is not None else (*rows.ops, (op, others))
    new.bias = rows.bias if bias is None else bias
    new.bias_version = 0 if new.bias is None else rows.bias_version if bias is None else bias._version
    new.is_transposed = rows.is_transposed or is_transposed
    new.parent = logits
    make = partial(new.empty, logits.shape if shape is None else shape, dtype or logits.dtype)
    needs = logits.requires_grad or (bias is not None and bias.requires_grad)
    if torch.is_grad_enabled() and needs and not is_detached:
        made: LazyLogits = _Derive.apply(logits, op, make, *others)
    else:
        made = make()
    rows.children.add(made)
    return made


def is_hooked(logits: LazyLogits | None) -> bool:
    """Whether somebody waits for the gradient of these logits or of those that they were derived from."""
    while logits is not None:
        if logits._backward_hooks or logits.retains_grad:
            return True
        logits = logits._rows.parent
    return False


def _name(func: Any) -> str:
    name: str = getattr(func, "__name__", "")
    return f"{func.__self__.__name__}.{name}" if name in ("__get__", "__set__") else name


# What a tensor without memory knows by itself: attributes and methods; and methods that write.
# fmt: off
_ATTRIBUTES = (
    "shape", "ndim", "dtype", "device", "layout", "requires_grad", "grad_fn", "is_leaf", "is_cuda", "is_cpu",
    "is_meta", "is_sparse", "is_nested", "itemsize", "nbytes", "retains_grad", "output_nr", "_backward_hooks",
    "is_quantized", "is_mkldnn", "is_xpu", "is_mps", "is_sparse_csr", "names", "_version", "grad", "_base",
    "is_ipu", "is_hpu", "is_vulkan", "is_xla", "is_mtia", "is_maia",
)
_METHODS = (
    "size", "dim", "ndimension", "numel", "nelement", "is_floating_point", "is_complex", "is_contiguous", "stride",
    "element_size", "get_device", "__hash__", "register_hook", "retain_grad", "is_signed", "is_inference",
    "is_conj", "is_neg", "storage_offset", "__len__", "_is_view",
)
_WRITERS = (
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ipow__", "__imod__",
)
# fmt: on
_NATIVE = frozenset((*(f"{name}.__get__" for name in _ATTRIBUTES), *_METHODS, "grad.__set__"))
# By the name of the function: what is made of lazy logits without their values; NotImplemented: these are needed.
HANDLERS: dict[str, Callable[..., Any]] = {}
