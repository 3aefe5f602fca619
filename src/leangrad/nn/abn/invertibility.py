"""Finds the spare channels of a layer that inverts its output: they cannot be inverted, so their input is kept too.

[Note: which channels invert] z is rounded to its dtype. So x̂ = (act⁻¹(z) − β)/γ̂ contains the error of one rounding of
y/γ̂ = x̂ + β/γ̂; for elu it is also multiplied by e^−y. Let a be the relative size of a rounding, and let x̂ have mean 0
and variance 1: then the mean square of that error is a²·(1 + (β/γ̂)²). Plain PyTorch has at least the error of one
rounding of x̂, of mean square a², because its input was rounded to that dtype. So the error of x̂, and that of
dγ = Σ x̂·dy, is at most twice the error of plain PyTorch, which is the error rule of float32, if 1 + 1 + (β/γ̂)² ≤ 2²,
that is |β| ≤ √2·γ̂. Such a channel inverts, unless γ̂ is so small that z is subnormal.

With 16-bit maps this rounding shows in dγ: plain PyTorch sums the products of its input and dy in float32, so its dγ is
exact to float32 for the rounded input that it gets. Against a network that never rounds, the bound above holds for
16-bit maps as for float32 maps.

[Note: asking the device] Which channels invert depends only on γ and β. These are on the device, but the host has to
know how much to keep, so it has to wait for the device. Three measures make that cheap. The first layer of a forward
pass puts a question to the device about all layers at once, and the other layers find their answers. The kernel writes
the answers directly into pinned host memory, so nothing is copied. And the question is in the same launch as the
layer's statistics, ahead of them (over a small map it has a launch of its own); the layer reads the answer only when it
is about to overwrite its input. A device that is behind then computes the statistics while the host wakes up; an idle
device has answered long before.

An answer is valid for one forward of a layer, and only until a version counter changes or a backward of such a layer
has run: after a backward, optimizers change parameters, some without incrementing the version counter. One case is
left, a write to `.data` between the question and the forward. The forward detects it on the device: it sets the kept γ̂
of such a channel to NaN, and so its gradient, and writes to host memory; the next backward that sees this raises.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from leangrad._torch import raw_stream, versions
from leangrad.errors import ChangedError
from leangrad.kernels import INTERPRETED, kernels_of, serves

__all__ = ["Answer", "Limits", "ask", "limits_of", "note_backward", "poison"]


class Limits(NamedTuple):
    """A channel inverts if γ̂ ≥ `lower`, |β| ≤ `ratio`·γ̂ and 6·γ̂ + |β| ≤ `upper`, where γ̂ is |γ| + `shift`."""

    lower: float
    ratio: float
    upper: float
    shift: float


@lru_cache
def wider(limits: Limits) -> Limits:
    """Returns limits that every channel within `limits` meets too, however the comparison is rounded."""
    return Limits(limits.lower / 2, 2 * limits.ratio, 2 * limits.upper, limits.shift)


@lru_cache
def limits_of(name: str, param: float, dtype: torch.dtype, shift: float) -> Limits:
    """Returns the limits for an activation and maps of `dtype`; see [Note: which channels invert]."""
    info = torch.finfo(dtype)
    slope = min(1.0, param) if name == "leaky_relu" else 1.0
    upper = -0.5 * math.log(info.eps) if name == "elu" else math.inf
    return Limits(info.smallest_normal / slope, math.sqrt(2.0), upper, shift)


class Row(NamedTuple):
    """The addresses, size and dtype of a layer's γ and β, for the kernel that reads them."""

    weight_pointer: int
    bias_pointer: int
    channels: int
    dtype: torch.dtype


@dataclass(slots=True, eq=False)
class Answer:
    """The answer to the question whether all channels of one layer invert; the device may not have written it yet."""

    weight: Tensor
    bias: Tensor | None
    limits: Limits
    roll: Roll | None = None  # holds the question; None: `channels` computes the answer with torch ops
    layer: Callable[[], Any] = lambda: None  # weak reference to the layer
    row: Row | None = None  # None without a question
    slot: int = 0  # index of the answer's word in `roll.words`; -1: it has none
    mark: int = 0  # number of the question
    versions: tuple[int, int] = (-1, -1)  # of weight and bias when the question was made
    used: bool = True  # a forward has used the answer, which is valid for one only

    def serves(self, weight: Tensor, bias: Tensor | None, limits: Limits) -> bool:
        """Whether the answer is valid for these parameters and limits: no change was seen since the question."""
        if self.roll is None or self.roll.passes != _passes or self.limits is not limits:
            return False
        if self.weight is not weight or self.bias is not bias or bias is None:
            return False
        return self.versions == versions(weight, bias)

    def lies_at(self, weight: Tensor | None, bias: Tensor | None) -> bool:
        """Whether these are the parameters of the question, with memory at the same addresses."""
        if weight is None or bias is None or weight is not self.weight or bias is not self.bias or self.row is None:
            return False
        weight_pointer, bias_pointer, channels, dtype = self.row
        # A parameter whose memory was freed in the meantime has another address.
        if weight.data_ptr() != weight_pointer or bias.data_ptr() != bias_pointer:
            return False
        if weight.dtype != dtype or weight.numel() != channels or not weight.is_contiguous():
            return False
        return bias.dtype == dtype and bias.numel() == channels and bias.is_contiguous()

    def channels(self) -> Tensor | None:
        """Returns the channels that cannot be inverted, or None if all can; waits until the device has answered."""
        roll = self.roll
        if roll is not None:
            if roll.open and (taken := roll.take_question()) is not None:
                taken[0].ask(*taken[1:])
            if roll.says_all_invert(self.slot, self.mark):
                return None
        channels = _unfit(self.weight.detach(), self.bias, *self.limits).nonzero().squeeze(1)
        return channels if channels.numel() else None


_passes = 0  # backward passes of inverting layers so far: a change makes all answers invalid


def note_backward(answer: Answer | None) -> None:
    """Make all answers invalid, since parameters may change from now on; raises if a forward found an unseen change."""
    global _passes
    _passes += 1
    if answer is not None and answer.roll is not None and answer.roll.late_word.value:
        answer.roll.raise_late()


def ask(layer: Any, weight: Tensor | None, bias: Tensor | None, limits: Limits) -> Answer | None:
    """Returns the answer about `layer`, and makes a question if there is no valid one; None without weight and bias."""
    if weight is None:
        # γ is 1. β is 0, unless only the weight was removed from the layer.
        return None if bias is None else Answer(torch.ones_like(bias), bias, limits)
    if not (weight.is_cuda or INTERPRETED):
        return Answer(weight, bias, limits)
    place = (weight.get_device(), 0 if INTERPRETED else raw_stream(weight.device))
    roll = _rolls.of.get(place)
    if roll is None:
        roll = _rolls.of[place] = Roll(weight.device)
    return roll.answer(layer, weight, bias, limits)


def poison(vectors: Tensor, channels: Tensor | None, limits: Limits) -> None:
    """Set γ̂ to NaN in channels that do not invert and are not spare, so that their gradients are NaN too."""
    unfit = _unfit(vectors[2], vectors[3], *wider(limits)._replace(shift=0.0))
    if channels is not None:
        unfit.index_fill_(0, channels, False)
    vectors[2].masked_fill_(unfit, math.nan)


# ---- many layers ----------------------------------------------------------------------------------------------------

LAYERS = 4096  # words in one roll; further layers compute their answers with torch ops
ALIGNMENT = 4  # words before the first answer, 16 bytes, so that the answers are aligned; the first is `Roll.late`

# How often the host reads a word before it records an event to wait for: about 10 µs, as long as it takes to make an
# event, and longer than an idle device takes to answer.
PATIENCE = 100

_marks = itertools.count()  # numbers of questions, over all rolls
_words_to_lend: list[Tensor] = []  # memory of rolls that are gone, for new rolls


class Roll:
    """The layers that one thread has run on one stream, and the host memory that their answers are written to.

    Each question has a number, its mark. The answer about a layer is one word: 2·mark, or 2·mark + 1 if a channel does
    not invert. So a word tells by itself whether it answers the question; any other value is not an answer. One more
    word, `late`, is written by a forward that finds that parameters have changed since the question.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.answers: dict[int, Answer] = {}  # by id of the layer, as long as the layer exists
        self.passes = -1  # `_passes` at the last question
        self.mark = 0  # of the last question
        self.open = False  # True: the last question has not been launched yet
        self.question: Any = None  # the `Question` about `asked_for`; None: a layer was added since
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
        """Leave the memory to later rolls; never free it, because the device may still write to it."""
        if hasattr(self, "memory"):
            _words_to_lend.append(self.memory)

    def answer(self, layer: Any, weight: Tensor, bias: Tensor | None, limits: Limits) -> Answer:
        """Returns the answer about `layer`, for one forward; if none is valid, makes a question about all layers."""
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
        """Returns a weak reference to `layer`, which removes the answer when the layer is freed."""
        key, answers = id(layer), self.answers
        return weakref.ref(layer, lambda _: answers.pop(key, None))

    def _ask(self, first: Answer) -> None:
        """Make one question about `first`, and all other layers whose parameters are still at their addresses."""
        if self.question is None or len(self.answers) != 1 or self.asked_for != [first]:
            there = [a for a in list(self.answers.values()) if a is first or a.lies_at(a.weight, a.bias)]
            if self.question is None or there != self.asked_for:
                self._change(there)
        mark = self.mark = next(_marks) % (2**30 - 1) + 1
        self.open, self.passes = True, _passes
        for answer in self.asked_for:
            assert answer.bias is not None  # a layer without a bias has no row, and is not asked about
            answer.mark, answer.versions, answer.used = mark, versions(answer.weight, answer.bias), False

    def take_question(self) -> tuple[Any, int, Tensor] | None:
        """Returns a question that the caller must launch, with its mark and the words for the answers; or None."""
        if not self.open:
            return None
        self.open = False
        return self.question, self.mark, self.places

    def raise_late(self) -> None:
        """Raise ChangedError: a forward found that parameters had changed since the question.

        See [Note: asking the device].
        """
        channels, self.late_word.value = self.late_word.value, 0
        raise ChangedError(
            f"the weight or bias of an in-place activated batch norm over {channels} channels was changed through "
            "`.data`, or by other code that autograd does not see, while its model was in forward, and the output can "
            "no longer be inverted; change parameters under torch.no_grad(), or before forward begins"
        )

    def _change(self, there: list[Answer]) -> None:
        """Make a new question about the layers of these answers, as many as there are words for."""
        for answer in list(self.answers.values()):
            answer.slot, answer.used = -1, True
        self.asked_for = there[:LAYERS]
        for slot, answer in enumerate(self.asked_for):
            answer.slot = slot
        self.question = kernels_of("abn_question").Question([(a.row, a.limits) for a in self.asked_for], self.device)

    def says_all_invert(self, slot: int, mark: int) -> bool:
        """Whether the word at `slot` says so about question `mark`; waits for it. False also if no answer arrived."""
        if slot < 0:
            return False
        words = self.words
        if self.stream is not None and words[slot] >> 1 != mark:
            for _ in range(PATIENCE):
                if words[slot] >> 1 == mark:
                    return bool(words[slot] == 2 * mark)
            launched = self.stream.record_event()
            while words[slot] >> 1 != mark and not launched.query():
                pass  # each query lets other threads run, and raises errors of the device
        return bool(words[slot] == 2 * mark)


class _Rolls(threading.local):
    """The rolls of one thread. A stream runs in order, but two threads may interleave launches on it."""

    def __init__(self) -> None:
        self.of: dict[tuple[int, int], Roll] = {}  # by device and stream


_rolls = _Rolls()


def _row(weight: Tensor, bias: Tensor | None, size: int, device: torch.device) -> Row | None:
    """Returns the row of these parameters, or None if the kernel cannot read them."""
    if bias is None or bias.dtype != weight.dtype or not all(_has_memory(t, size, device) for t in (weight, bias)):
        return None
    return Row(weight.data_ptr(), bias.data_ptr(), size, weight.dtype)


def _has_memory(t: Tensor, size: int, device: torch.device) -> bool:
    """Whether the kernel can read `t`: sharded and offloaded parameters have memory only during their own forward."""
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
