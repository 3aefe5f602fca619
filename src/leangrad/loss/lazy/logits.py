"""Logits that are computed only when somebody needs their values.

`LazyLogits` is what a projection to a vocabulary returns instead of its output: a tensor with shape, dtype, device and
a place in the autograd graph, but no memory. `F.cross_entropy` on it runs `linear_cross_entropy`, which never has all
logits at once. Views, slices of rows, casts, multiples and a tanh give another `LazyLogits`. All else computes the
values, once, by the ops that plain PyTorch would have run, and goes on with those.

[Note: the graph] The tensor that the module returns is the output of a node, `_Project`, whose inputs are x, W and b.
A loss gets stand-ins for these three from a second node, `_Open`, whose input is that tensor, and is an ordinary
function of them. In backward `_Open` wraps their three gradients into one `ProjectedGradient`, a tensor with the shape
of the logits and no memory either, and `_Project` unwraps it. So who follows the graph from the loss to the logits and
on to the parameters finds what he expects. A hook on the logits would find no values in such a gradient: where there is
one, the loss is computed from values. These are the output of a node behind the logits (`_Values`), whose gradient is
an ordinary tensor. What is derived from logits has a node behind them (`_Derive`).

[Note: changes] Until the values are computed x, W and b have to stay as they were. Their versions are compared, and
`ChangedError` is raised where one has changed.

[Note: in place] Who writes into lazy logits writes into their values, from which the tensor is a copy then, in the
graph too (`_Replace`). Views of them have values of their own and do not see that. So it is an error to read one tensor
after another was written to that plain PyTorch would have in the same memory (`Memory`), and to write to one after
another was read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leangrad import _torch
from leangrad._torch import compiler
from leangrad.errors import LeangradError
from leangrad.loss.lazy.gradient import Parts, ProjectedGradient, projected, without_memory
from leangrad.loss.lazy.source import Memory, Source, changed, version
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
    source = Source(x, weight, bias, asked)
    if torch.is_grad_enabled() and any(source.needs):
        return _project(source, x, weight, bias)  # type: ignore[no-any-return]
    return _Rows(source).empty(source.shape, source.dtype)


class _Rows:
    """Some of the logits: x's rows through ``picks``; of these y = before·z, or after·tanh(before·z)."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.picks: tuple[Op, ...] = ()
        self.ops: tuple[tuple[Op, tuple[Tensor, ...]], ...] = ()  # what is done to the values of these rows
        self.bias: Tensor | None = None  # what is added to them first, beside the projection's own
        self.bias_version = 0
        self.is_transposed = False  # the vocabulary is the second of three dimensions
        self.before, self.after = 1.0, None  # type: float, float | None
        self.parent: LazyLogits | None = None  # what this was derived from
        self.values: Tensor | None = None  # once they are computed; in the graph if the logits are
        self.memory = Memory()
        self.is_told = False  # that its values are read
        self._opened: tuple[Tensor, Tensor, Tensor | None] | None = None

    def empty(self, shape: Any, dtype: torch.dtype) -> LazyLogits:
        """The tensor that stands for them, which has no place in the graph yet."""
        logits: LazyLogits = without_memory(LazyLogits, shape, dtype, self.source.x.device)
        logits._rows = self
        return logits

    def open(self, logits: LazyLogits) -> tuple[Tensor, Tensor, Tensor | None]:
        """X, W and b for a loss of ``logits``, whose rows these are; see [Note: the graph]."""
        source = self.source
        source.check()
        self.check_writes()
        if not torch.is_grad_enabled() or not logits.requires_grad or not any(source.needs):
            return source.x, source.weight, source.bias
        if self._opened is None:
            self._opened = _Open.apply(logits, source)
        return self._opened

    def compute(self) -> Tensor:
        """The values, in no graph."""
        self.source.check()
        self.check_bias()
        x, weight, bias = self.source.x, self.source.weight, self.source.bias
        with torch.no_grad():
            for pick in self.picks:
                x = pick(x)
            with self.source.autocast():
                values = F.linear(x, weight, bias)
            for op, others in self.ops:
                values = op(values, *others)
        return values

    def check_bias(self) -> None:
        """See [Note: changes]."""
        if self.bias is not None and version(self.bias) != self.bias_version:
            raise changed("bias")

    def check_writes(self) -> None:
        """See [Note: in place]."""
        if self.memory.is_written(self, by_others=True):
            raise LeangradError(_NO_WRITES)

    def are_replaced(self) -> bool:
        """Whether the values are no longer those of the projection, or a leaf."""
        values = self.values
        return values is not None and (
            (values.is_leaf and values.requires_grad) or self.memory.is_written(self, by_others=False)
        )


_NO_WRITES = (
    "logits, or a view of them, were written to, and others of them are read too: each have values of their own here, "
    "and do not see what is written to the others; write to logits.clone(), or use leangrad.lean(model, exact=True)"
)


class LazyLogits(Tensor):
    """See the top of this file."""

    _rows: _Rows

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return compiler.untraced(_call)(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """A call from within torch, below autograd."""
        with torch.no_grad():
            args, kwargs = _with_values(args), _with_values(kwargs or {})
        return func(*args, **kwargs)


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func`` of lazy logits."""
    name = _name(func)
    first = args[0] if args else kwargs.get("input")
    with torch._C.DisableTorchFunctionSubclass():
        if func is torch.autograd.grad:  # of these tensors themselves
            return func(*args, **kwargs)
        if type(first) is LazyLogits:
            if name in _NATIVE and not first._rows.are_replaced():
                return func(*args, **kwargs)
            result = _handle(name, args, kwargs) if first._rows.values is None else NotImplemented
            if result is not NotImplemented:
                return result
            if name in ("requires_grad_", "requires_grad.__set__") and not first.requires_grad:
                func(_values(first), *args[1:], **kwargs)
                return first
            if _writes(name):
                return _write(func, first, args, kwargs)
        args, kwargs = _with_values(args), _with_values(kwargs)
    result = func(*args, **kwargs)
    is_same = type(first) is LazyLogits and result is first._rows.values  # such as `.double()` of float64
    return first if is_same else result


def _handle(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handler = HANDLERS.get(name)
    if handler is None:
        return NotImplemented
    try:
        return handler(*args, **kwargs)
    except TypeError:  # arguments that it does not know; if torch does not either, it says so
        return NotImplemented


# ------------------------------------------------------------------------------------------------------------ the graph


class _Project(torch.autograd.Function):
    """Logits of x, W and b."""

    @staticmethod
    def forward(ctx: Any, source: Source, x: Tensor, weight: Tensor, bias: Tensor | None) -> LazyLogits:
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
    def forward(ctx: Any, logits: LazyLogits, source: Source) -> tuple[Tensor | None, ...]:
        ctx.like = logits.shape, logits.dtype, logits.device
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
    """The values of lazy logits."""

    @staticmethod
    def forward(ctx: Any, logits: LazyLogits) -> Tensor:
        return logits._rows.compute().detach()  # a Function's view could not be written to

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class _Derive(torch.autograd.Function):
    """Lazy logits of others."""

    @staticmethod
    def forward(ctx: Any, logits: LazyLogits, op: Op, make: Callable[[], LazyLogits], *others: Tensor) -> LazyLogits:
        ctx.op, ctx.others, ctx.like = op, others, (logits.shape, logits.dtype, logits.device)
        ctx.is_linear = op is not torch.tanh
        ctx.logits = None if ctx.is_linear else logits  # until the last backward
        return make()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        parts = g.parts if type(g) is ProjectedGradient else Parts(dense=g)
        logits = ctx.logits
        if not _torch.graph_is_kept():
            ctx.logits = None
        if parts.dense is None:
            return projected(parts, *ctx.like), None, None, *(None for _ in ctx.others)
        found, *rest = _gradients_of(ctx, logits, parts.dense)
        parts = parts._replace(dense=found)
        return (found if parts[:3] == (None, None, None) else projected(parts, *ctx.like)), None, None, *rest


def _gradients_of(ctx: Any, logits: LazyLogits | None, g: Tensor) -> tuple[Tensor, ...]:
    """Those of what the op was applied to; with create_graph=True they depend on its values, in the graph."""
    is_graded = torch.is_grad_enabled()
    shape, dtype, device = ctx.like
    with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        if ctx.is_linear:
            values = torch.zeros((), dtype=dtype, device=device).expand(shape).requires_grad_()
        elif logits is None:
            raise LeangradError("backward runs a second time through logits: the first needs retain_graph=True")
        elif not is_graded:
            values = logits._rows.compute().requires_grad_()
        elif logits._rows.are_replaced():
            raise LeangradError(_NO_WRITES)
        else:
            values = _values(logits)
        inputs = [values, *(t.detach().requires_grad_() for t in ctx.others)]
        return torch.autograd.grad(ctx.op(*inputs), inputs, g, create_graph=is_graded)


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
    rows.check_writes()
    if torch.is_grad_enabled() and logits.requires_grad and not rows.is_told:
        rows.is_told = True
        rows.source.asked(False)
    if rows.values is None:
        if torch.is_inference_mode_enabled() and not logits.is_inference():
            return rows.compute()  # which nobody could use later
        with torch.enable_grad():
            rows.values = _Values.apply(logits)
        rows.memory.note(rows, rows.values)
    return rows.values


def _with_values(tree: Any) -> Any:
    if type(tree) is LazyLogits:
        return _values(tree)
    if type(tree) in (tuple, list):
        return type(tree)(_with_values(one) for one in tree)
    if type(tree) is dict:
        return {key: _with_values(one) for key, one in tree.items()}
    return tree


def _writes(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in _WRITERS


def _write(func: Callable[..., Any], logits: LazyLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """See [Note: in place]."""
    rows = logits._rows
    if any(by() is not rows for by, _, _ in rows.memory.probes):
        raise LeangradError(_NO_WRITES)
    values = _values(logits)
    result = func(values, *_with_values(args[1:]), **_with_values(kwargs))
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
    rows.check_writes()
    new = _Rows(rows.source)
    new.picks = rows.picks if pick is None else (*rows.picks, pick)
    new.before = rows.before if before is None else before
    new.after = rows.after if after is None else after
    others = () if bias is None else (bias,)
    new.ops = rows.ops if pick is not None else (*rows.ops, (op, others))
    new.bias = rows.bias if bias is None else bias
    new.bias_version = rows.bias_version if bias is None else version(bias)
    new.is_transposed = rows.is_transposed or is_transposed
    new.parent = logits
    if pick is not None or is_detached or is_transposed:
        new.memory = rows.memory
    make = partial(new.empty, logits.shape if shape is None else shape, dtype or logits.dtype)
    needs = logits.requires_grad or (bias is not None and bias.requires_grad)
    if torch.is_grad_enabled() and needs and not is_detached:
        return _Derive.apply(logits, op, make, *others)  # type: ignore[no-any-return]
    return make()


def is_hooked(logits: LazyLogits | None) -> bool:
    """Whether somebody waits for the gradient of these logits or of those that they were derived from."""
    while logits is not None:
        node = logits.grad_fn
        if logits._backward_hooks or logits.retains_grad:
            return True
        if node is not None and node.name() not in _NODES:  # made in the forward of somebody's Function
            return True
        logits = logits._rows.parent
    return False


_NODES = tuple(f"{function.__name__}Backward" for function in (_Project, _Derive))


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
