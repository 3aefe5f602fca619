"""`LazyLogits`: logits that are computed only when their values are read.

A projection to a vocabulary returns `LazyLogits` instead of its output: a tensor with shape, dtype, device and a place
in the autograd graph, but no memory. `F.cross_entropy` on it runs `linear_cross_entropy`, which never has all logits at
once. Views, slices of rows, casts, multiples and a tanh give another `LazyLogits`. Any other op computes the values,
once, by the ops that plain PyTorch would have run, and then runs on these values.

[Note: the graph] The tensor that the module returns is the output of an autograd node, `_Project`, whose inputs are x,
W and b. A second node, `_Open`, takes that tensor as its input and returns stand-ins for x, W and b; the loss is an
ordinary function of these stand-ins. In backward `_Open` wraps their three gradients into one `ProjectedGradient`, a
tensor with the shape of the logits and without memory, and `_Project` unwraps it. So code that walks the graph from the
loss to the logits and on to the parameters finds the nodes that it expects. A hook on the logits would find no values
in a `ProjectedGradient`: if there is a hook, the loss is computed from values. The values are the output of a node
`_Values`, whose input is the logits and whose gradient is an ordinary tensor. Lazy logits that are derived from others
are the output of a node `_Derive`, whose input is those others.

[Note: changes] Until the values are computed, x, W and b must not change. Their versions and storage sizes are
compared, and `ChangedError` is raised if one has changed.

[Note: in place] An in-place op on lazy logits is run on their values. From then on the tensor stands for a copy of
these values, in the graph too (`_Replace`). Views of the logits have values of their own and do not see the change. So
two things are errors: to read a tensor after another one was written to that shares its memory in plain PyTorch
(`Memory` detects this), and to write to a tensor after another one was read.
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

Op = Callable[..., Tensor]  # called with logits and further tensors


def project(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, asked: Callable[[bool], None] = lambda _: None
) -> LazyLogits:
    """Return `F.linear(x, weight, bias)` as lazy logits, without computing it.

    asked: called with True when a loss is computed from the logits for a gradient, and with False when their values are
    read for one.

    >>> logits = project(torch.ones(2, 3), torch.ones(5, 3))
    >>> logits.shape, logits.view(-1).sum()
    (torch.Size([2, 5]), tensor(30.))
    """
    source = Source(x, weight, bias, asked)
    if torch.is_grad_enabled() and any(source.needs):
        return _project(source, x, weight, bias)  # type: ignore[no-any-return]
    return _Rows(source).empty(source.shape, source.dtype)


class _Rows:
    """What one `LazyLogits` stands for: some rows of x, projected to z, then before·z or after·tanh(before·z).

    ``picks`` selects the rows of x; ``after`` is None: there is no tanh.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.picks: tuple[Op, ...] = ()  # functions that select rows of x, applied in this order
        self.ops: tuple[tuple[Op, tuple[Tensor, ...]], ...] = ()  # ops on the values; their other arguments
        self.bias: Tensor | None = None  # added to the projection's output first; None: nothing is
        self.bias_version = 0  # version of ``bias`` when it was added
        self.is_transposed = False  # the vocabulary is the second of three dimensions
        self.before, self.after = 1.0, None  # type: float, float | None
        self.parent: LazyLogits | None = None  # the logits that these were derived from; None: the projection
        self.values: Tensor | None = None  # None until computed; in the graph if the logits are
        self.memory = Memory()
        self.is_told = False  # True: ``source.asked`` was called for a read of these values
        self._opened: tuple[Tensor, Tensor, Tensor | None] | None = None  # outputs of `_Open`; None: not called yet

    def empty(self, shape: Any, dtype: torch.dtype) -> LazyLogits:
        """Return a new `LazyLogits` that stands for these rows and has no place in the autograd graph yet."""
        logits: LazyLogits = without_memory(LazyLogits, shape, dtype, self.source.x.device)
        logits._rows = self
        return logits

    def open(self, logits: LazyLogits) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return x, W and b for a loss of ``logits``, or stand-ins if it needs a gradient; see [Note: the graph]."""
        source = self.source
        source.check()
        self.check_writes()
        if not torch.is_grad_enabled() or not logits.requires_grad or not any(source.needs):
            return source.x, source.weight, source.bias
        if self._opened is None:
            self._opened = _Open.apply(logits, source)
        return self._opened

    def compute(self) -> Tensor:
        """Compute the values, without recording them in the autograd graph."""
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
        """Raise `ChangedError` if ``bias`` has changed since it was added; see [Note: changes]."""
        if self.bias is not None and version(self.bias) != self.bias_version:
            raise changed("bias")

    def check_writes(self) -> None:
        """Raise `LeangradError` if other logits in the same memory were written to; see [Note: in place]."""
        if self.memory.is_written(self, by_others=True):
            raise LeangradError(_NO_WRITES)

    def are_replaced(self) -> bool:
        """Whether the values are not those of the projection any more: written to, or a leaf that requires grad."""
        values = self.values
        return values is not None and (
            (values.is_leaf and values.requires_grad) or self.memory.is_written(self, by_others=False)
        )


_NO_WRITES = (
    "logits, or a view of them, were written to, and others of them are read too: each have values of their own here, "
    "and do not see what is written to the others; write to logits.clone(), or use leangrad.lean(model, exact=True)"
)


class LazyLogits(Tensor):
    """The output of a projection, computed only when its values are read; see the top of this file."""

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
        """Run an op that torch itself calls, below autograd, on the values."""
        with torch.no_grad():
            args, kwargs = _with_values(args), _with_values(kwargs or {})
        return func(*args, **kwargs)


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func``, a torch function, on arguments with lazy logits among them; without their values if possible."""
    name = _name(func)
    first = args[0] if args else kwargs.get("input")
    with torch._C.DisableTorchFunctionSubclass():
        if func is torch.autograd.grad:  # with respect to the lazy tensors themselves
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
    if type(first) is LazyLogits and name == "data.__get__":  # it has a version counter of its own
        first._rows.memory.note(first._rows, result)
    is_same = type(first) is LazyLogits and result is first._rows.values  # such as `.double()` of float64
    return first if is_same else result


def _handle(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handler = HANDLERS.get(name)
    if handler is None:
        return NotImplemented
    try:
        return handler(*args, **kwargs)
    except TypeError:  # arguments that the handler does not accept; torch's own call accepts them or raises
        return NotImplemented


# ------------------------------------------------------------------------------------------------------------ the graph


class _Project(torch.autograd.Function):
    """The autograd node of the lazy logits of x, W and b; see [Note: the graph]."""

    @staticmethod
    def forward(ctx: Any, source: Source, x: Tensor, weight: Tensor, bias: Tensor | None) -> LazyLogits:
        ctx.save_for_backward(x, weight)
        ctx.dtypes = [None if t is None else t.dtype for t in (x, weight, bias)]
        ctx.parameters = [None if SLOTS.get(t) is None else t for t in (x, weight, bias)]  # those with packed gradients
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
    """Return the gradients of x, W and b for an ordinary gradient ``g`` of the logits, by differentiable ops."""
    x, weight = (t.to(ctx.dtype) for t in ctx.saved_tensors)
    _, needs_x, needs_weight, needs_bias = ctx.needs_input_grad
    rows = g.reshape(-1, g.shape[-1])
    return Parts(
        (rows @ weight).reshape(x.shape) if needs_x else None,
        rows.t() @ x.reshape(-1, x.shape[-1]) if needs_weight else None,
        rows.sum(0) if needs_bias else None,
    )


class _Open(torch.autograd.Function):
    """The node that returns stand-ins for x, W and b to a loss; see [Note: the graph]."""

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
    """The node that computes the values of lazy logits; see [Note: the graph]."""

    @staticmethod
    def forward(ctx: Any, logits: LazyLogits) -> Tensor:
        return logits._rows.compute().detach()  # autograd refuses in-place changes of a view that a Function returns

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class _Derive(torch.autograd.Function):
    """The node of lazy logits that ``op`` makes of other lazy logits; see [Note: the graph]."""

    @staticmethod
    def forward(ctx: Any, logits: LazyLogits, op: Op, make: Callable[[], LazyLogits], *others: Tensor) -> LazyLogits:
        ctx.op, ctx.others, ctx.like = op, others, (logits.shape, logits.dtype, logits.device)
        ctx.is_linear = op is not torch.tanh
        ctx.logits = None if ctx.is_linear else logits  # only tanh's backward needs them; dropped in the last backward
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
    """Return the gradients of the arguments of ``ctx.op``: the logits and ``ctx.others``.

    With create_graph=True they depend on the values of the logits, in the graph.
    """
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
            found = _values(logits)
            values = found.view_as(found)  # an alias, so that hooks of the logits run once, with the outer backward
        inputs = [values, *(t.detach().requires_grad_() for t in ctx.others)]
        return torch.autograd.grad(ctx.op(*inputs), inputs, g, create_graph=is_graded)


class _Replace(torch.autograd.Function):
    """The node that makes lazy logits a copy of ``values``, which were changed in place; see [Note: in place]."""

    @staticmethod
    def forward(ctx: Any, logits: LazyLogits, values: Tensor) -> LazyLogits:
        ctx.mark_dirty(logits)
        return logits

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:
        return None, g


def _values(logits: LazyLogits, *, to_write: bool = False) -> Tensor:
    """Return the values of ``logits`` as an ordinary tensor in the graph.

    They are computed at most once, except inside of a checkpoint. to_write: they will be changed.
    """
    rows = logits._rows
    rows.check_writes()
    if torch.is_grad_enabled() and logits.requires_grad and not rows.is_told:
        rows.is_told = True
        rows.source.asked(False)
    if rows.values is None:
        if torch.is_inference_mode_enabled() and not logits.is_inference():
            return rows.compute()  # not cached: autograd cannot use an inference tensor later
        if _torch.is_checkpointing() and not to_write:
            return _Values.apply(logits)  # type: ignore[no-any-return]  # the recomputation must find them uncached too
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
    """Run ``func``, an in-place method, on the values of ``logits``; see [Note: in place]."""
    rows = logits._rows
    if any(by() is not rows for by, _, _ in rows.memory.probes):
        raise LeangradError(_NO_WRITES)
    values = _values(logits, to_write=True)
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
    """Return the lazy logits that ``op`` makes of ``logits``.

    shape, dtype: those of the result; None: as ``logits`` has them.
    pick: selects the same rows of x, if ``op`` selects rows; None: ``op`` changes values.
    before, after: those of the result, see `_Rows`; None: as ``logits`` has them.
    bias: a tensor that ``op`` adds; None: there is none.
    is_transposed: ``op`` moves the vocabulary to the second of three dimensions.
    is_detached: the result has no place in the autograd graph.
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
    """Whether the gradient of these logits, or of those that they were derived from, is read by others.

    It is read by tensor hooks, by `retain_grad`, and by autograd nodes of other Functions.
    """
    while logits is not None:
        node = logits.grad_fn
        if logits._backward_hooks or logits.retains_grad:
            return True
        if node is not None and node.name() not in _NODES:  # made in the forward of another Function
            return True
        logits = logits._rows.parent
    return False


_NODES = tuple(f"{function.__name__}Backward" for function in (_Project, _Derive))


def _name(func: Any) -> str:
    name: str = getattr(func, "__name__", "")
    return f"{func.__self__.__name__}.{name}" if name in ("__get__", "__set__") else name


# Attributes and methods that work on a tensor without memory; `_WRITERS`: methods that change a tensor in place.
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
# By the name of the function: computes its result from lazy logits without their values, or returns NotImplemented if
# it needs them.
HANDLERS: dict[str, Callable[..., Any]] = {}
