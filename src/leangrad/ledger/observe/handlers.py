"""What nodes forget, noted while the functions run.

A function override sees every call of torch from Python, above autocast and above composite functions. It does five
things, and only for the calls in its tables; every other call passes through:

noted     constants that the node forgets (the 1 of ``x + 1``, the eps of a layer norm) go into the node's metadata.
sources   the outputs of matrix products, convolutions and attention are remembered weakly, and the last few strongly:
          a tensor that nobody saves may be a better anchor than the one that is saved.
random    the generator's state before a dropout, so that its mask is drawn again instead of kept: ``random_ops.py``.
deferred  the tensors that a call saves are decided when it has ended, if backward may read the shape of one alone:
          ``shape_only.py``.
mutated   a change in place that autograd did not record ends every recipe through that tensor: ``mutation.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, is_grad_enabled

from leangrad import _torch
from leangrad.ledger.observe.call_args import PLAIN, Handler, argument, deferring, leave_note, note_one
from leangrad.ledger.observe.function_mode import FunctionMode
from leangrad.ledger.observe.mutation import after_change, aliased, before_change, leaked, mutating, swapped, write_out
from leangrad.ledger.observe.random_ops import dropout, dropout_inside
from leangrad.ledger.origins.graph_walk import UnsavedInput
from leangrad.ledger.origins.rule_builder import origin_of
from leangrad.ledger.values.node_metadata import NOTE, OPAQUE
from leangrad.ledger.values.value import Value
from leangrad.overridable import is_product

HANDLERS: dict[Any, Handler | None] = {}  # None: the call passes through


def handler_of(func: Any, kwargs: dict[str, Any]) -> Handler | None:
    """What handles a call of ``func``."""
    if kwargs and kwargs.get("out") is not None:
        return write_out
    try:
        return HANDLERS[func]
    except KeyError:
        handler = HANDLERS[func] = _own_source if is_product(func) else mutating() if _torch.mutates(func) else None
        return handler


# ---------------------------------------------------------------------------------------------------------------- noted


def _noted(names: str) -> Handler:
    names_ = tuple(names.split())

    def handler(notes: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if len(args) == 2 and not kwargs:
            a, b = args
            if isinstance(a, Tensor) and isinstance(b, Tensor) and a.requires_grad and b.requires_grad:
                return out  # the node has an edge for each: nothing is forgotten
        leave_note(out, names_, args, kwargs)
        return out

    return handler


def _constants(**places: tuple[int, Any]) -> Handler:
    """A function whose node forgets constants: where each stands among the arguments, and its default."""
    wanted = tuple((name, place, default) for name, (place, default) in places.items())

    def handler(notes: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if not args or out is not args[0]:  # ``x.contiguous()`` may be x itself, and its node another op's
            node: Any = out.grad_fn if isinstance(out, Tensor) else None
            if node is not None and is_grad_enabled():
                node.metadata[NOTE] = note = {}
                for name, place, default in wanted:
                    a = args[place] if place < len(args) else kwargs.get(name, default)
                    if type(a) in PLAIN:
                        note[name] = a
                    else:
                        note_one(note, name, a)
        return out

    return handler


def _copied(notes: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = func(*args, **kwargs)
    if kwargs.get("memory_format") is not None and out is not args[0] and out.grad_fn is not None:
        out.grad_fn.metadata[OPAQUE] = True
    return out


def _group_norm(notes: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = func(*args, **kwargs)
    leave_note(out, ("input", "num_groups", "weight", "bias", "eps"), args, kwargs)
    x = args[0] if args else kwargs["input"]
    if out.grad_fn is not None and not x.is_contiguous():
        # ATen may have made it contiguous, in a memory format that no node remembers.
        inner = out.grad_fn.next_functions[0][0]
        if inner is not x.grad_fn and type(inner).__name__ == "CloneBackward0":
            inner.metadata[OPAQUE] = True
    return out


def _batch_norm(read: Callable[..., tuple[Any, ...]]) -> Handler:
    """In training batch norm changes its running statistics below every version counter; in eval it reads them.

    read: gives back, of the arguments of a call, its running mean and variance, weight, bias and whether it trains.
    """

    def handler(notes: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mean, var, weight, bias, trains = read(*args, **kwargs)
        changes = trains and mean is not None
        if changes:
            before_change(notes.book, mean)
            before_change(notes.book, var)
        out = func(*args, **kwargs)
        if not (trains and weight is not None and weight.requires_grad and bias is not None and bias.requires_grad):
            leave_note(out, (), (), {"weight": weight, "bias": bias})  # the node has no edge for one of them
        if changes:
            if not UnsavedInput.noted.isdisjoint((id(mean), id(var))):
                notes.book.fence = _torch.next_sequence_nr()
        elif mean is not None and out.grad_fn is not None and out.nbytes >= notes.book.min_bytes:
            for name, statistic in (("fixed_mean", mean), ("fixed_var", var)):
                out.grad_fn.metadata[NOTE][name] = _copy_of(statistic)
        usual = (mean is None or mean.is_contiguous()) and (var is None or var.is_contiguous())
        if not usual and out.grad_fn is not None:
            out.grad_fn.metadata[OPAQUE] = True  # ATen has another formula for them, and a replay does not pass them
        return out

    return handler


def _read_functional(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: Any = False,
    *_: Any,
    **__: Any,
) -> tuple[Any, ...]:
    return running_mean, running_var, weight, bias, training


def _read_torch(
    input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: Any, *_: Any, **__: Any
) -> tuple[Any, ...]:
    return running_mean, running_var, weight, bias, training


def _copy_of(tensor: Any) -> Value:
    value = Value("statistics")
    value.keep(_torch.copy_unseen(tensor.detach()))
    value.free = True
    return value


def _embedding(notes: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if argument(func, args, kwargs, "max_norm") is None:
        return func(*args, **kwargs)
    weight = argument(func, args, kwargs, "weight")  # it is changed in place, and the next look-up may change it again
    before_change(notes.book, weight)
    out = func(*args, **kwargs)
    after_change(notes.book, weight)
    if out.grad_fn is not None:
        out.grad_fn.metadata[OPAQUE] = True
    return out


def _second_output(name: str) -> Handler:
    """A function whose node keeps a second output that has a rule too."""

    def handler(notes: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if out.grad_fn is not None:
            notes.book.settle(out.grad_fn, 1, name)
        return out

    return handler


def _instance_norm(notes: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    statistics = [argument(func, args, kwargs, name) for name in ("running_mean", "running_var")]
    before_change(notes.book, statistics)
    out = func(*args, **kwargs)
    if not UnsavedInput.noted.isdisjoint(map(id, statistics)):
        notes.book.fence = _torch.next_sequence_nr()
    node = out.grad_fn
    if node is not None and type(node).__name__ == "ViewBackward0":
        node = node.next_functions[0][0]
    if type(node).__name__.endswith("BatchNormBackward0") and argument(func, args, kwargs, "bias") is None:
        node.metadata[NOTE] = {"bias": None}
    return out


def _pooled(notes: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = func(*args, **kwargs)
    pooled = out[0] if type(out) is tuple else out
    node = pooled.grad_fn
    while node is not None and type(node).__name__ in ("SqueezeBackward1", "ViewBackward0"):
        node = node.next_functions[0][0]
    if node is not None and type(node).__name__.startswith(("MaxPool", "AdaptiveMaxPool")):
        notes.book.settle(node, 1, "result1")
    return out


# -------------------------------------------------------------------------------------------------------------- sources


def _source(notes: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = func(*args, **kwargs)
    book = notes.book
    if book.max_products:
        if _torch.product_settings() != book.product_settings:  # no recipe may run it again
            book.fence = _torch.next_sequence_nr()
        if func in BIASED:
            _note_frozen(out, args[2] if len(args) > 2 else kwargs.get("bias"))
    elif book.catches:
        _hold(notes, out)
    return out


def _note_frozen(out: Any, bias: Any) -> None:
    """A product has run with this bias, which its node forgets if it is frozen."""
    node: Any = out.grad_fn if type(out) is Tensor else None
    if type(node).__name__ == "ViewBackward0":  # of three dimensions
        node = node.next_functions[0][0]
    name = FROZEN_BIAS.get(type(node).__name__)
    if name is None or not isinstance(bias, Tensor) or bias.requires_grad:
        return
    if bias.dtype == out.dtype and bias.is_contiguous():  # autocast casts it unseen; a copy has other strides
        node.metadata[NOTE] = {name: UnsavedInput(bias)}


def _own_source(notes: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A product that is an autograd Function of ours; one that ends in an activation keeps what that was made from."""
    out = func(*args, **kwargs)
    if notes.book.catches and type(out) is Tensor and out.grad_fn is not None and origin_of(out.grad_fn, 0) is None:
        _hold(notes, out)
    return out


def _hold(notes: FunctionMode, out: Any) -> None:
    book = notes.book
    if type(out) is Tensor and out.nbytes >= book.min_bytes:
        made = out._base if out._is_view() else out
        if made is not None and made.grad_fn is not None:
            book.products.hold(made)


# --------------------------------------------------------------------------------------------------------------- tables


# The nodes of products that forget a frozen bias, and what their rules call it.
FROZEN_BIAS = {"AddmmBackward0": "self", "ConvolutionBackward0": "bias"}
CONVOLUTIONS = tuple(f"conv{kind}{d}d" for kind in ("", "_transpose") for d in "123")
# Whose third argument it is.
BIASED = {F.linear, *(getattr(home, name) for name in CONVOLUTIONS for home in (torch, F))}

# Functions and methods of torch whose nodes forget operands that need no gradient, and the names of their arguments;
# ``_``: one that the node never forgets.
FORGOTTEN = {
    "self other": "add sub subtract fmod remainder copysign hypot",
    "self end weight": "lerp",
    "self tensor1 tensor2": "addcmul addcdiv",
    "self _ value": "masked_fill",
    "self _ source": "masked_scatter",
    "self _ _ value": "index_fill scatter",
    "self _ _ source": "index_copy",
    "self _ index src": "scatter_add",
    "self _ index source": "index_add",
    "abs angle": "polar",
    "real imag": "complex",
}


def _enter(handler: Handler, *functions: Any) -> None:
    for f in functions:
        HANDLERS[f] = handler


def _fill_tables() -> None:
    T = Tensor
    HANDLERS[T.requires_grad_] = None  # its name says more than it does
    # Every function of torch whose name ends in one underscore changes its first argument.
    for home in (T, torch, F):
        for name in dir(home):
            if name.endswith("_") and not name.endswith("__") and not name.startswith("_"):
                function = getattr(home, name)
                if callable(function) and name != "requires_grad_":
                    _enter(mutating(), function)
    _enter(mutating(), T.__setitem__, T.__ipow__, T.__ifloordiv__, T.__imod__, T.__ilshift__, T.__irshift__)
    for name in ("relu", "leaky_relu", "elu", "celu", "selu", "silu", "mish", "hardswish", "hardsigmoid", "hardtanh"):
        _enter(mutating(choose="inplace"), getattr(F, name))
    _enter(mutating(choose="inplace"), F.relu6, F.rrelu, F.dropout1d, F.dropout2d, F.dropout3d)
    _enter(mutating("self threshold value", choose="inplace"), F.threshold)

    for names, functions in FORGOTTEN.items():
        for name in functions.split():
            _enter(_noted(names), *(getattr(home, name) for home in (T, torch) if hasattr(home, name)))
            if hasattr(T, name + "_"):
                _enter(mutating(names), getattr(T, name + "_"))
    _enter(_noted("self other"), T.__add__, T.__radd__, T.__sub__, T.__rsub__, T.__mod__, torch.rsub)
    _enter(mutating("self other"), T.__iadd__, T.__isub__, T.__imod__)
    _enter(_noted("_ self other"), torch.where)
    _enter(_noted("self _ other"), T.where)
    _enter(_noted("tensors _"), torch.cat, torch.concat, torch.concatenate, torch.stack)
    _enter(_constants(nan=(1, None), posinf=(2, None), neginf=(3, None)), torch.nan_to_num, T.nan_to_num)
    _enter(_constants(value=(3, None)), F.pad)
    _enter(_constants(value=(2, 0)), torch.constant_pad_nd)
    _enter(_constants(eps=(4, 1e-5)), F.layer_norm, torch.layer_norm)
    _enter(_constants(eps=(3, None)), F.rms_norm, torch.rms_norm)
    _enter(_batch_norm(_read_functional), F.batch_norm)
    _enter(_batch_norm(_read_torch), torch.batch_norm)
    _enter(_group_norm, F.group_norm, torch.group_norm)
    _enter(_embedding, F.embedding)
    _enter(_second_output("buffer"), F.logsigmoid)
    _enter(_constants(memory_format=(1, torch.contiguous_format)), T.contiguous)
    _enter(_constants(memory_format=(1, torch.preserve_format)), T.clone, torch.clone)
    _enter(_copied, T.to, T.float, T.double, T.half, T.bfloat16, T.cpu, T.cuda)
    _enter(swapped, T.data.__set__)  # type: ignore[attr-defined]
    _enter(aliased, T.data.__get__, T.detach, torch.detach)  # type: ignore[attr-defined]
    _enter(leaked, T.numpy, T.__array__, T.__dlpack__, T.data_ptr, T.untyped_storage, T.storage)
    _enter(leaked, torch.utils.dlpack.to_dlpack)  # type: ignore[attr-defined]

    _enter(_source, F.linear, F.bilinear, torch.matmul, T.matmul, T.__matmul__, torch.mm, T.mm, torch.bmm, T.bmm)
    _enter(_source, torch.addmm, T.addmm, torch.baddbmm, T.baddbmm, torch.einsum)
    for name in CONVOLUTIONS:
        _enter(_source, getattr(torch, name), getattr(F, name))

    _enter(dropout, F.dropout, F.alpha_dropout, F.feature_alpha_dropout)
    _enter(dropout_inside("dropout_p", 4, _source), F.scaled_dot_product_attention)
    _enter(dropout_inside("dropout_p", 10, _source), F.multi_head_attention_forward)
    _enter(_instance_norm, F.instance_norm)
    for d in "123":
        for name in (f"max_pool{d}d", f"adaptive_max_pool{d}d"):
            _enter(deferring(_pooled), getattr(F, name), getattr(F, name + "_with_indices"))
    _defer()


# Functions and methods of torch that may make a node of ``SHAPE_ONLY``. Max poolings are entered above.
DEFERRED = "gather take_along_dim take masked_select put index_add index_copy cummax cummin complex stft"
DEFERRED_IN_PLACE = "put_ index_add_ index_copy_"


def _defer() -> None:
    functions = [getattr(home, name) for home in (Tensor, torch) for name in DEFERRED.split() if hasattr(home, name)]
    functions += [getattr(torch.fft, name) for name in ("fft", "fft2", "fftn", "rfft", "rfft2", "rfftn", "ihfft")]
    functions += [F.pad, F.interpolate]
    for d in "123":
        functions += [getattr(F, f"avg_pool{d}d"), getattr(F, f"adaptive_avg_pool{d}d")]
    for d in "23":
        functions += [getattr(F, f"fractional_max_pool{d}d"), getattr(F, f"fractional_max_pool{d}d_with_indices")]
    functions += [torch.avg_pool1d, torch.adaptive_avg_pool1d]
    for function in functions:
        HANDLERS[function] = deferring(HANDLERS.get(function))
    for name in DEFERRED_IN_PLACE.split():
        function = getattr(Tensor, name)
        HANDLERS[function] = deferring(HANDLERS[function], inplace=True)


_fill_tables()
