"""Saved for its shape alone: every entry of the list, against plain PyTorch, whatever the stand-in's values are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import leangrad
from leangrad.errors import ChangedError
from leangrad.ledger import shape_only
from leangrad.ledger.shape_only import LAYOUT, SHAPE_ONLY, SIZES

STEPS = 4  # the first is recorded, the later ones follow it
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Made(torch.autograd.Function):
    """A tensor that only this op can make, with given strides; backward notes the gradient it was given."""

    received: list[Tensor] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: str) -> Tensor:
        return laid_out(x.detach(), layout)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        Made.received.append(g)
        return g * 1, None


def laid_out(x: Tensor, layout: str) -> Tensor:
    """A copy of ``x`` that lies in memory in this way."""
    if layout == "contiguous":
        return x.clone(memory_format=torch.contiguous_format)
    if layout == "channels last":
        return x.clone(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    if layout == "transposed":
        strides = torch.empty(x.transpose(0, -1).shape, device="meta").transpose(0, -1).stride()
    else:
        assert layout == "sliced"
        strides = torch.empty(*x.shape, 2, device="meta")[..., 0].stride()
    return x.new_empty_strided(x.shape, strides).copy_(x)


@dataclass(frozen=True)
class Entry:
    """An op that makes a listed node: of a tensor of ``shape`` that it saves."""

    node: str
    name: str
    op: Callable[[Tensor], Any]
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    deterministic: bool = field(default=True)  # on CUDA

    def __str__(self) -> str:
        return f"{self.node.removesuffix('Backward0')}-{len(self.shape)}d"


def index(*shape: int, high: int, like: Tensor) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(3)).to(like.device)


def distinct(count: int, high: int, like: Tensor) -> Tensor:
    return torch.randperm(high, generator=torch.Generator().manual_seed(3))[:count].to(like.device)


def room(*shape: int, like: Tensor) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel(), device=like.device).view(shape).to(like.dtype).clone()


def masked(x: Tensor) -> Tensor:
    return torch.masked_select(x, (index(*x.shape, high=2, like=x) > 0))


def fractional(x: Tensor) -> Tensor:
    d = x.dim() - 2
    samples = torch.linspace(0.1, 0.9, x.shape[0] * x.shape[1] * d, device=x.device).view(x.shape[0], x.shape[1], d)
    pool = F.fractional_max_pool2d if d == 2 else F.fractional_max_pool3d
    return pool(x, 2, output_size=(3,) * d, _random_samples=samples.to(x.dtype))


HALF = (torch.float32, torch.bfloat16, torch.float64)
MAPS = {1: (3, 4, 10), 2: (3, 4, 8, 10), 3: (2, 3, 6, 8, 10)}
PADDING = {1: (2, 1), 2: (2, 1, 1, 3), 3: (2, 1, 1, 3, 2, 1)}
ENTRIES = [
    Entry("GatherBackward0", "self", lambda x: x.gather(1, index(6, 9, high=7, like=x)), (6, 7), HALF, False),
    Entry("GatherBackward0", "self", lambda x: torch.gather(x, -1, index(2, 3, 4, high=5, like=x)), (2, 3, 5)),
    Entry("GatherBackward0", "self", lambda x: x.take_along_dim(index(1, 7, high=6, like=x), 0), (6, 7)),
    Entry("TakeBackward0", "self", lambda x: x.take(index(9, high=42, like=x)), (6, 7), HALF, False),
    Entry("MaskedSelectBackward0", "self", masked, (6, 7), HALF),
    Entry("MaskedSelectBackward0", "self", lambda x: x.masked_select(room(3, 1, 1, like=x) > 0), (2, 5)),
    Entry("PutBackward0", "source", lambda x: room(8, 9, like=x).put(index(6, 7, high=72, like=x), x, True), (6, 7)),
    Entry("PutBackward0", "source", lambda x: room(8, 9, like=x).put_(distinct(42, 72, x).view(6, 7), x), (6, 7)),
    Entry("IndexAddBackward0", "source", lambda x: room(8, 7, like=x).index_add(0, index(6, high=8, like=x), x), (6, 7)),
    Entry(
        "IndexAddBackward0",
        "source",
        lambda x: room(6, 9, like=x).index_add_(1, index(7, high=9, like=x), x, alpha=2),
        (6, 7),
        HALF,
    ),
    Entry("IndexCopyBackward0", "source", lambda x: room(8, 7, like=x).index_copy(0, distinct(6, 8, x), x), (6, 7)),
    Entry("IndexCopyBackward0", "source", lambda x: room(8, 7, like=x).index_copy_(0, distinct(6, 8, x), x), (6, 7)),
    Entry("CummaxBackward0", "self", lambda x: x.cummax(1)[0], (6, 7), HALF, False),
    Entry("CumminBackward0", "self", lambda x: torch.cummin(x, 0)[0], (6, 7), HALF, False),
    Entry("ComplexBackward0", "real", lambda x: torch.complex(x, x.detach() * 2), (6, 7)),
    Entry("ComplexBackward0", "imag", lambda x: torch.complex(x.detach() * 2, x), (6, 7)),
    Entry("FftR2CBackward0", "self", lambda x: torch.fft.rfft(x, dim=0), (6, 7)),
    Entry("FftR2CBackward0", "self", lambda x: torch.fft.fft(x), (6, 7)),
    *[
        Entry(f"{kind}Pad{d}DBackward0", "self", lambda x, d=d, mode=mode: F.pad(x, PADDING[d], mode=mode), shape)
        for kind, mode in (("Reflection", "reflect"), ("Replication", "replicate"))
        for d, maps in MAPS.items()
        for shape in (maps, maps[1:])
    ],
    *[
        Entry(f"{kind}Pool{d}DBackward0", "self", lambda x, d=d, op=op: getattr(F, f"{op}{d}d")(x, 2), MAPS[d])
        for kind, op in (("Avg", "avg_pool"), ("AdaptiveAvg", "adaptive_avg_pool"))
        for d in (2, 3)
    ],
    Entry("AvgPool2DBackward0", "self", lambda x: F.avg_pool2d(x, 3, 2, 1, True, False), (3, 1, 8, 10)),
    Entry("AvgPool2DBackward0", "self", lambda x: F.avg_pool2d(x, 2), (4, 8, 10)),
    Entry("AvgPool2DBackward0", "self", lambda x: F.avg_pool1d(x, 2), MAPS[1]),
    Entry("AdaptiveAvgPool2DBackward0", "self", lambda x: F.adaptive_avg_pool1d(x, 3), MAPS[1], HALF, False),
    Entry("AdaptiveAvgPool2DBackward0", "self", lambda x: F.interpolate(x, (3, 4), mode="area"), MAPS[2], HALF, False),
    Entry("MaxPool2DWithIndicesBackward0", "self", lambda x: F.max_pool2d(x, 2), MAPS[2], (torch.float32,)),
    Entry("MaxPool2DWithIndicesBackward0", "self", lambda x: F.max_pool2d(x, 3, 2, 1), (3, 1, 8, 10)),
    Entry("MaxPool2DWithIndicesBackward0", "self", lambda x: F.max_pool2d(x, 3, return_indices=True)[0], (4, 8, 10)),
    Entry("MaxPool2DWithIndicesBackward0", "self", lambda x: F.max_pool1d(x, 4, return_indices=True)[0], MAPS[1]),
    Entry("MaxPool3DWithIndicesBackward0", "self", lambda x: F.max_pool3d(x, 2), MAPS[3], HALF),
    Entry("AdaptiveMaxPool2DBackward0", "self", lambda x: F.adaptive_max_pool2d(x, (3, 4)), MAPS[2]),
    Entry("AdaptiveMaxPool3DBackward0", "self", lambda x: F.adaptive_max_pool3d(x, 2), MAPS[3]),
    Entry("FractionalMaxPool2DBackward0", "self", fractional, MAPS[2]),
    Entry("FractionalMaxPool3DBackward0", "self", fractional, MAPS[3]),
]
LAYOUTS = ("contiguous", "channels last", "transposed", "sliced")


def layouts(entry: Entry) -> Iterator[str]:
    for layout in LAYOUTS:
        if layout != "channels last" or len(entry.shape) > 3:
            yield layout


CASES = [pytest.param(e, layout, id=f"{n}-{e}-{layout}") for n, e in enumerate(ENTRIES) for layout in layouts(e)]


@dataclass
class Stands:
    """How many stand-ins were handed out, and the value that fills them."""

    count: int = 0
    fill: float | None = None


@pytest.fixture
def stands(monkeypatch: pytest.MonkeyPatch) -> Stands:
    found, make = Stands(), shape_only.stand_in

    def filled(*of: Any) -> Tensor:
        tensor = make(*of)
        found.count += 1
        if found.fill is not None:
            memory = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
            tensor.as_strided((memory,), (1,), 0).fill_(found.fill)
        return tensor

    monkeypatch.setattr(shape_only, "stand_in", filled)
    return found


def same_bits(a: Tensor, b: Tensor) -> bool:
    """The same shape, strides and bits, where NaN is NaN and -0.0 is not 0.0."""
    if (a.shape, a.stride(), a.dtype) != (b.shape, b.stride(), b.dtype):
        return False
    a, b = a.detach().contiguous(), b.detach().contiguous()
    if a.is_complex():
        a, b = torch.view_as_real(a).contiguous(), torch.view_as_real(b).contiguous()
    return torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def assert_same(mine: list[Tensor], plain: list[Tensor], what: object = "") -> None:
    assert len(mine) == len(plain) > 0
    for n, (a, b) in enumerate(zip(mine, plain, strict=True)):
        assert same_bits(a, b), (what, n, a.stride(), b.stride())


def program(entry: Entry, layout: str, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """One step of the entry's op: all gradients that it gives, and those of these for the second derivative."""
    leaf = torch.randn(entry.shape, generator=torch.Generator().manual_seed(5)).to(device, dtype).requires_grad_()

    def step(region: Any, *, second: bool = False, retain: bool = False) -> list[Tensor]:
        Made.received.clear()
        with region:
            y = entry.op(Made.apply(leaf.square(), layout))
        g = torch.randn(y.shape, generator=torch.Generator().manual_seed(6)).to(y.device, y.dtype)
        g.requires_grad_(second)
        (first,) = torch.autograd.grad(y, leaf, g, create_graph=second, retain_graph=second or retain)
        found = [y.detach(), *Made.received, first.detach()]
        if retain:
            found += torch.autograd.grad(y, leaf, g)
        if second:
            Made.received.clear()
            w = torch.randn(first.shape, generator=torch.Generator().manual_seed(7)).to(device, dtype)
            found += [t for t in torch.autograd.grad(first, (leaf, g), w, allow_unused=True) if t is not None]
            found += Made.received
        return found

    return step


def stand_ins(entry: Entry, layout: str) -> int:
    """How many stand-ins a backward takes: none for a layout with gaps, which would take the memory of the gaps too."""
    return int(layout != "sliced" or SHAPE_ONLY[entry.node][entry.name] == SIZES)


# ------------------------------------------------------------------------------------------------------------- the list


@pytest.mark.parametrize("node", SHAPE_ONLY)
def test_the_list_names_what_this_torch_has(node: str) -> None:
    entry = next(e for e in ENTRIES if e.node == node)
    for name in SHAPE_ONLY[node]:
        entry = next(e for e in ENTRIES if (e.node, e.name) == (node, name))
        y = entry.op(torch.randn(entry.shape, requires_grad=True) * 1)
        nodes, kinds = [y.grad_fn], set()
        while nodes:
            found = nodes.pop()
            if found is not None:
                kinds.add(type(found).__name__)
                if type(found).__name__ == node:
                    assert getattr(found, "_saved_" + name).shape.numel() == torch.Size(entry.shape).numel()
                nodes += [n for n, _ in found.next_functions]
        if node not in kinds:
            pytest.skip(f"torch {torch.__version__} calls the node of {entry} otherwise: {kinds}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("entry", "layout"), CASES)
def test_no_value_of_the_stand_in_is_read(entry: Entry, layout: str, device: str, stands: Stands) -> None:
    for dtype in entry.dtypes:
        step = program(entry, layout, device=device, dtype=dtype)
        plain = step(nullcontext())
        if device == "cuda" and not entry.deterministic and not all(map(same_bits, plain, step(nullcontext()))):
            continue  # plain is not equal to itself
        ledger = leangrad.saving(min_bytes=0)
        for n in range(STEPS):
            stands.count, stands.fill = 0, (float("nan"), 1e30, -3.0, None)[n % 4]
            assert_same(step(ledger), plain, (dtype, n))
            assert stands.count == stand_ins(entry, layout), (dtype, n)
        assert ledger.course is not None  # and the last steps followed it


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("entry", "layout"), CASES)
def test_second_derivatives_and_a_second_backward(entry: Entry, layout: str, device: str, stands: Stands) -> None:
    step = program(entry, layout, device=device)
    plain, retained = step(nullcontext(), second=True), step(nullcontext(), retain=True)
    if device == "cuda" and not entry.deterministic:
        pytest.skip("plain is not equal to itself")
    ledger = leangrad.saving(min_bytes=0)
    for fill in (float("nan"), 1e30, -3.0):
        stands.count, stands.fill = 0, fill
        assert_same(step(ledger, second=True), plain, fill)
        assert stands.count == stand_ins(entry, layout)
        assert_same(step(ledger, retain=True), retained, fill)
        assert stands.count == 3 * stand_ins(entry, layout)
