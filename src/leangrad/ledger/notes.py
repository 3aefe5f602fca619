"""What nodes forget, noted while the functions run.

A function override sees every call of torch from Python, above autocast and above composite functions. It does four things,
and only for the calls in its tables; every other call passes through:

noted     constants that the node forgets (the 1 of ``x + 1``, the eps of a layer norm) go into the node's metadata.
random    the generator's state before a dropout, so that its mask is drawn again instead of kept.
sources   the outputs of matrix products, convolutions and attention are remembered weakly, and the last few strongly:
          a tensor that nobody saves may be a better anchor than the one that is saved.
mutated   a change in place that autograd did not record would make every recipe through that tensor wrong.
          The node is marked opaque; if the change came through an alias, everything made so far is fenced off.
"""

from __future__ import annotations

import inspect
import math
import sys
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from leangrad import _torch
from leangrad.ledger import rng
from leangrad.ledger.origins import LIVE, NOTE, OPAQUE, Operand, key_of
from leangrad.ledger.value import Value

Handler = Callable[["Notes", Any, tuple[Any, ...], dict[str, Any]], Any]
RECENT = 4  # how many outputs of sources are held: query, key, value and one more


class Book(Protocol):
    """What the notes ask of the ledger."""

    min_bytes: int
    fence: int
    packing: bool  # the ledger itself is at work
    watched: dict[int, list[weakref.ref[Value]]]  # by memory: anchors that plain PyTorch would not have kept

    def settle(self, node: Any, nr: int, name: str) -> None:
        """Give the recipe of output ``nr`` of ``node`` to the value that was kept as its saved ``name``."""


class Notes(TorchFunctionMode):
    """The function override of one region."""

    def __init__(self, book: Book, *, hold_sources: bool) -> None:
        super().__init__()
        self.book = book
        self.hold_sources = hold_sources
        self.recent: deque[Tensor] = deque(maxlen=RECENT)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling():  # a compiled part of the model: dynamo traces this very function
            return func(*args, **(kwargs or {}))
        try:
            handler = HANDLERS[func]
        except KeyError:
            handler = HANDLERS[func] = _mutating() if _torch.mutates(func) else None
        if kwargs is None:
            return func(*args) if handler is None or self.book.packing else handler(self, func, args, {})
        if self.book.packing:
            return func(*args, **kwargs)
        if kwargs.get("out") is not None:
            return _write_out(self, func, args, kwargs)
        return func(*args, **kwargs) if handler is None else handler(self, func, args, kwargs)


HANDLERS: dict[Any, Handler | None] = {}  # None: the call passes through


# ----------------------------------------------------------------------------------------------------------------- noted


def _note(out: Any, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    node = out.grad_fn if isinstance(out, Tensor) else None
    if node is not None and torch.is_grad_enabled():
        node.metadata[NOTE] = _constants(names, args, kwargs)


def _constants(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    note: dict[str, Any] = {}
    for name, a in zip(names, args, strict=False):
        _note_one(note, name, a)
    for name, a in kwargs.items():
        _note_one(note, {"input": "self"}.get(name, name), a)
    return note


def _note_one(note: dict[str, Any], name: str, a: Any) -> None:
    if not isinstance(a, Tensor):
        if isinstance(a, list | tuple) and any(isinstance(t, Tensor) for t in a):
            note[name] = {i: Operand(t) for i, t in enumerate(a) if not t.requires_grad}
        else:
            note[name] = a
    elif not a.requires_grad:
        note[name] = Operand(a)


def _noted(names: str) -> Handler:
    names_ = tuple(names.split())

    def handler(notes: Notes, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        _note(out, names_, args, kwargs)
        return out

    return handler


def _noted_with_defaults(names: str, **defaults: Any) -> Handler:
    names_ = tuple(names.split())

    def handler(notes: Notes, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if not args or out is not args[0]:  # ``x.contiguous()`` may be x itself, and its node another op's
            missing = {k: v for k, v in defaults.items() if names_.index(k) >= len(args)}
            _note(out, names_, args, {**missing, **kwargs})
        return out

    return handler


def _copied(notes: Notes, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = func(*args, **kwargs)
    if kwargs.get("memory_format") is not None and out is not args[0] and out.grad_fn is not None:
        out.grad_fn.metadata[OPAQUE] = True
    return out


def _group_norm(notes: Notes, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = func(*args, **kwargs)
    _note(out, ("input", "num_groups", "weight", "bias", "eps"), args, kwargs)
    x = args[0] if args else kwargs["input"]
    if out.grad_fn is not None and not x.is_contiguous():
        # ATen may have made it contiguous, in a memory format that no node remembers.
        inner = out.grad_fn.next_functions[0][0]
        if inner is not x.grad_fn and type(inner).__name__ == "CloneBackward0":
            inner.metadata[OPAQUE] = True
    return out


def _embedding(notes: Notes, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _argument(func, args, kwargs, "max_norm") is None:
        return func(*args, **kwargs)
    weight = _argument(func, args, kwargs, "weight")  # it is changed in place, and the next look-up may change it again
    _before_change(notes, weight)
    out = func(*args, **kwargs)
    _after_change(notes, weight)
    if out.grad_fn is not None:
        out.grad_fn.metadata[OPAQUE] = True
    return out


def _second_output(name: str) -> Handler:
    """A function whose node keeps a second output that has a rule too."""

    def handler(notes: Notes, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if out.grad_fn is not None:
            notes.book.settle(out.grad_fn, 1, name)
        return out

    return handler


def _instance_norm(notes: Notes, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = func(*args, **kwargs)
    node = out.grad_fn
    if node is not None and type(node).__name__ == "ViewBackward0":
        node = node.next_functions[0][0]
    if type(node).__name__.endswith("BatchNormBackward0") and _argument(func, args, kwargs, "bias") is None:
        node.metadata[NOTE] = {"bias": None}
    return out


# --------------------------------------------------------------------------------------------------------------- sources


def _source(notes: Notes, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = func(*args, **kwargs)
    if type(out) is Tensor and out.nbytes >= notes.book.min_bytes:
        made = out._base if out._is_view() else out
        node = made.grad_fn if made is not None else None
        if node is not None and made is not None:
            node.metadata[LIVE] = None
            if notes.hold_sources:
                held = made.detach()
                node.metadata[LIVE] = (weakref.ref(held), held._version)
                notes.recent.append(held)
    return out


# ---------------------------------------------------------------------------------------------------------------- random


class Draw:
    """The random factor of a dropout that is written out in ATen: it is drawn again from the state before the op.

    ATen multiplies by ``empty_like(x).bernoulli_(1 - p).div_(1 - p)``; alpha dropout by ``bernoulli_(1 - p).mul_(a)`` and adds
    ``bernoulli - 1`` times a factor, plus a constant.
    """

    __slots__ = ("after", "dtype", "p", "shape", "state", "stride")

    def __init__(self, noise: Tensor, p: float, state: rng.State, after: rng.State | None) -> None:
        self.shape, self.stride, self.dtype = noise.shape, noise.stride(), noise.dtype
        self.p, self.state, self.after = p, state, after

    def bernoulli(self) -> Tensor:
        drawn = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        with rng.generator_at(self.state, self.after) as generator:
            return drawn.bernoulli_(1 - self.p, generator=generator)

    def factor(self) -> Tensor:
        return self.bernoulli().div_(1 - self.p)

    def alpha_factor(self) -> Tensor:
        return self.bernoulli().mul_(self._alpha())

    def alpha_shift(self) -> Tensor:
        scale = ALPHA * self._alpha()
        return self.bernoulli().add(-1).mul_(scale).add_(scale * self.p)

    def _alpha(self) -> float:
        return float(1.0 / math.sqrt((ALPHA * ALPHA * self.p + 1) * (1 - self.p)))


ALPHA = 1.7580993408473766  # of self-normalizing networks; ATen's own constant


def _dropout(notes: Notes, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, p, training, inplace = (_argument(func, args, kwargs, n) for n in ("input", "p", "training", "inplace"))
    if inplace:
        _before_change(notes, x)
    recorded = torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad
    if not recorded or not training or not 0 < p < 1 or x.nbytes < notes.book.min_bytes:
        out = func(*args, **kwargs)
        if inplace and training and p > 0 and not recorded:
            _after_change(notes, x)
        return out
    with rng.one_at_a_time:
        state = rng.state_of(x.device)
        out = func(*args, **kwargs)
        after = rng.state_of(x.device)
    node = out.grad_fn
    kind = type(node).__name__
    if state is None or node is None:
        return out
    if kind == "NativeDropoutBackward0":
        _note_native_dropout(notes, node, x.device, p, state, after)
    elif kind == "MulBackward0":
        noise = _noise(notes, node)
        if noise is not None:
            _redraw(noise, Draw(noise.tensor, p, state, after).factor)  # type: ignore[arg-type]
    elif kind == "AddBackward0":
        before = node.next_functions[0][0]
        noise = _noise(notes, before, smallest=0) if type(before).__name__ == "MulBackward0" else None
        if noise is not None:
            draw = Draw(noise.tensor, p, state, after)  # type: ignore[arg-type]
            if noise.nbytes >= notes.book.min_bytes:
                _redraw(noise, draw.alpha_factor)
            shift = Value("dropout")
            _redraw(shift, draw.alpha_shift)
            node.metadata[NOTE] = {"other": shift}
    return out


def _note_native_dropout(
    notes: Notes, node: Any, device: torch.device, p: float, state: rng.State, after: rng.State | None
) -> None:
    def redraw(t: Tensor) -> tuple[Tensor, Tensor]:
        return rng.run_again(state, after, device, lambda: torch.native_dropout(t, p, True))

    node.metadata[NOTE] = {"redraw": redraw}
    notes.book.settle(node, 1, "result1")


def _dropout_inside(name: str, place: int) -> Handler:
    """A composite function that draws once, for the dropout of its attention weights."""

    def handler(notes: Notes, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        p = kwargs[name] if name in kwargs else args[place] if place < len(args) else 0.0
        device = args[0].device if args and isinstance(args[0], Tensor) else None
        if not 0 < p < 1 or device is None or device.type != "cpu" or not torch.is_grad_enabled():
            return _source(notes, func, args, kwargs)
        with rng.one_at_a_time:
            state = rng.state_of(device)
            out = _source(notes, func, args, kwargs)
            after = rng.state_of(device)
        node = (out[0] if type(out) is tuple else out).grad_fn
        noise = _find_noise(notes, node)
        if noise is not None and state is not None and noise.tensor is not None:
            draw = Draw(noise.tensor, p, state, after)
            # ATen decides how often and when it draws; the proof is the drawing itself.
            if torch.equal(draw.factor(), noise.tensor):
                _redraw(noise, draw.factor)
        return out

    return handler


def _find_noise(notes: Notes, node: Any) -> Value | None:
    """The factor of the dropout on the way from the output of an attention back to its scores."""
    for _ in range(16):
        if node is None:
            return None
        if type(node).__name__ == "MulBackward0":
            return _noise(notes, node)
        node = node.next_functions[1 if type(node).__name__ == "AddmmBackward0" else 0][0]
    return None


def _noise(notes: Notes, node: Any, smallest: int | None = None) -> Value | None:
    """The value that was kept for the random factor of a product."""
    noise = _torch.packed(node._raw_saved_other)
    if type(noise) is not Value or noise.tensor is None or noise.op != "input":
        return None
    return noise if noise.nbytes >= (notes.book.min_bytes if smallest is None else smallest) else None


def _redraw(noise: Value, draw: Callable[[], Tensor]) -> None:
    noise.op = "dropout"
    noise.set_recipe(draw, (), {})
    noise.tensor = None
    noise.free = True  # it costs nothing and joins no lineages


def _pooled(notes: Notes, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = func(*args, **kwargs)
    pooled = out[0] if type(out) is tuple else out
    node = pooled.grad_fn
    while node is not None and type(node).__name__ in ("SqueezeBackward1", "ViewBackward0"):
        node = node.next_functions[0][0]
    if node is not None and type(node).__name__.startswith(("MaxPool", "AdaptiveMaxPool")):
        notes.book.settle(node, 1, "result1")
    return out


# --------------------------------------------------------------------------------------------------------------- mutated


def _before_change(notes: Notes, target: Any) -> None:
    """Anchors that plain PyTorch would not have kept move to memory of their own before it changes."""
    if isinstance(target, list | tuple):
        for t in target:
            _before_change(notes, t)
    elif isinstance(target, Tensor) and target.layout is torch.strided:
        for ref in notes.book.watched.pop(target.untyped_storage().data_ptr(), ()):
            value = ref()
            if value is not None and value.tensor is not None:
                value.tensor = value.tensor.detach().clone()
                value.version = value.tensor._version


def _after_change(notes: Notes, target: Any) -> None:
    """``target`` was changed in place and autograd did not record it: what was made so far may not be what it was."""
    if isinstance(target, list | tuple):
        for t in target:
            _after_change(notes, t)
    elif isinstance(target, Tensor) and not _is_private(target):
        for t in (target, target._base):
            node = _node_of(t)
            if node is not None:
                node.metadata[OPAQUE] = True
        notes.book.fence = _torch.next_sequence_nr()


def _is_private(tensor: Tensor) -> bool:
    """Whether no parameter and no tensor of the graph can lie in this memory."""
    owner = tensor if tensor._base is None else tensor._base
    return not tensor.requires_grad and not owner.requires_grad and not _torch.storage_is_shared(tensor)


def _node_of(tensor: Any) -> Any:
    try:
        return tensor.grad_fn if isinstance(tensor, Tensor) else None
    except RuntimeError:  # a view made under no_grad whose base has changed since: torch refuses to name its node
        return None


def _swapped(notes: Notes, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x.data = y``: other memory, and no new version."""
    _before_change(notes, args[0])
    node = _node_of(args[0])
    if node is not None:
        node.metadata.pop(key_of(args[0].output_nr), None)
    result = func(*args, **kwargs)
    _after_change(notes, args[0])
    return result


def _leaked(notes: Notes, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The bare memory of a tensor leaves torch: it may be written at any time, and nobody will tell."""
    if args and isinstance(args[0], Tensor) and not _is_private(args[0]):
        notes.book.fence = sys.maxsize
    return func(*args, **kwargs)


def _overlap(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operand lies in the memory of the tensor that is about to change."""
    if not isinstance(target, Tensor):
        return True
    memory = target.untyped_storage().data_ptr()
    operands = (a for a in (*args[1:], *kwargs.values()) if isinstance(a, Tensor) and not a.requires_grad)
    return any(a.untyped_storage().data_ptr() == memory for a in operands)


def _mutating(names: str = "", choose: str | None = None) -> Handler:
    names_ = tuple(names.split())

    def handler(notes: Notes, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if choose is not None and not _argument(func, args, kwargs, choose):
            out = func(*args, **kwargs)
            if names_:
                _note(out, names_, args, kwargs)
            return out
        target = args[0] if args else next((kwargs[k] for k in ("input", "tensor", "self") if k in kwargs), None)
        _before_change(notes, target)
        # Noted before the change: an operand that shares the target's memory is not what it was any more.
        note = _constants(names_, args, kwargs) if names_ and not _overlap(target, args, kwargs) else None
        before = _node_of(target)
        out = func(*args, **kwargs)
        node = _node_of(target)
        if node is before:  # autograd did not record it
            _after_change(notes, target)
        elif note is not None:
            node.metadata[NOTE] = note
        return out

    return handler


def _write_out(notes: Notes, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _before_change(notes, kwargs["out"])
    result = func(*args, **kwargs)
    _after_change(notes, kwargs["out"])
    return result


_PARAMETERS: dict[tuple[Any, str], tuple[int, Any]] = {}


def _argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """An argument of a Python function by its name, given or default."""
    found = kwargs.get(name, _PARAMETERS)
    if found is not _PARAMETERS:
        return found
    place = _PARAMETERS.get((func, name))
    if place is None:
        parameters = inspect.signature(func).parameters
        place = _PARAMETERS[func, name] = list(parameters).index(name), parameters[name].default
    return args[place[0]] if place[0] < len(args) else place[1]


# ---------------------------------------------------------------------------------------------------------------- tables


# Functions and methods of torch whose nodes forget operands that need no gradient, and the names of their arguments.
FORGOTTEN = {
    "self other": "add sub subtract fmod remainder copysign hypot",
    "self end weight": "lerp",
    "self tensor1 tensor2": "addcmul addcdiv",
    "self mask value": "masked_fill",
    "self mask source": "masked_scatter",
    "self dim index value": "index_fill scatter",
    "self dim index src": "scatter_add",
    "self dim index source": "index_add index_copy",
    "abs angle": "polar",
    "real imag": "complex",
}


def _enter(handler: Handler, *functions: Any) -> None:
    for f in functions:
        HANDLERS[f] = handler


def _fill_tables() -> None:
    T = Tensor
    # Every function of torch whose name ends in one underscore changes its first argument.
    for home in (T, torch, F):
        for name in dir(home):
            if name.endswith("_") and not name.endswith("__") and not name.startswith("_"):
                function = getattr(home, name)
                if callable(function) and name != "requires_grad_":
                    _enter(_mutating(), function)
    _enter(_mutating(), T.__setitem__, T.__ipow__, T.__ifloordiv__, T.__imod__, T.__ilshift__, T.__irshift__)
    for name in ("relu", "leaky_relu", "elu", "celu", "selu", "silu", "mish", "hardswish", "hardsigmoid", "hardtanh"):
        _enter(_mutating(choose="inplace"), getattr(F, name))
    _enter(_mutating(choose="inplace"), F.relu6, F.rrelu, F.dropout1d, F.dropout2d, F.dropout3d)
    _enter(_mutating("self threshold value", choose="inplace"), F.threshold)

    for names, functions in FORGOTTEN.items():
        for name in functions.split():
            _enter(_noted(names), *(getattr(home, name) for home in (T, torch) if hasattr(home, name)))
            if hasattr(T, name + "_"):
                _enter(_mutating(names), getattr(T, name + "_"))
    _enter(_noted("self other"), T.__add__, T.__radd__, T.__sub__, T.__rsub__, T.__mod__, torch.rsub)
    _enter(_mutating("self other"), T.__iadd__, T.__isub__, T.__imod__)
    _enter(_noted("condition self other"), torch.where)
    _enter(_noted("self condition other"), T.where)
    _enter(_noted("tensors dim"), torch.cat, torch.concat, torch.concatenate, torch.stack)
    nan_to_num = _noted_with_defaults("self nan posinf neginf", nan=None, posinf=None, neginf=None)
    _enter(nan_to_num, torch.nan_to_num, T.nan_to_num)
    _enter(_noted_with_defaults("self pad mode value", value=None), F.pad)
    _enter(_noted_with_defaults("self pad value", value=0), torch.constant_pad_nd)
    _enter(_noted_with_defaults("input normalized_shape weight bias eps", eps=1e-5), F.layer_norm, torch.layer_norm)
    _enter(_noted_with_defaults("input normalized_shape weight eps", eps=None), F.rms_norm, torch.rms_norm)
    _enter(_noted("input running_mean running_var weight bias training momentum eps"), F.batch_norm)
    _enter(_noted("input weight bias running_mean running_var training momentum eps"), torch.batch_norm)
    _enter(_group_norm, F.group_norm, torch.group_norm)
    _enter(_embedding, F.embedding)
    _enter(_second_output("buffer"), F.logsigmoid)
    _enter(_noted_with_defaults("self memory_format", memory_format=torch.contiguous_format), T.contiguous)
    _enter(_noted_with_defaults("self memory_format", memory_format=torch.preserve_format), T.clone, torch.clone)
    _enter(_copied, T.to, T.float, T.double, T.half, T.bfloat16, T.cpu, T.cuda)
    _enter(_swapped, T.data.__set__)  # type: ignore[attr-defined]
    _enter(_leaked, T.numpy, T.__array__, T.__dlpack__, T.data_ptr, T.untyped_storage, T.storage)
    _enter(_leaked, torch.utils.dlpack.to_dlpack)

    _enter(_source, F.linear, F.bilinear, torch.matmul, T.matmul, T.__matmul__, torch.mm, T.mm, torch.bmm, T.bmm)
    _enter(_source, torch.addmm, T.addmm, torch.baddbmm, T.baddbmm, torch.einsum)
    for name in ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"):
        _enter(_source, getattr(torch, name), getattr(F, name))

    _enter(_dropout, F.dropout, F.alpha_dropout, F.feature_alpha_dropout)
    _enter(_dropout_inside("dropout_p", 4), F.scaled_dot_product_attention)
    _enter(_dropout_inside("dropout_p", 10), F.multi_head_attention_forward)
    _enter(_instance_norm, F.instance_norm)
    for d in "123":
        for name in (f"max_pool{d}d", f"adaptive_max_pool{d}d"):
            _enter(_pooled, getattr(F, name), getattr(F, name + "_with_indices"))


_fill_tables()
