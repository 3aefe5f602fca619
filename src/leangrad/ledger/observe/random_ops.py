"""Random numbers that backward draws again, so that forward need not keep them.

The handlers record the generator state before a dropout. From it backward draws the mask, or the random factor that
ATen multiplies by, once more, and forward keeps no memory for it. The handlers find the drawn tensor among the saved
tensors of the node that used it.
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
from leangrad.ledger.observe.call_args import Handler, argument, notes_need
from leangrad.ledger.observe.function_mode import FunctionMode
from leangrad.ledger.observe.mutation import after_change, before_change
from leangrad.ledger.values.node_metadata import NOTE
from leangrad.ledger.values.value import Value


class DropoutMask:
    """The random factor of a dropout that ATen composes of other ops; it is drawn again from the state before the call.

    ATen multiplies by ``empty_like(x).bernoulli_(1 - p).div_(1 - p)``; alpha dropout by ``bernoulli_(1 - p).mul_(a)``
    and adds ``bernoulli - 1`` times a factor, plus a constant.

    noise: the factor that was drawn. p: probability of a zero.
    state, after: generator state before the call, and the mark of the generator after it.
    """

    __slots__ = ("after", "dtype", "p", "shape", "state", "stride")

    def __init__(self, noise: Tensor, p: float, state: rng.State, after: rng.Mark | None) -> None:
        self.shape, self.stride, self.dtype = noise.shape, noise.stride(), noise.dtype
        self.p, self.state, self.after = p, state, after

    def bernoulli(self) -> Tensor:
        """Draw again: zeros with probability ``p``, else ones."""
        drawn = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")
        with _torch.without_batches():
            return rng.draw_again(self.state, self.after, lambda g: drawn.bernoulli_(1 - self.p, generator=g))

    def factor(self) -> Tensor:
        """Return what dropout multiplies by: zeros and ``1 / (1 - p)``, which is computed only once."""
        scale = _inverse(1 - self.p, self.dtype)
        drawn = self.bernoulli()
        return drawn.mul_(scale) if math.isfinite(scale) else drawn.div_(1 - self.p)

    def alpha_factor(self) -> Tensor:
        """Return what alpha dropout multiplies by."""
        return self.bernoulli().mul_(self._alpha())

    def alpha_shift(self, factor: Tensor) -> Tensor:
        """Return what alpha dropout then adds. ``factor`` is zero or positive, so its sign is the Bernoulli draw."""
        scale = ALPHA * self._alpha()
        return factor.sign().add_(-1).mul_(scale).add_(scale * self.p)

    def _alpha(self) -> float:
        return float(1.0 / math.sqrt((ALPHA * ALPHA * self.p + 1) * (1 - self.p)))


@functools.lru_cache(maxsize=64)
def _inverse(number: float, dtype: torch.dtype) -> float:
    return torch.ones((), dtype=dtype, device="cpu").div_(number).item()


ALPHA = 1.7580993408473766  # the alpha of self-normalizing networks, as in ATen


@notes_need
def dropout(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle dropout and alpha dropout: record the generator state before the call, and do not keep what was drawn."""
    if len(args) == 1 and len(kwargs) == 3:  # as torch passes the call to a function mode
        x, p, training, inplace = args[0], kwargs["p"], kwargs["training"], kwargs["inplace"]
    else:
        x, p, training, inplace = (argument(func, args, kwargs, n) for n in ("input", "p", "training", "inplace"))
    if not training or p == 0:  # it returns its input
        return func(*args, **kwargs)
    mode.region.needs_mode()
    if inplace:
        before_change(mode.region, x)
    recorded = is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad
    if not recorded or not 0 < p < 1 or x.nbytes < mode.region.min_bytes:
        out = func(*args, **kwargs)
        if inplace and p > 0 and not recorded:
            after_change(mode.region, x)
        return out
    p = float(p)  # as ATen reads it: ``1 - p`` of a NumPy scalar or a tensor is rounded to its dtype
    with rng.one_at_a_time:
        state = rng.state_of(x.device)
        out = func(*args, **kwargs)
        after = rng.mark_of(x.device)
    node = out.grad_fn
    kind = type(node).__name__
    if state is None or node is None:
        return out
    if kind == "NativeDropoutBackward0":
        _note_native_dropout(mode, node, x.device, p, state, after)
    elif not isinstance(state, Tensor):
        pass  # alpha dropout on an accelerator, where ATen composes it of other ops: its random numbers are kept
    elif kind == "MulBackward0":
        noise = _noise(mode, node)
        if noise is not None:
            _redraw(noise, DropoutMask(noise.tensor, p, state, after).factor)  # type: ignore[arg-type]
    elif kind == "AddBackward0":
        before = node.next_functions[0][0]
        noise = _noise(mode, before, smallest=0) if type(before).__name__ == "MulBackward0" else None
        if noise is not None:
            draw = DropoutMask(noise.tensor, p, state, after)  # type: ignore[arg-type]
            if noise.nbytes >= mode.region.min_bytes:
                _redraw(noise, draw.alpha_factor)
            shift = Value("dropout")
            shift.set_recipe(draw.alpha_shift, (noise,), {})
            shift.free = True
            node.metadata[NOTE] = {"other": shift}
    return out


def _note_native_dropout(
    mode: FunctionMode, node: Any, device: torch.device, p: float, state: rng.State, after: rng.Mark | None
) -> None:
    def redraw(t: Tensor) -> tuple[Tensor, Tensor]:
        return rng.run_again(state, after, device, lambda: torch.native_dropout(t, p, True))

    node.metadata[NOTE] = {"redraw": redraw}
    mode.region.attach_recipe(node, 1, "result1")


MAX_FORMS = 1024
_PROVEN: dict[Any, bool] = {}  # by form of attention: whether its dropout is drawn once, from the state before it


def dropout_inside(name: str, place: int, inner: Handler) -> Handler:
    """Return a handler for a composite function that draws once, for the dropout of its attention weights.

    On a CPU ATen composes the attention of other ops, and the random factor of its weights is drawn again. On CUDA a
    fused kernel draws the factor; if recipes run through products, the kernel runs again as a whole.

    name, place: name and position of the argument that is the probability of dropout.
    inner: handler that makes the call and does everything else.
    """

    @notes_need
    def handler(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        p = kwargs[name] if name in kwargs else args[place] if place < len(args) else 0.0
        if not 0 < p < 1 or not is_grad_enabled():
            return inner(mode, func, args, kwargs)
        mode.region.needs_mode()
        query = args[0] if args else kwargs.get("query")
        device = query.device if isinstance(query, Tensor) else None
        if device is None or (device.type != "cpu" and not mode.region.max_products):
            return inner(mode, func, args, kwargs)
        p = float(p)  # as above
        with rng.one_at_a_time:
            state = rng.state_of(device)
            if not isinstance(state, Tensor):
                return _drawing(mode, state, device, lambda: inner(mode, func, args, kwargs))
            out = inner(mode, func, args, kwargs)
            after = rng.mark_of(device)
        node = (out[0] if type(out) is tuple else out).grad_fn
        noise = _find_noise(mode, node)
        if noise is not None and state is not None and noise.tensor is not None:
            draw = DropoutMask(noise.tensor, p, state, after)
            # How often and when ATen draws depends on the shapes and the device alone. So one comparison of what is
            # drawn again with what was drawn proves it for all calls of one form.
            form = (func, draw.shape, draw.stride, draw.dtype, p)
            proven = _PROVEN.get(form)
            if proven is None:
                if len(_PROVEN) >= MAX_FORMS:  # for instance of sequence lengths that do not recur
                    _PROVEN.clear()
                with _torch.unseen():
                    proven = _PROVEN[form] = torch.equal(draw.factor(), noise.tensor)
            if proven:
                _redraw(noise, draw.factor)
        return out

    return handler


def _drawing(mode: FunctionMode, state: rng.State | None, device: torch.device, call: Callable[[], Any]) -> Any:
    """Run a call that draws once on CUDA, from generator state ``state``: see [Note: attention that draws]."""
    if state is not None:
        mode.region.draw = rng.Draw(device, state, _torch.next_sequence_nr())
    try:
        return call()
    finally:
        mode.region.draw = None


def _find_noise(mode: FunctionMode, node: Any) -> Value | None:
    """Return the value of an attention's dropout factor, or None.

    node: node of the output; the search follows the graph from there back towards the scores.
    """
    for _ in range(16):
        if node is None:
            return None
        if type(node).__name__ == "MulBackward0":
            return _noise(mode, node)
        node = node.next_functions[1 if type(node).__name__ == "AddmmBackward0" else 0][0]
    return None


def _noise(mode: FunctionMode, node: Any, smallest: int | None = None) -> Value | None:
    """Return the value that was kept for the random factor in the multiplication ``node``; None if there is none.

    smallest: bytes below which it is left alone; None: the ``min_bytes`` of the region.
    """
    noise = _torch.packed(node._raw_saved_other)
    if type(noise) is not Value or noise.tensor is None or noise.op != "input":
        return None
    return noise if noise.nbytes >= (mode.region.min_bytes if smallest is None else smallest) else None


def _redraw(noise: Value, draw: Callable[[], Tensor]) -> None:
    noise.op = "dropout"
    noise.set_recipe(draw, (), {})
    noise.tensor = None
    noise.free = True  # it takes no memory, and no lineage is joined by it
