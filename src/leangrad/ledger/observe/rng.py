"""The random state of an op, taken before it runs, and the op run again from it."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from leangrad import _torch
from leangrad.errors import LeangradError
from leangrad.ledger.values.node_metadata import DRAW, NOTE, Node

State = Tensor | tuple[int, int]
Mark = bytes | tuple[int, int]
Result = TypeVar("Result")

one_at_a_time = threading.Lock()  # a state, the op that draws from it, and the state after it belong together


def state_of(device: torch.device) -> State | None:
    """The state of the default generator of ``device``, or None where it cannot be put back later.

    5 KB on a CPU (a Mersenne twister), two integers on CUDA (Philox seed and offset). While a CUDA graph is captured
    the offset is not known to the host, so there is none.
    """
    if device.type == "cpu":
        return torch.get_rng_state()
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        generator = _cuda_generator(device)
        return generator.initial_seed(), generator.get_offset()
    return None


def mark_of(device: torch.device) -> Mark | None:
    """Where the default generator of ``device`` stands: enough of its state to tell whether it was drawn from."""
    state = state_of(device)
    return _mark(state) if isinstance(state, Tensor) else state


MARK_BYTES = 128  # the seed, the place among the twister's words, and the first of these


def _mark(state: Tensor) -> bytes:
    # Read as bytes and not by ops of torch: one that runs seldom takes 50 microseconds to come into the caches.
    return ctypes.string_at(state.data_ptr(), MARK_BYTES if _marks_tell() else state.nbytes)


@functools.cache
def _marks_tell() -> bool:
    """Whether the head of a CPU state tells of one more draw, and of a whole round of the twister.

    After a round its place is the same, and its words are others.
    """
    generator = torch.Generator()
    states = [generator.get_state()]
    with _torch.unseen():
        for words in (1, 623, 624, 1248):
            torch.empty(words, dtype=torch.int32, device="cpu").random_(generator=generator)
            states.append(generator.get_state())
    return len({ctypes.string_at(s.data_ptr(), MARK_BYTES) for s in states}) == len(states)


def draw_again(state: State, after: Mark | None, draw: Callable[[torch.Generator], Result]) -> Result:
    """``draw`` on a CPU generator of its own at ``state``: nobody else draws from it, and nobody's draws are disturbed.

    It must end where the default generator ended the first time, at the mark ``after``.
    """
    assert isinstance(state, Tensor)
    generator = torch.Generator()
    generator.set_state(state)
    result = draw(generator)
    if _mark(generator.get_state()) != after:
        raise LeangradError(_DISTURBED)
    return result


def run_again(state: State, after: Mark | None, device: torch.device, function: Callable[[], Result]) -> Result:
    """``function()`` as it ran from ``state`` on CUDA, whose ops draw from the default generator alone.

    The generator is left as it was found. It must end where it ended the first time, ``after``: it does not if another
    thread drew from it in between, and then the numbers cannot be had again.
    """
    with one_at_a_time:
        generator = _cuda_generator(device)
        found = generator.initial_seed(), generator.get_offset()
        _set(generator, state)
        try:
            result = function()
            drawn = generator.initial_seed(), generator.get_offset()
        finally:
            _set(generator, found)
    if drawn != after:
        raise LeangradError(_DISTURBED)
    return result


class Draw:
    """The one draw of a call on CUDA, while it runs: the dropout of a fused attention.

    [Note: attention that draws] The kernel takes its mask from the default generator and moves that on by as much as
    the shapes say, so from the same state it draws the same mask. The state is that before the call, in which nothing
    else draws. Seed and offset are saved by the node too, but on the device: to read them there would wait for the GPU.
    Autograd saves the output of the attention inside the call, when the kernel has been launched: the state after it is
    read then. If that is the state before, no kernel ran (a selective checkpoint has handed out what it kept), and
    there is no note.
    """

    __slots__ = ("_device", "_first", "_state")

    def __init__(self, device: torch.device, state: State, first: int) -> None:
        """``state``: before the call; ``first``: the number of the first node that the call may make."""
        self._device, self._state, self._first = device, state, first

    def note(self, node: Node) -> bool:
        """If ``node`` is of the attention that has drawn, note how it runs again; whether it is."""
        if type(node).__name__ not in ATTENTION or node._sequence_nr() < self._first or not node._saved_dropout_p:
            return False
        after = mark_of(self._device)
        if after is not None and after != self._state:
            node.metadata[NOTE] = {DRAW: functools.partial(run_again, self._state, after, self._device)}
        return True


# The nodes of fused kernels that draw; that on a CPU draws nothing.
ATTENTION = frozenset(f"ScaledDotProduct{kind}AttentionBackward0" for kind in ("Flash", "Efficient", "Cudnn"))

_DISTURBED = (
    "a dropout mask cannot be drawn again: another thread drew from the same random generator at the same moment. "
    "Train in one thread per device, or call leangrad.plain(model) on models that train in several threads."
)


def _set(generator: Any, state: State) -> None:
    generator.manual_seed(state[0])
    generator.set_offset(state[1])


def _cuda_generator(device: torch.device) -> Any:
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]
