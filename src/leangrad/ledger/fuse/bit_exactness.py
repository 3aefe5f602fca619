"""Checks whether an op in a program gives ATen's bits on this device, with this torch and this Triton.

[Note: every op by itself]
A chain is compared with ATen on real data before it is used. But real data have no denormals, no infinities and few
large numbers; and a wrong formula for a norm changes only one bfloat16 in 100,000. So each op of the chain is first
compared by itself, once for each set of operand dtypes and kinds that it has in a chain: a pointwise op on a million
numbers, half of them random bits; a norm on 16 million, with the statistics that ATen computes for them. A pointwise op
that fails is left out of all programs from then on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leangrad.kernels import INTERPRETED
from leangrad.kernels.pointwise import compiled
from leangrad.ledger.fuse.builder import Builder, Operand, numbers_of
from leangrad.ledger.fuse.lowering import LOWERINGS, NORMS, VIEWS, Norm
from leangrad.ledger.values.value import Value

SAMPLES = 1 << 12 if INTERPRETED else 1 << 20  # numbers on which a pointwise op is compared
NORM_SAMPLES = 1 << 14 if INTERPRETED else 1 << 24  # numbers on which a norm is compared
ROUNDS = 64  # most trials of a norm over a small map to reach that many numbers
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}

_known: dict[tuple[Any, ...], bool] = {}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same bits; any NaN equals any NaN."""
    bits = BITS[a.dtype]
    return bool(((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())).all())


def is_exact(value: Value, operands: list[Any], numbers: list[float], of: Builder) -> bool:
    """Whether the op that makes ``value`` gives ATen's bits: see [Note: every op by itself].

    operands: its arguments, with an ``Operand`` for each tensor and number
    numbers: all numbers of the chain
    of: the builder of the chain's program
    """
    norm = NORMS.get(value.function)
    if value.function in VIEWS:
        return True
    kinds = [(a.kind == "scalar", a.dtype, bool(a.shape)) if type(a) is Operand else a for a in operands]
    key = (value.function, value.dtype, of.leaves[0].device, *kinds, *value.kwargs.items())
    if norm is not None and not norm.by_rows:
        key = (*key, operands[0].shape, operands[0].stride, of.variant)
    if key not in _known:
        _known[key] = all(
            _Trial(value, operands, numbers, of, seed).agrees() for seed in range(_rounds(norm, operands[0]))
        )
    return _known[key]


def _rounds(norm: Norm | None, x: Operand) -> int:
    if norm is None or norm.by_rows:
        return 1
    return min(ROUNDS, max(1, NORM_SAMPLES // x.shape.numel()))


class _Trial:
    """Runs one op on random operands, by ATen and as a program, and compares the results."""

    def __init__(self, value: Value, operands: list[Any], numbers: list[float], of: Builder, seed: int) -> None:
        self.value, self.numbers, self.of = value, numbers, of
        self.generator = torch.Generator(of.leaves[0].device).manual_seed(seed)  # not the caller's random state
        self.norm = NORMS.get(value.function)
        self.tensors: list[Tensor] = []
        self.args: list[Any] = []  # for ATen
        self.slots: list[Any] = []  # for the program
        for a in operands[: len(operands) - (self.norm.statistics if self.norm is not None else 0)]:
            self._draw(a, operands)

    def agrees(self) -> bool:
        """Whether ATen and the program give the same bits."""
        value, norm = self.value, self.norm
        assert value.function is not None
        if norm is not None:
            plain, *statistics = norm.function(*self.args)
            for s in statistics:
                self._enter(s)
        else:
            plain = value.function(*self.args, **value.kwargs)
        plain = plain if value.dtype is None else plain.to(value.dtype)
        builder = Builder(self.tensors, self.of.variant)
        result = LOWERINGS[value.function](builder, *self.slots, **value.kwargs)
        if value.dtype is not None and value.dtype != result.dtype:
            result = builder.step("cast", value.dtype, result)
        if result.dtype != plain.dtype:
            return False
        mine = torch.empty_like(plain)
        kernel = compiled(builder.program((result.number,), (plain.shape, plain.stride())))
        inputs = [self.tensors[k] for k, _ in builder.inputs]
        kernel.launch(inputs, numbers_of(builder.scalars, self.numbers), [mine], mine.numel())
        return same_bits(mine, plain)

    def _draw(self, a: Any, operands: list[Any]) -> None:
        if type(a) is not Operand:
            self.args.append(a)
            self.slots.append(a)
        elif a.kind == "scalar":
            self.args.append(self.numbers[a.number])
            self.slots.append(a)
        else:
            assert a.dtype is not None
            if self.norm is None:
                tensor = self._sample(a.dtype)
                tensor = tensor if a.shape else tensor[-1]  # a tensor without dimensions
            else:
                tensor = self._map(a.dtype, operands) if not self.tensors else self._normal(a.dtype, a.shape)
            self.args.append(tensor)
            self._enter(tensor)

    def _enter(self, tensor: Tensor) -> None:
        self.slots.append(Operand("leaf", len(self.tensors), tensor.dtype, tensor.shape, tensor.stride()))
        self.tensors.append(tensor)

    def _map(self, dtype: torch.dtype, operands: list[Any]) -> Tensor:
        """A random input for a norm: enough rows, or a tensor with the shape and strides of the chain's input."""
        assert self.norm is not None
        if not self.norm.by_rows:
            shape, stride = operands[0].shape, operands[0].stride
            return torch.empty_strided(shape, stride, dtype=dtype, device=self.generator.device).copy_(
                self._normal(dtype, shape).mul_(3).add_(1)
            )
        width = next(a for a in operands if type(a) in (tuple, torch.Size))
        rows = max(1, NORM_SAMPLES // torch.Size(width).numel())
        return self._normal(dtype, torch.Size((rows, *width))).mul_(3).add_(1)

    def _normal(self, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.generator.device).to(dtype)

    def _sample(self, dtype: torch.dtype) -> Tensor:
        """Numbers of the usual range and random bits, in turn; the latter include denormals, infinities and NaN."""
        sample = self._normal(torch.float32, torch.Size((SAMPLES,))).mul_(3)
        if dtype is torch.bool:
            return sample > 0
        sample = sample.to(dtype)
        if not INTERPRETED:  # the interpreter does not preserve denormals
            bits = sample[::2].view(BITS[dtype])
            bits.random_(torch.iinfo(bits.dtype).min, torch.iinfo(bits.dtype).max, generator=self.generator)
        return sample
