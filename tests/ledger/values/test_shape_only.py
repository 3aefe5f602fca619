"""Saved for its shape alone: every entry of the list, against plain PyTorch, whatever the stand-in's values are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import leangrad
from leangrad.errors import ChangedError
from leangrad.ledger.values import shape_only
from leangrad.ledger.values.pending_save import PendingSave
from leangrad.ledger.values.shape_only import ENTRIES as SHAPE_ONLY
from leangrad.ledger.values.shape_only import SIZES
from tests import support

STEPS = 4  # the first is recorded, the later ones follow it
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def made(x: Tensor, layout: str) -> Tensor:
    """What a product with the identity makes of ``x``, which must be kept or is gone; it lies in memory in this way."""

    def product(a: Tensor) -> Tensor:
        return a @ torch.eye(a.shape[-1], device=a.device, dtype=a.dtype)

    if layout == "contiguous":
        return product(x)
    if layout == "channels last":
        return product(x.movedim(1, -1)).movedim(-1, 1)
    if layout == "transposed":
        return product(x.transpose(0, -1)).transpose(0, -1)
    assert layout == "sliced"
    return product(x.repeat_interleave(2, -1))[..., ::2]


@dataclass(frozen=True)
class Entry:
    """An op that makes a listed node: of a tensor of ``shape`` that it saves."""

    node: str
    name: str
    op: Callable[[Tensor], Any]
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    exact_on_cuda: bool = True  # for gradients of small integers; otherwise threads add what was rounded

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
    Entry("GatherBackward0", "self", lambda x: x.gather(1, index(6, 9, high=7, like=x)), (6, 7), HALF),
    Entry("GatherBackward0", "self", lambda x: torch.gather(x, -1, index(2, 3, 4, high=5, like=x)), (2, 3, 5)),
    Entry("GatherBackward0", "self", lambda x: x.take_along_dim(index(1, 7, high=6, like=x), 0), (6, 7)),
    Entry("TakeBackward0", "self", lambda x: x.take(index(9, high=42, like=x)), (6, 7), HALF),
    Entry("MaskedSelectBackward0", "self", masked, (6, 7), HALF),
    Entry("MaskedSelectBackward0", "self", lambda x: x.masked_select(room(3, 1, 1, like=x) > 0), (2, 5)),
    Entry(
        "PutBackward0",
        "source",
        lambda x: room(8, 9, like=x).put(index(6, 7, high=72, like=x), x, True),
        (6, 7),
        exact_on_cuda=False,
    ),
    Entry("PutBackward0", "source", lambda x: room(8, 9, like=x).put_(distinct(42, 72, x).view(6, 7), x), (6, 7)),
    Entry(
        "IndexAddBackward0",
        "source",
        lambda x: room(8, 7, like=x).index_add(0, index(6, high=8, like=x), x),
        (6, 7),
        exact_on_cuda=False,
    ),
    Entry(
        "IndexAddBackward0",
        "source",
        lambda x: room(6, 9, like=x).index_add_(1, index(7, high=9, like=x), x, alpha=2),
        (6, 7),
        HALF,
        exact_on_cuda=False,
    ),
    Entry("IndexCopyBackward0", "source", lambda x: room(8, 7, like=x).index_copy(0, distinct(6, 8, x), x), (6, 7)),
    Entry("IndexCopyBackward0", "source", lambda x: room(8, 7, like=x).index_copy_(0, distinct(6, 8, x), x), (6, 7)),
    Entry("CummaxBackward0", "self", lambda x: x.cummax(1)[0], (6, 7), HALF),
    Entry("CumminBackward0", "self", lambda x: torch.cummin(x, 0)[0], (6, 7), HALF),
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


same_bits = partial(support.same_bits, nans="bits", strides=True)


def assert_same(
    mine: list[Tensor], plain: list[Tensor], what: object = "", *, exact: bool = True, eps: float = 2**-23
) -> None:
    """The same bits and strides; not ``exact``: strides, and values but for sums in another order, by ``eps``."""
    assert len(mine) == len(plain) > 0
    for n, (a, b) in enumerate(zip(mine, plain, strict=True)):
        assert a.stride() == b.stride(), (what, n)
        if exact:
            assert same_bits(a, b), (what, n)
        else:
            assert (a - b).abs().max() <= 16 * eps * b.abs().max(), (what, n)


def program(entry: Entry, layout: str, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """One step of the entry's op: all gradients that it gives, and those of these for the second derivative."""
    leaf = torch.randn(entry.shape, generator=torch.Generator().manual_seed(5)).to(device, dtype).requires_grad_()

    def step(region: Any, *, second: bool = False, retain: bool = False) -> list[Tensor]:
        received: list[Tensor] = []
        with region:
            x = made(leaf.square(), layout)
            x.register_hook(lambda g: received.append(g.detach()))
            y = entry.op(x)
        g = torch.randn(y.shape, generator=torch.Generator().manual_seed(6))
        if device == "cuda":
            g = (4 * g).round()  # sums of small integers are exact in whatever order threads add them
        g = g.to(y.device, y.dtype).requires_grad_(second)
        (first,) = torch.autograd.grad(y, leaf, g, create_graph=second, retain_graph=second or retain)
        found = [y.detach(), *received, first.detach()]
        if retain:
            found += torch.autograd.grad(y, leaf, g)
        if second:
            received.clear()
            w = torch.randn(first.shape, generator=torch.Generator().manual_seed(7)).to(device, dtype)
            found += [t for t in torch.autograd.grad(first, (leaf, g), w, allow_unused=True) if t is not None]
            found += received
        return found

    return step


def stand_ins(entry: Entry, layout: str) -> int:
    """How many stand-ins a backward takes: none for a layout with gaps, which would take the memory of the gaps too."""
    return int(layout != "sliced" or SHAPE_ONLY[entry.node][entry.name] == SIZES)


# ------------------------------------------------------------------------------------------------------------- the list


def test_the_list_is_empty_for_a_release_that_nobody_has_read() -> None:
    assert shape_only.entries_for("2.14.0a0+git1") == {}
    for release in ("2.11.0", "2.12.1+cu130", "2.13.0+cpu"):
        assert shape_only.entries_for(release) is SHAPE_ONLY


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
        plain, exact = step(nullcontext()), device == "cpu" or entry.exact_on_cuda
        ledger = leangrad.saving(min_bytes=0)
        for n in range(STEPS):
            stands.count, stands.fill = 0, (float("nan"), 1e30, -3.0, None)[n % 4]
            assert_same(step(ledger), plain, (dtype, n), exact=exact)
            assert stands.count == stand_ins(entry, layout), (dtype, n)
        assert ledger.trace is not None  # and the last steps followed it


@pytest.mark.filterwarnings("ignore:Attempting to run cuFFT, but there was no current CUDA context")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("entry", "layout"), CASES)
def test_second_derivatives_and_a_second_backward(entry: Entry, layout: str, device: str, stands: Stands) -> None:
    step = program(entry, layout, device=device)
    plain, retained = step(nullcontext(), second=True), step(nullcontext(), retain=True)
    exact = device == "cpu" or entry.exact_on_cuda
    ledger = leangrad.saving(min_bytes=0)
    for fill in (float("nan"), 1e30, -3.0):
        stands.count, stands.fill = 0, fill
        assert_same(step(ledger, second=True), plain, fill, exact=exact)
        assert stands.count == stand_ins(entry, layout)
        assert_same(step(ledger, retain=True), retained, fill, exact=exact)
        assert stands.count == 3 * stand_ins(entry, layout)


# ------------------------------------------------------------------------------------------- models, and what they keep


class Model(nn.Module):
    """A product, an op, a product."""

    def __init__(self, first: nn.Module, op: Callable[[Tensor], Tensor], last: nn.Module) -> None:
        super().__init__()
        self.first, self.op, self.last = first, op, last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.op(self.first(x)))


def picked(x: Tensor) -> Tensor:
    return x.gather(-1, index(x.shape[0], 8, high=x.shape[-1], like=x))


def convolutions(op: Callable[[Tensor], Tensor]) -> Model:
    return Model(nn.Conv2d(3, 8, 3, padding=1), op, nn.Conv2d(8, 4, 3))


MODELS: dict[str, tuple[Callable[[], Model], tuple[int, ...]]] = {
    "gather": (lambda: Model(nn.Linear(16, 64), picked, nn.Linear(8, 4)), (96, 16)),
    "pad": (lambda: convolutions(lambda x: F.pad(x, (1, 2, 1, 2), mode="reflect")), (4, 3, 32, 32)),
    "average": (lambda: convolutions(lambda x: F.avg_pool2d(x, 2)), (4, 3, 32, 32)),
    "maximum": (lambda: convolutions(lambda x: F.max_pool2d(x, 4)), (4, 3, 32, 32)),
    "squeezed": (lambda: convolutions(lambda x: x * F.adaptive_avg_pool2d(x, 2).mean((2, 3), True)), (4, 3, 32, 32)),
}


def gradients(model: nn.Module, x: Tensor, autocast: bool = False) -> list[Tensor]:
    model.zero_grad()
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        y = model(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.device, y.dtype))
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, memory_format: torch.memory_format, autocast: bool, device: str, stands: Stands) -> None:
    make, shape = MODELS[name]
    model, x = make().to(device), torch.randn(shape, device=device)
    if x.dim() == 4:
        model, x = model.to(memory_format=memory_format), x.contiguous(memory_format=memory_format)
    stands.fill = float("nan")
    with torch.backends.cudnn.flags(deterministic=True, benchmark=False):
        plain = gradients(model, x, autocast)
        exact = device == "cpu" or all(all(map(same_bits, gradients(model, x, autocast), plain)) for _ in range(4))
        leangrad.lean(model, min_bytes=0)
        for n in range(STEPS):
            eps = 2**-8 if autocast else 2**-23
            assert_same(gradients(model, x, autocast), plain, n, exact=exact, eps=eps)
            # A CPU's autocast pads a cast to float32, which is smaller than its padding and not known to be at hand.
            assert stands.count == (0 if (name, device, autocast) == ("pad", "cpu", True) else n + 1)
    assert leangrad.ledger_of(model).trace is not None


def kept_bytes(model: nn.Module, x: Tensor) -> int:
    """What a step keeps once the ledger has learned."""
    for _ in range(3):
        gradients(model, x)
    return leangrad.measure(lambda: gradients(model, x)).kept_bytes


@pytest.mark.parametrize("name", ["gather", "pad", "average", "maximum"])
def test_kept_bytes_fall_by_what_was_saved_for_its_shape(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first product's output is kept no more, but the op's own is, which was rebuilt from it: the next reads it.

    So are the indices of a max pooling, 8 bytes each.
    """
    make, shape = MODELS[name]
    model, x = make(), torch.randn(shape)
    product = model.first(x)
    out = model.op(product)
    lean = kept_bytes(leangrad.lean(model, min_bytes=0), x)
    monkeypatch.setattr(shape_only, "SHAPE_ONLY", {})
    before = kept_bytes(leangrad.lean(model, min_bytes=0), x)
    instead = out.nbytes + (8 * out.numel() if name == "maximum" else 0)
    assert before - lean == product.nbytes - instead


@pytest.mark.parametrize(
    ("op", "used"),
    [
        (lambda x: F.max_pool2d(x, 2), 1),
        (lambda x: F.max_pool2d(x, 3, 1), 0),  # more bytes of indices than of the input
        (lambda x: F.max_pool2d(x.relu(), 2), 0),  # kept by relu
        (lambda x: F.max_pool2d(x * 2, 2), 0),  # indices and input are rebuilt together
        (lambda x: F.avg_pool2d(x.relu(), 2), 0),
        (lambda x: F.avg_pool2d(x * 2, 2), 1),
    ],
)
def test_a_stand_in_is_made_where_it_takes_less(op: Callable[[Tensor], Tensor], used: int, stands: Stands) -> None:
    model, x = convolutions(op), torch.randn(2, 3, 16, 16)
    plain = gradients(model, x)
    leangrad.lean(model, min_bytes=0)
    for n in range(STEPS):
        assert_same(gradients(model, x), plain, n)
        assert stands.count == used * (n + 1)


class Sum(nn.Module):
    """Two products, added up."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


def test_what_an_op_enlarges_is_kept_where_nothing_else_has_it(stands: Stands, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of two products is smaller than both, and smaller than its padding."""
    model = Model(Sum(), lambda x: F.pad(x, (3, 3, 3, 3), mode="reflect"), nn.Conv2d(8, 4, 3))
    x = torch.randn(2, 3, 16, 16)
    lean = kept_bytes(leangrad.lean(model, min_bytes=0), x)
    assert stands.count == 0
    monkeypatch.setattr(shape_only, "SHAPE_ONLY", {})
    assert lean == kept_bytes(leangrad.lean(model, min_bytes=0), x)


def test_small_tensors_and_leaves_are_kept(stands: Stands) -> None:
    leaf = torch.randn(64, 64, requires_grad=True)
    ledger = leangrad.saving()
    for _ in range(STEPS):
        with ledger:
            y = picked(leaf).sum() + picked(leaf[:4] * 1).sum()
        y.backward()
    assert stands.count == 0


def test_one_tensor_saved_twice(stands: Stands) -> None:
    """A product of the gathered tensor with the tensor itself: only the gather is given a stand-in."""

    def step(region: Any) -> list[Tensor]:
        leaf = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with region:
            x = made(leaf, "contiguous")
            z = torch.complex(x, x)
            y = x.gather(1, index(8, 8, high=8, like=x)) * x + z.real * z.imag
        y.backward(torch.ones_like(y) / 3)
        assert leaf.grad is not None
        return [y.detach(), leaf.grad]

    plain, ledger = step(nullcontext()), leangrad.saving(min_bytes=0)
    stands.fill = float("nan")
    for n in range(STEPS):
        assert_same(step(ledger), plain, n)
        assert stands.count == 3 * (n + 1)  # and both parts of the complex number


def test_a_change_in_place_is_no_matter_of_the_shape(stands: Stands) -> None:
    """Plain raises, because its check knows nothing of what backward reads. What else was saved is still checked."""

    def step(region: Any, change: str) -> Tensor:
        leaf = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with region:
            x, at = made(leaf, "contiguous"), index(8, 8, high=8, like=leaf)
            y = x.gather(1, at) * 3
        with torch.no_grad():
            {"x": x, "index": at, "": torch.ones(1)}[change].mul_(0)
        y.backward(torch.ones_like(y) / 3)
        assert leaf.grad is not None
        return leaf.grad

    plain, ledger = step(nullcontext(), ""), leangrad.saving(min_bytes=0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(nullcontext(), "x")
    for n in range(STEPS):
        assert same_bits(step(ledger, "x"), plain)
        assert stands.count == n + 1
    for _ in range(STEPS):
        with pytest.raises((ChangedError, RuntimeError), match="modified by an inplace operation"):
            step(ledger, "index")


def test_a_change_inside_the_call_is_seen() -> None:
    """What the call itself changes after it was saved: plain raises, and so do we."""
    leaf = torch.randn(4, requires_grad=True)
    with leangrad.saving(min_bytes=0):
        x = leaf * 2
        slot = PendingSave(x, 0)
        with torch.no_grad():
            x.mul_(3)
    slot.keep()
    with pytest.raises(ChangedError):
        slot.unpack()


@pytest.mark.parametrize("reentrant", [False, True])
def test_in_a_checkpoint(reentrant: bool, stands: Stands) -> None:
    make, shape = MODELS["average"]
    model, x = make(), torch.randn(shape)
    plain = gradients(model, x)
    forward = model.forward
    leangrad.lean(model, min_bytes=0)
    outer = Model(nn.Identity(), lambda x: checkpoint(model, x, use_reentrant=reentrant), nn.Identity())
    outer.inner = model
    stands.fill = float("nan")
    for n in range(STEPS):
        assert_same(gradients(outer, x.clone().requires_grad_()), plain, n)
    assert stands.count >= STEPS
    assert model.forward == forward


def test_a_call_that_raises_leaves_nothing_behind(stands: Stands) -> None:
    model, x = MODELS["gather"][0](), torch.randn(96, 16)
    plain = gradients(model, x)
    leangrad.lean(model, min_bytes=0)
    for n in range(STEPS):
        op, model.op = model.op, lambda x: x.gather(-1, index(96, 8, high=8, like=x) + 1000)
        with pytest.raises(RuntimeError, match="index"):
            model(x)
        model.op = op
        assert_same(gradients(model, x), plain, n)
    assert stands.count == STEPS


def test_a_step_with_another_op_is_right(stands: Stands) -> None:
    """A learned step meets another function, or another node of the same one, where a stand-in served."""
    model, x = convolutions(lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect")), torch.randn(4, 3, 16, 16)
    leangrad.lean(model, min_bytes=0)
    for _ in range(STEPS):
        gradients(model, x)
    for op in (
        lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"),
        lambda x: F.pad(x, (1, 1, 1, 1)),
        lambda x: F.pad(x.tanh(), (1, 1, 1, 1), mode="circular"),
        lambda x: F.avg_pool2d(x, 2),
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        F.gelu,
    ):
        other = convolutions(op)
        other.load_state_dict(model.state_dict())
        model.op = op
        for n in range(2):
            assert_same(gradients(model, x), gradients(other, x), n)


def test_the_graph_frees_what_was_saved_for_its_shape() -> None:
    """No slot holds its tensor after the call, and none makes a cycle."""
    with leangrad.saving(min_bytes=0):
        x = torch.randn(64, 64, requires_grad=True) @ torch.randn(64, 64)
        y = picked(x)
        storage = x.untyped_storage()
        del x
    assert leangrad._torch.storage_holders(y) == 1
    assert torch._C._storage_Use_Count(storage._cdata) == 1
    y.sum().backward()


def test_the_summary_tells() -> None:
    model = leangrad.lean(MODELS["gather"][0]())
    x = torch.randn(1024, 16)
    gradients(model, x)
    rows = [line.split() for line in leangrad.ledger_of(model).summary().splitlines()]
    (row,) = [row for row in rows if row[-4:-2] == ["shape", "only"]]
    assert row[1] == "addmm"
    assert row[-2:] == ["1", "0.262"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")  # which the model file of transformers calls
def test_disentangled_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeBERTa's scores come from three products a layer; two of them are only gathered from."""
    transformers = pytest.importorskip("transformers")
    from leangrad import floor

    heads, length, buckets, layers = 4, 64, 64, 2
    config = transformers.DebertaV2Config(
        vocab_size=64, hidden_size=64, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=128,
        relative_attention=True, position_buckets=buckets, pos_att_type=["c2p", "p2c"], share_att_key=True,
        norm_rel_ebd="layer_norm", type_vocab_size=0, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model, tokens = transformers.DebertaV2Model(config).train(), torch.randint(64, (4, length))

    def step() -> list[Tensor]:
        model.zero_grad()
        model(input_ids=tokens).last_hidden_state.square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    def kept() -> int:
        leangrad.lean(model)
        for n in range(STEPS):
            assert_same(step(), plain, n)
        return leangrad.measure(step).kept_bytes

    plain = step()
    lowest = floor(
        leangrad.plain(model), {"input_ids": tokens}, lambda out: out.last_hidden_state.square().mean()
    ).bytes
    lean = kept()
    monkeypatch.setattr(shape_only, "SHAPE_ONLY", {})
    before = kept()
    product = 4 * heads * length * 2 * buckets * 4  # batch, heads, queries, relative positions, bytes
    assert before - lean == 2 * layers * product
    assert lean <= 1.25 * lowest < before
