"""Random numbers that are drawn again instead of kept.

The generator's state before a dropout is noted, so that its mask, or the random factor that ATen multiplies by, costs
backward one drawing and forward no memory. What was drawn is found as a saved tensor of the node that used it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from leangrad import _torch
from leangrad.ledger.observe import rng
from leangrad.ledger.observe.call_args import Handler, argument
from leangrad.ledger.observe.function_mode import FunctionMode
from leangrad.ledger.observe.mutation import after_change, before_change
from leangrad.ledger.values.node_metadata import NOTE
from leangrad.ledger.values.value import Value


class DropoutMask:
    """The random factor of a dropout that is written out in ATen: it is drawn again from the state before the op.

    ATen multiplies by ``empty_like(x).bernoulli_(1 - p).div_(1 - p)``; alpha dropout by ``bernoulli_(1 - p).mul_(a)``
    and adds ``bernoulli - 1`` times a factor, plus a constant.
    """

    __slots__ = ("after", "dtype", "p", "shape", "state", "stride")

    def __init__(self, noise: Tensor, p: float, state: rng.State, after: rng.Mark | None) -> None:
        self.shape, self.stride, self.dtype = noise.shape, noise.stride(), noise.dtype
        self.p, self.state, self.after = p, state, after

    def bernoulli(self) -> Tensor:
        """Ones, and zeros with probability ``p``."""
        drawn = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")
        with _torch.without_batches():
            return rng.draw_again(self.state, self.after, lambda g: drawn.bernoulli_(1 - self.p, generator=g))

    def factor(self) -> Tensor:
        """What dropout multiplies by: zeros, and a number that needs to be divided only once."""
        scale = _inverse(1 - self.p, self.dtype)
        drawn = self.bernoulli()
        return drawn.mul_(scale) if math.isfinite(scale) else drawn.div_(1 - self.p)

    def alpha_factor(self) -> Tensor:
        """What alpha dropout multiplies by."""
        return self.bernoulli().mul_(self._alpha())

    def alpha_shift(self, factor: Tensor) -> Tensor:
        """What alpha dropout then adds. ``factor`` is zero or positive, so its sign is what was drawn."""
        scale = ALPHA * self._alpha()
        return factor.sign().add_(-1).mul_(scale).add_(scale * self.p)

    def _alpha(self) -> float:
        return float(1.0 / math.sqrt((ALPHA * ALPHA * self.p + 1) * (1 - self.p)))


@functools.lru_cache(maxsize=64)
def _inverse(number: float, dtype: torch.dtype) -> float:
    return torch.ones((), dtype=dtype, device="cpu").div_(number).item()


ALPHA = 1.7580993408473766  # of self-normalizing networks; ATen's own constant


def dropout(notes: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Dropout and alpha dropout: note the state before it, and let go of what was drawn."""
    if len(args) == 1 and len(kwargs) == 3:  # as torch shows it to an override
        x, p, training, inplace = args[0], kwargs["p"], kwargs["training"], kwargs["inplace"]
    else:
        x, p, training, inplace = (argument(func, args, kwargs, n) for n in ("input", "p", "training", "inplace"))
    if not training or p == 0:  # it hands its input back
        return func(*args, **kwargs)
    if inplace:
        before_change(notes.book, x)
    recorded = is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad
    if not recorded or not 0 < p < 1 or x.nbytes < notes.book.min_bytes:
        out = func(*args, **kwargs)
        if inplace and p > 0 and not recorded:
            after_change(notes.book, x)
        return out
    p = float(p)  # as ATen reads it: ``1 - p`` of a NumPy scalar or a tensor is rounded to the dtype of that
    with rng.one_at_a_time:
        state = rng.state_of(x.device)
        out = func(*args, **kwargs)
        after = rng.mark_of(x.device)
    node = out.grad_fn
    kind = type(node).__name__
    if state is None or node is None:
        return out
    if kind == "NativeDropoutBackward0":
        _note_native_dropout(notes, node, x.device, p, state, after)
    elif not isinstance(state, Tensor):
        pass  # what is written out on an accelerator (alpha dropout) has its numbers kept
    elif kind == "MulBackward0":
        noise = _noise(notes, node)
        if noise is not None:
            _redraw(noise, DropoutMask(noise.tensor, p, state, after).factor)  # type: ignore[arg-type]
    elif kind == "AddBackward0":
        before = node.next_functions[0][0]
        noise = _noise(notes, before, smallest=0) if type(before).__name__ == "MulBackward0" else None
        if noise is not None:
            draw = DropoutMask(noise.tensor, p, state, after)  # type: ignore[arg-type]
            if noise.nbytes >= notes.book.min_bytes:
                _redraw(noise, draw.alpha_factor)
            shift = Value("dropout")
            shift.set_recipe(draw.alpha_shift, (noise,), {})
            shift.free = True
            node.metadata[NOTE] = {"other": shift}
    return out


def _note_native_dropout(
    notes: FunctionMode, node: Any, device: torch.device, p: float, state: rng.State, after: rng.Mark | None
) -> None:
    def redraw(t: Tensor) -> tuple[Tensor, Tensor]:
        return rng.run_again(state, after, device, lambda: torch.native_dropout(t, p, True))

    node.metadata[NOTE] = {"redraw": redraw}
    notes.book.settle(node, 1, "result1")


MAX_FORMS = 1024
_PROVEN: dict[Any, bool] = {}  # whether attention of this form draws its dropout once, from the state before it


def dropout_inside(name: str, place: int, inner: Handler) -> Handler:
    """A composite function that draws once, for the dropout of its attention weights; ``inner`` handles the rest.

    On a CPU the weights are written out, and their random factor is drawn again. On CUDA a fused kernel draws, and runs
    again as a whole, where recipes run through products.

    name, place: of the argument that is the probability of dropout.
    """

    def handler(notes: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        p = kwargs[name] if name in kwargs else args[place] if place < len(args) else 0.0
        if not 0 < p < 1 or not is_grad_enabled():
            return inner(notes, func, args, kwargs)
        query = args[0] if args else kwargs.get("query")
        device = query.device if isinstance(query, Tensor) else None
        if device is None or (device.type != "cpu" and not notes.book.max_products):
            return inner(notes, func, args, kwargs)
        p = float(p)  # as above
        with rng.one_at_a_time:
            state = rng.state_of(device)
            if not isinstance(state, Tensor):
                return _drawing(notes, state, device, lambda: inner(notes, func, args, kwargs))
            out = inner(notes, func, args, kwargs)
            after = rng.mark_of(device)
        node = (out[0] if type(out) is tuple else out).grad_fn
        noise = _find_noise(notes, node)
        if noise is not None and state is not None and noise.tensor is not None:
            draw = DropoutMask(noise.tensor, p, state, after)
            # ATen decides how often and when it draws, by the shapes and the device alone; the proof is the drawing.
            form = (func, draw.shape, draw.stride, draw.dtype, p)
            proven = _PROVEN.get(form)
            if proven is None:
                if len(_PROVEN) >= MAX_FORMS:  # lengths that never come again
                    _PROVEN.clear()
                with _torch.unseen():
                    proven = _PROVEN[form] = torch.equal(draw.factor(), noise.tensor)
            if proven:
                _redraw(noise, draw.factor)
        return out

    return handler


def _drawing(notes: FunctionMode, state: rng.State | None, device: torch.device, call: Callable[[], Any]) -> Any:
    """Run a call that draws once on CUDA, from ``state``: see [Note: attention that draws]."""
    if state is not None:
        notes.book.draw = rng.Draw(device, state, _torch.next_sequence_nr())
    try:
        return call()
    finally:
        notes.book.draw = None


def _find_noise(notes: FunctionMode, node: Any) -> Value | None:
    """The factor of the dropout on the way from the output of an attention back to its scores."""
    for _ in range(16):
        if node is None:
            return None
        if type(node).__name__ == "MulBackward0":
            return _noise(notes, node)
        node = node.next_functions[1 if type(node).__name__ == "AddmmBackward0" else 0][0]
    return None


def _noise(notes: FunctionMode, node: Any, smallest: int | None = None) -> Value | None:
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
