"""Records what autograd nodes do not store, while the torch functions run.

A torch function mode sees every call of a torch function from Python, above autocast and above composite functions. It
handles the functions in the tables below in one of five ways; every other call passes through:

noted     Constants that the node does not store (the 1 of ``x + 1``, the eps of a layer norm) go into its metadata.
sources   The outputs of matrix products, convolutions and attention are referenced weakly, and the last few strongly:
          a tensor that autograd does not save may be a better anchor than the one that it saves.
random    The generator state before a dropout is recorded, so that its mask is drawn again and not kept. See
          ``random_ops.py``.
deferred  Decisions about the tensors that a call saves are deferred until it returns, if backward may read only the
          shape of one of them. See ``values/shape_only.py``.
mutated   An in-place change that autograd did not record ends every recipe through that tensor. See ``mutation.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, is_grad_enabled

from leangrad import _torch
from leangrad.ledger.observe.call_args import PLAIN, Handler, argument, deferring, leave_note, note_one, notes_need
from leangrad.ledger.observe.function_mode import FunctionMode
from leangrad.ledger.observe.mutation import (
    after_change,
    before_change,
    handle_alias,
    handle_data_set,
    handle_exposed_memory,
    handle_unsafe_split,
    mutating,
    write_out,
)
from leangrad.ledger.observe.random_ops import dropout, dropout_inside
from leangrad.ledger.observe.unseen_writes import UNSAFE_SPLITS
from leangrad.ledger.origins.graph_walk import UnsavedInput, noted
from leangrad.ledger.origins.rule_builder import origin_of
from leangrad.ledger.origins.upstream_anchors import note_half
from leangrad.ledger.values.node_metadata import NOTE, OPAQUE
from leangrad.ledger.values.value import Value
from leangrad.overridable import is_product

HANDLERS: dict[Any, Handler | None] = {}  # by torch function; None: the call passes through


def handler_of(func: Any, kwargs: dict[str, Any]) -> Handler | None:
    """Return the handler of a call of ``func``, or None if the call passes through."""
    if kwargs and kwargs.get("out") is not None:
        return write_out
    try:
        return HANDLERS[func]
    except KeyError:
        handler = HANDLERS[func] = _own_product if is_product(func) else mutating() if _torch.mutates(func) else None
        return handler


# ---------------------------------------------------------------------------------------------------------------- noted


def _noted(names: str) -> Handler:
    names_ = tuple(names.split())

    @notes_need
    def handler(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if len(args) == 2 and not kwargs:
            a, b = args
            if isinstance(a, Tensor) and isinstance(b, Tensor) and a.requires_grad and b.requires_grad:
                return out  # the node has an edge for each: nothing to record
        leave_note(out, names_, args, kwargs)
        return out

    return handler


def _constants(**places: tuple[int, Any]) -> Handler:
    """Return a handler for a function whose node does not store constants.

    places: for each constant, its position among the arguments and its default.
    """
    wanted = tuple((name, place, default) for name, (place, default) in places.items())

    @notes_need
    def handler(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if not args or out is not args[0]:  # ``x.contiguous()`` may be ``x`` itself, whose node belongs to another op
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


@notes_need
def _copied(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = func(*args, **kwargs)
    if kwargs.get("memory_format") is not None and out is not args[0] and out.grad_fn is not None:
        _make_opaque(mode, out.grad_fn)
    return out


@notes_need
def _group_norm(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = func(*args, **kwargs)
    leave_note(out, ("input", "num_groups", "weight", "bias", "eps"), args, kwargs)
    x = args[0] if args else kwargs["input"]
    if out.grad_fn is not None and not x.is_contiguous():
        # ATen may have made ``x`` contiguous, in a memory format that no node stores.
        inner = out.grad_fn.next_functions[0][0]
        if inner is not x.grad_fn and type(inner).__name__ == "CloneBackward0":
            _make_opaque(mode, inner)
    return out


def _batch_norm(read: Callable[..., tuple[Any, ...]]) -> Handler:
    """Return a handler for batch norm.

    In training batch norm changes its running statistics in place and moves no version counter; in eval mode it reads
    them.

    read: returns the running mean and variance, the weight, the bias and ``training`` from the arguments of a call.
    """

    @notes_need
    def handler(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mean, var, weight, bias, trains = read(*args, **kwargs)
        changes = trains and mean is not None
        if changes:
            before_change(mode.region, mean)
            before_change(mode.region, var)
        out = func(*args, **kwargs)
        if not (trains and weight is not None and weight.requires_grad and bias is not None and bias.requires_grad):
            leave_note(out, (), (), {"weight": weight, "bias": bias})  # the node has no edge for one of them
        if changes:
            if noted.are_any(mean, var):
                mode.region.distrust()
        elif mean is not None and out.grad_fn is not None and out.nbytes >= mode.region.min_bytes:
            for name, statistic in (("fixed_mean", mean), ("fixed_var", var)):
                out.grad_fn.metadata[NOTE][name] = _copy_of(statistic)
        usual = (mean is None or mean.is_contiguous()) and (var is None or var.is_contiguous())
        if not usual and out.grad_fn is not None:
            _make_opaque(mode, out.grad_fn)  # ATen uses another formula for these, and a replay does not pass them
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


@notes_need
def _embedding(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if argument(func, args, kwargs, "max_norm") is None:
        return func(*args, **kwargs)
    weight = argument(func, args, kwargs, "weight")  # changed in place now, and maybe by the next look-up
    before_change(mode.region, weight)
    out = func(*args, **kwargs)
    after_change(mode.region, weight)
    if out.grad_fn is not None:
        _make_opaque(mode, out.grad_fn)
    return out


def _make_opaque(mode: FunctionMode, node: Any) -> None:
    """Let no recipe run through ``node``."""
    node.metadata[OPAQUE] = True
    mode.region.needs_mode()


def _second_output(name: str) -> Handler:
    """Return a handler for a function whose node saves a second output, as ``name``, that has a rule too."""

    @notes_need
    def handler(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if out.grad_fn is not None:
            mode.region.attach_recipe(out.grad_fn, 1, name)
        return out

    return handler


def _instance_norm(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    statistics = [argument(func, args, kwargs, name) for name in ("running_mean", "running_var")]
    before_change(mode.region, statistics)
    out = func(*args, **kwargs)
    if noted.are_any(*statistics):
        mode.region.distrust()
    node = out.grad_fn
    if node is not None and type(node).__name__ == "ViewBackward0":
        node = node.next_functions[0][0]
    if type(node).__name__.endswith("BatchNormBackward0") and argument(func, args, kwargs, "bias") is None:
        node.metadata[NOTE] = {"bias": None}
    return out


@notes_need
def _pooled(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = func(*args, **kwargs)
    pooled = out[0] if type(out) is tuple else out
    node = pooled.grad_fn
    while node is not None and type(node).__name__ in ("SqueezeBackward1", "ViewBackward0"):
        node = node.next_functions[0][0]
    if node is not None and type(node).__name__.startswith(("MaxPool", "AdaptiveMaxPool")):
        mode.region.attach_recipe(node, 1, "result1")
    return out


# -------------------------------------------------------------------------------------------------------------- sources


@notes_need
def _product(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = func(*args, **kwargs)
    region = mode.region
    if region.max_products:
        if _torch.product_settings() != region.product_settings:  # no recipe may run this product again
            region.distrust()
        if func in BIASED:
            _note_frozen(out, args[2] if len(args) > 2 else kwargs.get("bias"))
        note_half(out)
    elif region.catches:
        _hold(mode, out)
    return out


def _note_frozen(out: Any, bias: Any) -> None:
    """Record a frozen bias of a product in the product's node, which does not store it."""
    if bias is None or not isinstance(bias, Tensor) or bias.requires_grad:
        return
    node: Any = out.grad_fn if type(out) is Tensor else None
    if type(node).__name__ == "ViewBackward0":  # the input had three dimensions
        node = node.next_functions[0][0]
    name = FROZEN_BIAS.get(type(node).__name__)
    # No cast by autocast; and a copy would not keep other strides.
    if name is not None and bias.dtype == out.dtype and bias.is_contiguous():
        node.metadata[NOTE] = {name: UnsavedInput(bias)}


def _own_product(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle a product that is an autograd Function of leangrad.

    Its output is not held if it has a recipe: a Function that ends in an activation saves the input of the activation.
    """
    out = func(*args, **kwargs)
    if mode.region.catches and type(out) is Tensor and out.grad_fn is not None and origin_of(out.grad_fn, 0) is None:
        _hold(mode, out)
    return out


def _hold(mode: FunctionMode, out: Any) -> None:
    region = mode.region
    if type(out) is Tensor and out.nbytes >= region.min_bytes:
        made = out._base if out._is_view() else out
        if made is not None and made.grad_fn is not None:
            region.products.hold(made)


# --------------------------------------------------------------------------------------------------------------- tables


# Nodes of products that do not store a frozen bias, and the name of the bias in their rules.
FROZEN_BIAS = {"AddmmBackward0": "self", "ConvolutionBackward0": "bias"}
CONVOLUTIONS = tuple(f"conv{kind}{d}d" for kind in ("", "_transpose") for d in "123")
# Functions whose third argument is the bias.
BIASED = {F.linear, *(getattr(home, name) for name in CONVOLUTIONS for home in (torch, F))}

# Argument names -> the functions and methods of torch with these arguments, whose nodes do not store operands that need
# no gradient. ``_``: an argument that the node always stores.
UNSAVED_OPERANDS = {
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
    HANDLERS[T.requires_grad_] = None  # in spite of its name it changes no data
    # Every other function of torch whose name ends in one underscore changes its first argument in place.
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

    for names, functions in UNSAVED_OPERANDS.items():
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
    _enter(handle_data_set, T.data.__set__)  # type: ignore[attr-defined]
    _enter(handle_alias, T.data.__get__, T.detach, torch.detach)  # type: ignore[attr-defined]
    _enter(handle_exposed_memory, T.numpy, T.__array__, T.__dlpack__, T.data_ptr, T.untyped_storage, T.storage)
    _enter(handle_exposed_memory, torch.utils.dlpack.to_dlpack)  # type: ignore[attr-defined]
    for name in UNSAFE_SPLITS.split():
        _enter(handle_unsafe_split, *(getattr(home, name) for home in (T, torch) if hasattr(home, name)))

    _enter(_product, F.linear, F.bilinear, torch.matmul, T.matmul, T.__matmul__, torch.mm, T.mm, torch.bmm, T.bmm)
    _enter(_product, torch.addmm, T.addmm, torch.baddbmm, T.baddbmm, torch.einsum)
    for name in CONVOLUTIONS:
        _enter(_product, getattr(torch, name), getattr(F, name))

    _enter(dropout, F.dropout, F.alpha_dropout, F.feature_alpha_dropout)
    _enter(dropout_inside("dropout_p", 4, _product), F.scaled_dot_product_attention)
    _enter(dropout_inside("dropout_p", 10, _product), F.multi_head_attention_forward)
    _enter(_instance_norm, F.instance_norm)
    for d in "123":
        for name in (f"max_pool{d}d", f"adaptive_max_pool{d}d"):
            _enter(deferring(_pooled), getattr(F, name), getattr(F, name + "_with_indices"))
    _defer()


# Functions and methods of torch that may make a node listed in ``SHAPE_ONLY``. Max poolings are entered above.
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
