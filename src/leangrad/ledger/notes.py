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
from leangrad.ledger.origins import LIVE, NOTE, OPAQUE, Operand, known
from leangrad.ledger.value import Value

Handler = Callable[["Notes", Any, tuple[Any, ...], dict[str, Any]], Any]
RECENT = 4  # how many outputs of sources are held: query, key, value and one more


class Book(Protocol):
    """What the notes ask of the ledger."""

    min_bytes: int
    fence: int

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
        try:
            handler = HANDLERS[func]
        except KeyError:
            handler = HANDLERS[func] = _mutating() if _torch.mutates(func) else None
        if handler is not None:
            return handler(self, func, args, kwargs or {})
        if kwargs is None:
            return func(*args)
        if kwargs.get("out") is not None:
            return _write_out(self, func, args, kwargs)
        return func(*args, **kwargs)


HANDLERS: dict[Any, Handler | None] = {}  # None: the call passes through


# ----------------------------------------------------------------------------------------------------------------- noted


def _note(out: Any, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    node = out.grad_fn if isinstance(out, Tensor) else None
    if node is None or not torch.is_grad_enabled():
        return
    note: dict[str, Any] = {}
    for name, a in zip(names, args, strict=False):
        _note_one(note, name, a)
    for name, a in kwargs.items():
        _note_one(note, {"input": "self"}.get(name, name), a)
    if note:
        node.metadata[NOTE] = note


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


def _instance_norm(notes: Notes, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = func(*args, **kwargs)
    node = out.grad_fn
    if node is not None and type(node).__name__ == "ViewBackward0":
        node = node.next_functions[0][0]
    if type(node).__name__.endswith("BatchNormBackward0") and _bind(func, args, kwargs)["bias"] is None:
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

    __slots__ = ("device", "dtype", "p", "shape", "state", "stride")

    def __init__(self, noise: Tensor, p: float, state: rng.State) -> None:
        self.shape, self.stride, self.dtype, self.device = noise.shape, noise.stride(), noise.dtype, noise.device
        self.p, self.state = p, state

    def bernoulli(self) -> Tensor:
        drawn = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        rng.with_state(self.state, self.device, drawn.bernoulli_, 1 - self.p)
        return drawn

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
    bound = _bind(func, args, kwargs)
    x, p, training, inplace = bound["input"], bound["p"], bound["training"], bool(bound.get("inplace"))
    if inplace:
        _before_change(x)
    recorded = torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad
    if not recorded or not training or not 0 < p < 1 or x.nbytes < notes.book.min_bytes:
        out = func(*args, **kwargs)
        if inplace and training and p > 0 and not recorded:
            _after_change(notes, x)
        return out
    state = rng.state_of(x.device)
    out = func(*args, **kwargs)
    node = out.grad_fn
    kind = type(node).__name__
    if state is None or node is None:
        return out
    if kind == "NativeDropoutBackward0":
        _note_native_dropout(notes, node, x.device, p, state)
    elif kind == "MulBackward0":
        noise = _noise(notes, node)
        if noise is not None:
            _redraw(noise, Draw(noise.tensor, p, state).factor)  # type: ignore[arg-type]
    elif kind == "AddBackward0":
        before = node.next_functions[0][0]
        noise = _noise(notes, before, smallest=0) if type(before).__name__ == "MulBackward0" else None
        if noise is not None:
            draw = Draw(noise.tensor, p, state)  # type: ignore[arg-type]
            if noise.nbytes >= notes.book.min_bytes:
                _redraw(noise, draw.alpha_factor)
            shift = Value("dropout")
            _redraw(shift, draw.alpha_shift)
            node.metadata[NOTE] = {"other": shift}
    return out


def _note_native_dropout(notes: Notes, node: Any, device: torch.device, p: float, state: rng.State) -> None:
    def redraw(t: Tensor) -> tuple[Tensor, Tensor]:
        return rng.with_state(state, device, torch.native_dropout, t, p, True)  # type: ignore[no-any-return]

    node.metadata[NOTE] = {"redraw": redraw}
    notes.book.settle(node, 1, "result1")


def _dropout_inside(name: str) -> Handler:
    """A composite function that draws once, for the dropout of its attention weights."""

    def handler(notes: Notes, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        p = kwargs.get(name)
        if p is None:
            p = _bind(func, args, kwargs).get(name, 0.0) if func is F.multi_head_attention_forward else 0.0
            if func is not F.multi_head_attention_forward and len(args) > 4:
                p = args[4]
        device = args[0].device if args and isinstance(args[0], Tensor) else None
        if not 0 < p < 1 or device is None or device.type != "cpu" or not torch.is_grad_enabled():
            return _source(notes, func, args, kwargs)
        state = rng.state_of(device)
        out = _source(notes, func, args, kwargs)
        node = (out[0] if type(out) is tuple else out).grad_fn
        noise = _find_noise(notes, node)
        if noise is not None and state is not None and noise.tensor is not None:
            draw = Draw(noise.tensor, p, state)
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
    noise.op, noise.function = "dropout", draw
    noise.tensor = None
    noise.free = True  # it costs nothing and joins no lineages


def _pooled(notes: Notes, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = func(*args, **kwargs)
    pooled = out[0] if type(out) is tuple else out
    node = pooled.grad_fn
    while node is not None and type(node).__name__ in ("SqueezeBackward1", "ViewBackward0"):
        node = node.next_functions[0][0]
    if node is not None and type(node).__name__.startswith(("MaxPool", "AdaptiveMaxPool2D")):
        notes.book.settle(node, 1, "result1")
    return out


# --------------------------------------------------------------------------------------------------------------- mutated


def _before_change(target: Any) -> None:
    """An anchor that autograd did not ask for moves to memory of its own before its tensor changes."""
    for t in (target, target._base if isinstance(target, Tensor) and target._is_view() else None):
        node = t.grad_fn if isinstance(t, Tensor) else None
        if node is None:
            continue
        value = known(node, t.output_nr)  # type: ignore[union-attr]
        if value is not None and value.caught and value.tensor is not None:
            value.tensor = value.tensor.clone()
            value.version = value.tensor._version


def _after_change(notes: Notes, target: Any) -> None:
    """``target`` was changed in place and autograd did not record it."""
    if not isinstance(target, Tensor):
        return
    base = target._base
    nodes = [t.grad_fn for t in (target, base) if t is not None and t.grad_fn is not None]
    for node in nodes:
        node.metadata[OPAQUE] = True
    owner = target if base is None else base
    if owner.grad_fn is None and owner.requires_grad:
        return  # a parameter: every recipe checks its version
    if nodes or _torch.storage_is_shared(target):
        notes.book.fence = _torch.next_sequence_nr()


def _mutating(names: str = "", choose: str | None = None) -> Handler:
    names_ = tuple(names.split())

    def handler(notes: Notes, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if choose is not None and not _bind(func, args, kwargs).get(choose):
            out = func(*args, **kwargs)
            if names_:
                _note(out, names_, args, kwargs)
            return out
        target = args[0] if args else kwargs.get("input")
        _before_change(target)
        out = func(*args, **kwargs)
        if isinstance(target, Tensor) and target.requires_grad and torch.is_grad_enabled():
            if names_:
                _note(target, names_, args, kwargs)
        else:
            _after_change(notes, target)
        return out

    return handler


def _write_out(notes: Notes, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = func(*args, **kwargs)
    outs = kwargs["out"]
    for target in outs if isinstance(outs, tuple | list) else (outs,):
        _after_change(notes, target)
    return result


_SIGNATURES: dict[Any, inspect.Signature] = {}


def _bind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a Python function by name, defaults filled in."""
    signature = _SIGNATURES.get(func)
    if signature is None:
        signature = _SIGNATURES[func] = inspect.signature(func)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


# ---------------------------------------------------------------------------------------------------------------- tables


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
    _enter(_mutating(choose="inplace"), F.relu6, F.rrelu)
    _enter(_mutating("self threshold value", choose="inplace"), F.threshold)
    for add in (T.add_, T.__iadd__, T.sub_, T.__isub__, T.subtract_):
        _enter(_mutating("self other"), add)
    _enter(_mutating("self mask value"), T.masked_fill_)
    _enter(_mutating("self dim index source"), T.index_add_)
    _enter(_noted("self dim index source"), T.index_add, torch.index_add)

    _enter(_noted("self other"), T.add, torch.add, T.__add__, T.__radd__, T.sub, torch.sub, T.__sub__, T.__rsub__)
    _enter(_noted("self other"), torch.rsub, T.subtract, torch.subtract)
    _enter(_noted("self mask value"), T.masked_fill, torch.masked_fill)
    _enter(_noted("condition self other"), torch.where)
    _enter(_noted("self condition other"), T.where)
    _enter(_noted("tensors dim"), torch.cat, torch.concat, torch.concatenate, torch.stack)
    _enter(_noted("self nan posinf neginf"), torch.nan_to_num, T.nan_to_num)
    _enter(_noted("self tensor1 tensor2"), torch.addcmul, T.addcmul, torch.addcdiv, T.addcdiv)
    _enter(_noted("self end weight"), torch.lerp, T.lerp)
    _enter(_noted_with_defaults("self pad mode value", value=None), F.pad)
    _enter(_noted_with_defaults("input normalized_shape weight bias eps", eps=1e-5), F.layer_norm, torch.layer_norm)
    _enter(_noted_with_defaults("input normalized_shape weight eps", eps=None), F.rms_norm, torch.rms_norm)
    _enter(_noted("input running_mean running_var weight bias training momentum eps"), F.batch_norm)
    _enter(_noted("input weight bias running_mean running_var training momentum eps"), torch.batch_norm)
    _enter(_noted("input num_groups weight bias eps"), F.group_norm, torch.group_norm)
    _enter(_noted_with_defaults("self memory_format", memory_format=torch.contiguous_format), T.contiguous)
    _enter(_noted_with_defaults("self memory_format", memory_format=torch.preserve_format), T.clone, torch.clone)
    _enter(_copied, T.to)

    _enter(_source, F.linear, F.bilinear, torch.matmul, T.matmul, T.__matmul__, torch.mm, T.mm, torch.bmm, T.bmm)
    _enter(_source, torch.addmm, T.addmm, torch.baddbmm, T.baddbmm, torch.einsum)
    for name in ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"):
        _enter(_source, getattr(torch, name), getattr(F, name))

    _enter(_dropout, F.dropout, F.alpha_dropout, F.feature_alpha_dropout)
    _enter(_dropout_inside("dropout_p"), F.scaled_dot_product_attention, F.multi_head_attention_forward)
    _enter(_instance_norm, F.instance_norm)
    _enter(_pooled, F.max_pool1d, F.max_pool2d, F.max_pool3d, F.adaptive_max_pool2d)


_fill_tables()
