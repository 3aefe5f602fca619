"""Records the generator state before an op runs, and runs the op again from that state."""

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

one_at_a_time = threading.Lock()  # held from reading the state before an op to reading the state after it


def state_of(device: torch.device) -> State | None:
    """Return the state of the default generator of ``device``, or None if it cannot be restored later.

    It is 5 KB on a CPU (a Mersenne twister) and two integers on CUDA (Philox seed and offset). None while a CUDA graph
    is captured, because the host does not know the offset then.
    """
    if device.type == "cpu":
        return torch.get_rng_state()
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        generator = _cuda_generator(device)
        return generator.initial_seed(), generator.get_offset()
    return None


def mark_of(device: torch.device) -> Mark | None:
    """Return enough of the state of ``device``'s default generator to tell whether it was drawn from."""
    state = state_of(device)
    return _mark(state) if isinstance(state, Tensor) else state


MARK_BYTES = 128  # the seed, the position among the twister's words, and the first words


def _mark(state: Tensor) -> bytes:
    # Read as bytes, not by torch ops: an op that runs rarely is not in the CPU caches and takes 50 microseconds.
    return ctypes.string_at(state.data_ptr(), MARK_BYTES if _marks_tell() else state.nbytes)


@functools.cache
def _marks_tell() -> bool:
    """Whether the first ``MARK_BYTES`` of a CPU state change with one more draw and with a full round of the twister.

    After a full round the position is the same, but the words differ.
    """
    generator = torch.Generator()
    states = [generator.get_state()]
    with _torch.unseen():
        for words in (1, 623, 624, 1248):
            torch.empty(words, dtype=torch.int32, device="cpu").random_(generator=generator)
            states.append(generator.get_state())
    return len({ctypes.string_at(s.data_ptr(), MARK_BYTES) for s in states}) == len(states)


def draw_again(state: State, after: Mark | None, draw: Callable[[torch.Generator], Result]) -> Result:
    """Run ``draw`` on a new CPU generator that is set to ``state``, and return its result.

    No other code draws from that generator, and the default generator does not change. Raises LeangradError unless the
    generator ends at the mark ``after``, where the default generator ended in forward.
    """
    assert isinstance(state, Tensor)
    generator = torch.Generator()
    generator.set_state(state)
    result = draw(generator)
    if _mark(generator.get_state()) != after:
        raise LeangradError(_DISTURBED)
    return result


def run_again(state: State, after: Mark | None, device: torch.device, function: Callable[[], Result]) -> Result:
    """Run ``function()`` with the default CUDA generator set to ``state``, and return its result.

    CUDA ops draw from the default generator only; its state is restored afterwards. Raises LeangradError unless the
    generator ends at the mark ``after``, as in forward. It does not if another thread drew from it in between; then the
    same numbers cannot be drawn again.
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
    """The single random draw of a CUDA call while it runs: the dropout of a fused attention.

    [Note: attention that draws] The kernel draws its mask from the default generator and advances the generator by an
    amount that depends on the shapes alone, so from the same state it draws the same mask. That state is read before
    the call, in which nothing else draws. The node saves seed and offset, too, but on the device: reading them would
    synchronize with the GPU. Autograd saves the output of the attention inside the call, after the kernel was launched:
    the state after the kernel is read at that moment. If it equals the state before, no kernel ran (a selective
    checkpoint has returned the output that it kept), and nothing is recorded.
    """

    __slots__ = ("_device", "_first", "_state")

    def __init__(self, device: torch.device, state: State, first: int) -> None:
        """``state``: generator state before the call; ``first``: lowest sequence number of the nodes of the call."""
        self._device, self._state, self._first = device, state, first

    def note(self, node: Node) -> bool:
        """Record in ``node`` how it runs again, if it is the attention that has drawn; returns whether it is.

        True also if no kernel ran, and then nothing is recorded.
        """
        if type(node).__name__ not in ATTENTION or node._sequence_nr() < self._first or not node._saved_dropout_p:
            return False
        after = mark_of(self._device)
        if after is not None and after != self._state:
            node.metadata[NOTE] = {DRAW: functools.partial(run_again, self._state, after, self._device)}
        return True


# The nodes of fused kernels that draw random numbers; the fused kernel on a CPU does not.
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
