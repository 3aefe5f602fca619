"""Which channels of a layer that inverts its output must keep their input as well: the spare ones.

[Note: which channels invert] z is rounded to its dtype, so x̂ = (act⁻¹(z) − β)/γ̂ carries one rounding of y/γ̂ = x̂ + β/γ̂,
for elu also times e^−y. With a the relative size of a rounding and x̂ of mean 0 and variance 1, its mean square is
a²·(1 + (β/γ̂)²). Plain carries at least one rounding of x̂, mean square a²: its input has been rounded to that dtype. So
the error of x̂, and that of dγ = Σ x̂·dy, is within twice plain's, the error rule of float32, where
1 + 1 + (β/γ̂)² ≤ 2², which is |β| ≤ √2·γ̂. Such a channel inverts, if γ̂ is not so small that z is subnormal.

In 16 bits dγ shows that rounding: plain sums the very products of its input and dy in float32, and is as exact as that
for the input that it was given. Compared with a network that never rounds, the bound above holds for both.

[Note: asking the device] That depends on γ and β alone. But these live on the device, and how much is kept must be
known on the host: somebody has to wait. Three things make that cheap. The first layer of a pass asks for all layers at
once, and the others find their answers. The kernel writes the answers straight into memory of the host, so nothing is
copied. And the question goes to the device in the same launch as the layer's statistics, before these; the layer reads
the answer when it is about to overwrite its input. A device that is behind then works on the statistics while the host
wakes up, and one that waits for work has answered long before.

An answer serves one forward, and only until a version counter moves or a backward of such a layer has run: after that
optimizers write parameters, some of them behind the counter. What is left, a write to `.data` between the question and
the forward, is seen by the forward itself, on the device: it makes such a channel's kept weight NaN, and with it the
gradient, and tells the host, where backward raises once it knows.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from leangrad._torch import raw_stream, versions
from leangrad.errors import ChangedError
from leangrad.kernels import INTERPRETED, serves

__all__ = ["Answer", "Limits", "ask", "limits_of", "note_backward", "poison"]


class Limits(NamedTuple):
    """A channel inverts if γ̂ ≥ `lower`, |β| ≤ `ratio`·γ̂ and 6·γ̂ + |β| ≤ `upper`, where γ̂ is |γ| + `shift`."""

    lower: float
    ratio: float
    upper: float
    shift: float


@lru_cache
def wider(limits: Limits) -> Limits:
    """Limits that nobody passes who keeps to these, however the comparison is rounded."""
    return Limits(limits.lower / 2, 2 * limits.ratio, 2 * limits.upper, limits.shift)


@lru_cache
def limits_of(name: str, param: float, dtype: torch.dtype, shift: float) -> Limits:
    """The limits for an activation over maps of this dtype; see [Note: which channels invert]."""
    info = torch.finfo(dtype)
    slope = min(1.0, param) if name == "leaky_relu" else 1.0
    upper = -0.5 * math.log(info.eps) if name == "elu" else math.inf
    return Limits(info.smallest_normal / slope, math.sqrt(2.0), upper, shift)


class Row(NamedTuple):
    """Where a layer's γ and β lie, for a kernel that reads them there."""

    weight_pointer: int
    bias_pointer: int
    channels: int
    dtype: torch.dtype


@dataclass(slots=True, eq=False)
class Answer:
    """What the device says about one layer, or will have said when it comes to the question."""

    weight: Tensor
    bias: Tensor | None
    limits: Limits
    roll: Roll | None = None  # None: the device has not been asked
    layer: Callable[[], Any] = lambda: None  # weakly
    row: Row | None = None
    slot: int = 0
    mark: int = 0  # of the question
    versions: tuple[int, int] = (-1, -1)
    used: bool = True  # it serves one forward

    def serves(self, weight: Tensor, bias: Tensor | None, limits: Limits) -> bool:
        """Whether it still holds."""
        if self.roll is None or self.roll.passes != _passes or self.limits is not limits:
            return False
        if self.weight is not weight or self.bias is not bias or bias is None:
            return False
        return self.versions == versions(weight, bias)

    def lies_at(self, weight: Tensor | None, bias: Tensor | None) -> bool:
        """Whether these are the parameters that it was asked for, with their memory where it was."""
        if weight is None or bias is None or weight is not self.weight or bias is not self.bias or self.row is None:
            return False
        weight_pointer, bias_pointer, channels, dtype = self.row
        # Memory that was freed in between does not lie at the same address.
        if weight.data_ptr() != weight_pointer or bias.data_ptr() != bias_pointer:
            return False
        if weight.dtype != dtype or weight.numel() != channels or not weight.is_contiguous():
            return False
        return bias.dtype == dtype and bias.numel() == channels and bias.is_contiguous()

    def channels(self) -> Tensor | None:
        """The channels that cannot be inverted, or None; waits for the device if that is behind."""
        roll = self.roll
        if roll is not None:
            if roll.open and (taken := roll.take_question()) is not None:
                taken[0].ask(*taken[1:])
            if roll.says_all_invert(self.slot, self.mark):
                return None
        channels = _unfit(self.weight.detach(), self.bias, *self.limits).nonzero().squeeze(1)
        return channels if channels.numel() else None


_passes = 0


def note_backward(answer: Answer | None) -> None:
    """Parameters may change from now on, also behind their version counters; raises if some did before, unseen."""
    global _passes
    _passes += 1
    if answer is not None and answer.roll is not None and answer.roll.late_word.value:
        answer.roll.raise_late()


def ask(layer: Any, weight: Tensor | None, bias: Tensor | None, limits: Limits) -> Answer | None:
    """Ask which channels of `layer` cannot be inverted, if nobody did; None if it has neither weight nor bias."""
    if weight is None:
        # γ = 1; and β = 0, unless somebody took the weight alone away.
        return None if bias is None else Answer(torch.ones_like(bias), bias, limits)
    if not (weight.is_cuda or INTERPRETED):
        return Answer(weight, bias, limits)
    place = (weight.get_device(), 0 if INTERPRETED else raw_stream(weight.device))
    roll = _rolls.of.get(place)
    if roll is None:
        roll = _rolls.of[place] = Roll(weight.device)
    return roll.answer(layer, weight, bias, limits)


def poison(vectors: Tensor, channels: Tensor | None, limits: Limits) -> None:
    """Make γ̂ NaN in the channels that do not invert and are not spare: their gradients must not look right."""
    unfit = _unfit(vectors[2], vectors[3], *wider(limits)._replace(shift=0.0))
    if channels is not None:
        unfit.index_fill_(0, channels, False)
    vectors[2].masked_fill_(unfit, math.nan)


# ---- many layers ----------------------------------------------------------------------------------------------------

LAYERS = 4096  # in one roll; whoever comes later asks for itself
ALIGNMENT = 4  # words, which are 16 bytes: where the first of them may lie

# How often a word is looked at before the host prepares to wait: some 10 µs, as long as an event takes to be made, and
# longer than a device without other work takes to answer.
PATIENCE = 100

_marks = itertools.count()
_words_to_lend: list[Tensor] = []


class Roll:
    """The layers that one thread has run on one stream, and the host's memory that their answers are written to.

    Each question has a mark of its own, and a word is 2·mark, or one more if a channel does not invert. So a word says
    by itself whether it is the answer, and whatever else is read there is no answer. One more word is for forwards that
    come too late.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.answers: dict[int, Answer] = {}  # by the layer's id, for as long as that lives
        self.passes = -1  # of the last question
        self.mark = 0
        self.open = False  # whether the last question has not been put to the device
        self.question: Any = None  # about `asked_for`; None if those are others now
        self.asked_for: list[Answer] = []
        on_cuda = device.type == "cuda"
        self.stream = torch.cuda.current_stream(device) if on_cuda else None
        try:
            self.memory = _words_to_lend.pop()
        except IndexError:
            self.memory = torch.zeros(ALIGNMENT + LAYERS, dtype=torch.int32, pin_memory=on_cuda)
        self.late, self.places = self.memory[:1].zero_(), self.memory[ALIGNMENT:]
        self.late_word = ctypes.c_int32.from_address(self.late.data_ptr())
        self.words = (ctypes.c_int32 * self.places.numel()).from_address(self.places.data_ptr())

    def __del__(self) -> None:
        """Lend the memory to others; never free it, for the device may still write to it."""
        if hasattr(self, "memory"):
            _words_to_lend.append(self.memory)

    def answer(self, layer: Any, weight: Tensor, bias: Tensor | None, limits: Limits) -> Answer:
        """The answer about `layer`, for one forward; has all layers asked for if there is none."""
        answer = self.answers.get(id(layer))
        if answer is None or answer.used or not answer.serves(weight, bias, limits):
            if answer is None or answer.limits is not limits or not answer.lies_at(weight, bias):
                row = _row(weight, bias, layer.num_features, self.device)
                if row is None:
                    return Answer(weight, bias, limits)
                answer = Answer(weight, bias, limits, self, self._watch(layer), row)
                self.answers[id(layer)], self.question = answer, None
            self._ask(answer)
        answer.used = True
        return answer

    def _watch(self, layer: Any) -> Callable[[], Any]:
        """A weak reference that takes the answer away together with the layer."""
        key, answers = id(layer), self.answers
        return weakref.ref(layer, lambda _: answers.pop(key, None))

    def _ask(self, first: Answer) -> None:
        """Have one question ready for `first`, and for all other layers whose parameters can still be read."""
        if self.question is None or len(self.answers) != 1 or self.asked_for != [first]:
            there = [a for a in list(self.answers.values()) if a is first or a.lies_at(a.weight, a.bias)]
            if self.question is None or there != self.asked_for:
                self._change(there)
        mark = self.mark = next(_marks) % (2**30 - 1) + 1
        self.open, self.passes = True, _passes
        for answer in self.asked_for:
            assert answer.bias is not None  # whoever has none has no row, and is not asked for
            answer.mark, answer.versions, answer.used = mark, versions(answer.weight, answer.bias), False

    def take_question(self) -> tuple[Any, int, Tensor] | None:
        """What is left to be put to the device, by whoever launches something next."""
        if not self.open:
            return None
        self.open = False
        return self.question, self.mark, self.places

    def raise_late(self) -> None:
        """A forward has found other parameters than those that were asked about: see [Note: asking the device]."""
        channels, self.late_word.value = self.late_word.value, 0
        raise ChangedError(
            f"the weight or bias of an in-place activated batch norm over {channels} channels was changed through "
            "`.data`, or by other code that autograd does not see, while its model was in forward, and the output can "
            "no longer be inverted; change parameters under torch.no_grad(), or before forward begins"
        )

    def _change(self, there: list[Answer]) -> None:
        """From now on ask for these, as many as there are words for."""
        for answer in list(self.answers.values()):
            answer.slot, answer.used = -1, True
        self.asked_for = there[:LAYERS]
        for slot, answer in enumerate(self.asked_for):
            answer.slot = slot
        self.question = _kernels().Question([(a.row, a.limits) for a in self.asked_for], self.device)

    def says_all_invert(self, slot: int, mark: int) -> bool:
        """Whether the answer says so; waits for it. False also where there is no answer."""
        if slot < 0:
            return False
        words = self.words
        if self.stream is not None and words[slot] >> 1 != mark:
            for _ in range(PATIENCE):
                if words[slot] >> 1 == mark:
                    return bool(words[slot] == 2 * mark)
            launched = self.stream.record_event()
            while words[slot] >> 1 != mark and not launched.query():
                pass  # each query lets other threads run, and raises what went wrong on the device
        return bool(words[slot] == 2 * mark)


class _Rolls(threading.local):
    """As scratch memory is: what a stream runs is in order, but two threads may take turns at one."""

    def __init__(self) -> None:
        self.of: dict[tuple[int, int], Roll] = {}


_rolls = _Rolls()


def _row(weight: Tensor, bias: Tensor | None, size: int, device: torch.device) -> Row | None:
    """Where they lie, if the kernel can read them there."""
    if bias is None or bias.dtype != weight.dtype or not all(_has_memory(t, size, device) for t in (weight, bias)):
        return None
    return Row(weight.data_ptr(), bias.data_ptr(), size, weight.dtype)


def _has_memory(t: Tensor, size: int, device: torch.device) -> bool:
    """Whether `t` has memory on this device. Sharded and offloaded parameters have it during their own forward only."""
    if type(t) not in (Tensor, nn.Parameter) or t.numel() != size or t.device != device:
        return False
    if not serves(t) or not t.is_contiguous():
        return False
    return t.untyped_storage().nbytes() >= (t.storage_offset() + size) * t.element_size()


def _unfit(weight: Tensor, bias: Tensor | None, lower: Any, ratio: Any, upper: Any, shift: Any) -> Tensor:
    gamma = weight.abs() + shift
    beta = torch.zeros_like(gamma) if bias is None else bias.detach().abs()
    fits: Tensor = (gamma >= lower) & (beta <= ratio * gamma) & (6 * gamma + beta <= upper)
    return fits.logical_not_()


@cache
def _kernels() -> Any:
    """Imported on first use: Triton is not everywhere."""
    return importlib.import_module("leangrad.kernels.abn_question")
