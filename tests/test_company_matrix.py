"""In company: every two parts of leangrad, and torch's own tools, together on one small model.

A pair takes no more memory than the lower of its two members alone, the same in every step from the third on, and its
gradients are those of one of its members, bit for bit.

    member      what it does to the model            alone means
    general     lean, checkpoint, hooks, ...         that on the plain form of the model
    special     convert_abn, a block, ...            the model with that in it, and nothing else

Two general members meet on the residual net; a general and a special one on the special one's own model; two special
ones only where both fit one model (``SIDE_BY_SIDE`` says why the others do not).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import leangrad
import leangrad.nn as lnn
from leangrad.errors import LeangradError
from leangrad.ledger.ledger import _warn_of_other_hooks
from leangrad.measure import measure
from tests.support import same_bits
from tests.support.gpu_memory import requested_bytes

RATIO, SLACK = 1.02, 64 * 1024
MEASURED = 2  # steps, from the third on


# --------------------------------------------------------------------------------------------------------- the models


class Net(nn.Module):
    """A stem, some blocks in a row and a head; ``call`` runs a block, as ``checkpoint`` does."""

    def __init__(self, stem: nn.Module, blocks: list[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = stem, nn.ModuleList(blocks), head
        self.call: Callable[..., Tensor] = lambda block, x: block(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = self.call(block, x)
        y: Tensor = self.head(x)
        return y


class Bottleneck(nn.Module):
    """As torchvision writes it: one ReLU in place for three norms, the last after the addition."""

    def __init__(self, width_in: int, inner: int, stride: int = 1) -> None:
        super().__init__()
        width = 4 * inner
        self.conv1, self.bn1 = nn.Conv2d(width_in, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2, self.bn2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv3, self.bn3 = nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or width_in != width:
            self.shortcut = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += self.shortcut(x)
        z: Tensor = self.relu(y)
        return z


def residual_net(special: bool = False) -> nn.Module:
    """A small ResNet; special: with norm, addition and activation as one layer."""
    stem = nn.Sequential(
        nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
    )
    blocks: list[nn.Module] = [Bottleneck(16, 16), Bottleneck(64, 16), Bottleneck(64, 32, 2)]
    net = Net(stem, blocks, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)))
    return lnn.convert_abn(net) if special else net


def _activated(width: int, special: bool) -> list[nn.Module]:
    if special:
        return [lnn.InPlaceABN(width)]
    return [nn.BatchNorm2d(width), nn.LeakyReLU(0.01)]


def conv_chain(special: bool) -> nn.Module:
    """Convolutions with norm and LeakyReLU; special: as InPlaceABN."""

    def layer() -> list[nn.Module]:
        return [nn.Conv2d(16, 16, 3, padding=1, bias=False), *_activated(16, special)]

    blocks: list[nn.Module] = [nn.Sequential(*layer(), *layer()) for _ in range(3)]
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), *_activated(16, special))
    return Net(stem, blocks, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)))


class Swiglu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        gate, value = x.chunk(2, -1)
        return F.silu(gate) * value


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "swiglu": Swiglu}


def dense_net(activation: str, special: bool) -> nn.Module:
    """Linear layers with an activation each, after a norm; special: as Dense."""
    wider = 2 if activation == "swiglu" else 1

    def layer(n_in: int, n_out: int) -> list[nn.Module]:
        if special:
            return [lnn.Dense(n_in, n_out, activation=activation)]
        return [nn.Linear(n_in, wider * n_out), ACTIVATIONS[activation]()]

    blocks: list[nn.Module] = [nn.Sequential(*layer(64, 192), *layer(192, 64)) for _ in range(2)]
    return Net(nn.LayerNorm(64), blocks, nn.Linear(64, 8))


def mlp_net(activation: str, special: bool) -> nn.Module:
    """Two residual feed-forward parts; special: as MLP."""
    wider = 2 if activation == "swiglu" else 1

    def part() -> nn.Module:
        if special:
            return lnn.MLP([64, 256, 64], activation)
        act = ACTIVATIONS[activation]
        return nn.Sequential(nn.Linear(64, wider * 256), act(), nn.Linear(256, 64))

    return Net(nn.Identity(), [Residual(part()), Residual(part())], nn.Linear(64, 8))


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(64), inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.inner(self.norm(x))
        return y


class Plainly(nn.Module):
    """A block by its own plain form: the modules that it consists of, one after another."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Tensor) -> Tensor:
        y: Tensor = self.block.plain(*args)  # type: ignore[operator]
        return y


class Conditioned(nn.Module):
    """A DiffusionBlock that is told one and the same noise level."""

    def __init__(self, special: bool) -> None:
        super().__init__()
        block = lnn.DiffusionBlock(64, 4, hidden=512, condition_width=16)
        nn.init.normal_(block.film.weight, std=0.1)
        self.block = block if special else Plainly(block)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x, torch.linspace(0, 1, 16).expand(x.shape[0], 16))
        return y


def transformer_net(special: bool) -> nn.Module:
    """TransformerBlocks with dropout; plain: by their plain form."""
    blocks = [lnn.TransformerBlock(64, 4, hidden=512, dropout=0.1) for _ in range(2)]
    return Net(nn.Identity(), [b if special else Plainly(b) for b in blocks], nn.Linear(64, 8))


def diffusion_net(special: bool) -> nn.Module:
    """DiffusionBlocks; plain: by their plain form."""
    return Net(nn.Identity(), [Conditioned(special) for _ in range(2)], nn.Linear(64, 8))


def scan_net(kind: Callable[[int], nn.Module], special: bool) -> nn.Module:
    """Blocks around a scan, which has no plain form of a size worth comparing: there is only the special one."""
    assert special
    return Net(nn.Identity(), [Residual(kind(64)) for _ in range(2)], nn.Linear(64, 8))


class Mixing(nn.Module):
    """A mixer with a context, which it applies and updates."""

    def __init__(self) -> None:
        super().__init__()
        self.context = lnn.AttentionContext(64)
        self.norm, self.mix = nn.LayerNorm(64), nn.Linear(64, 64)
        nn.init.constant_(self.context.strength, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        given = self.context(x)
        y = F.gelu(self.mix(self.norm(given)))
        self.context.update(given, y)
        z: Tensor = given + y
        return z


def context_net(special: bool) -> nn.Module:
    """Mixers with a context; a model without one is another model, so there is only the special one."""
    assert special
    return Net(nn.Identity(), [Mixing() for _ in range(3)], nn.Linear(64, 8))


# -------------------------------------------------------------------------------------------------------- the members


class Trial:
    """A model and the way it is called; members change either."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self.call: Callable[[Tensor], Tensor] = lambda x: self.model(x)
        self.packed: Any = None

    def around(self, context: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        """Run every call inside ``with context():``."""
        inner = self.call

        def call(x: Tensor) -> Tensor:
            with context():
                return inner(x)

        self.call = call


def pack_gradients(trial: Trial) -> None:
    trial.packed = leangrad.pack_gradients(trial.model)


def backward_hooks(trial: Trial) -> None:
    for module in (trial.model, *trial.model.blocks):
        module.register_full_backward_hook(lambda *_: None)
        module.register_full_backward_pre_hook(lambda *_: None)


def lean_submodules(trial: Trial) -> None:
    for block in trial.model.blocks:
        leangrad.lean(block)


def lean_model(trial: Trial) -> None:
    leangrad.lean(trial.model)


def checkpoint_inside(trial: Trial, reentrant: bool) -> None:
    trial.model.call = functools.partial(checkpoint, use_reentrant=reentrant)


def saving(trial: Trial) -> None:
    ledger = leangrad.saving()
    trial.around(lambda: ledger)


def checkpoint_around(trial: Trial, reentrant: bool) -> None:
    inner = trial.call
    trial.call = lambda x: checkpoint(inner, x, use_reentrant=reentrant)


HOOKS = "full backward hooks"

# Name: what it does. A pair is applied in this order, so of two that wrap the call the lower one is outside.
GENERAL: dict[str, Callable[[Trial], None]] = {
    "pack_gradients": pack_gradients,
    HOOKS: backward_hooks,
    "lean submodules": lean_submodules,
    "lean model": lean_model,
    "checkpoint inside": functools.partial(checkpoint_inside, reentrant=False),
    "reentrant checkpoint inside": functools.partial(checkpoint_inside, reentrant=True),
    "saving()": saving,
    "save_on_cpu": lambda trial: trial.around(save_on_cpu),
    "checkpoint around": functools.partial(checkpoint_around, reentrant=False),
    "reentrant checkpoint around": functools.partial(checkpoint_around, reentrant=True),
}


@dataclass(frozen=True)
class Special:
    """A member that is part of the model itself: ``build(True)`` has it, ``build(False)`` is the plain form, if any."""

    build: Callable[[bool], nn.Module]
    shape: tuple[int, ...]
    has_plain: bool = True


IMAGES = (4, 3, 64, 64)
SPECIAL: dict[str, Special] = {
    "convert_abn": Special(residual_net, IMAGES),
    "InPlaceABN": Special(conv_chain, IMAGES),
    **{f"Dense({a})": Special(functools.partial(dense_net, a), (1024, 64)) for a in ACTIVATIONS},
    **{f"MLP({a})": Special(functools.partial(mlp_net, a), (1024, 64)) for a in ACTIVATIONS},
    "TransformerBlock": Special(transformer_net, (8, 64, 64)),
    "DiffusionBlock": Special(diffusion_net, (8, 64, 64)),
    "MambaBlock": Special(functools.partial(scan_net, lnn.MambaBlock), (2, 64, 64), has_plain=False),
    "RGLRUBlock": Special(functools.partial(scan_net, lnn.RGLRUBlock), (2, 64, 64), has_plain=False),
    "AttentionContext": Special(context_net, (8, 64, 64), has_plain=False),
}

#: What may be refused with a sentence that says what to do instead.
MAY_REFUSE = ("save_on_cpu", "reentrant checkpoint")

SIDE_BY_SIDE = "both are parts of a model and stand in it side by side: neither holds anything of the other's"
BATCH_NORMS = "the one is for batch norms, the other has none"
ONE_MODE = "a call is checkpointed in one mode or in the other"


def reason_not_to_pair(a: str, b: str) -> str:
    """Why two members are no pair; an empty string: they are."""
    if {a, b} == {"checkpoint inside", "reentrant checkpoint inside"}:
        return ONE_MODE
    if {a, b} == {"convert_abn", "InPlaceABN"} or a in GENERAL or b in GENERAL:
        return ""
    return BATCH_NORMS if {a, b} & {"convert_abn", "InPlaceABN"} else SIDE_BY_SIDE


# ------------------------------------------------------------------------------------------------------------- a trial


class Result(NamedTuple):
    peaks: tuple[int, ...]  # of the third step and those after it
    gradients: tuple[Tensor, ...]


MARK = 12_347  # bytes of a tensor that separates steps in a timeline


def run(model: nn.Module, shape: tuple[int, ...], members: tuple[str, ...]) -> Result:
    """Two steps, then the measured ones, to which gradients stand from before; then one more for the gradients."""
    trial = Trial(model)
    for name in GENERAL:
        if name in members:
            GENERAL[name](trial)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), requires_grad=True)
    wanted = [x, *model.parameters()]

    def step() -> None:
        torch.manual_seed(2)  # of dropout
        trial.call(x).square().sum().backward()

    def steps() -> None:
        for _ in range(MEASURED):
            for t in wanted:
                if t.grad is not None:
                    t.grad.zero_()
            torch.empty(MARK, dtype=torch.uint8)
            step()

    for _ in range(2):
        step()
    timeline = measure(steps, timed_runs=0).timeline
    peaks: list[int] = []
    start = 0
    for event in timeline:
        if event.bytes == MARK:
            start = event.live_bytes - MARK
            peaks.append(0)
        elif peaks:
            peaks[-1] = max(peaks[-1], event.live_bytes - start)
    for t in wanted:
        t.grad = None
    step()
    return Result(tuple(peaks), tuple(t.grad.clone() for t in wanted if t.grad is not None))


@functools.cache
def trial_of(special: str | None, has_it: bool, members: tuple[str, ...]) -> Result:
    """The model of a special member, the residual net without one, with the general ``members`` applied to it."""
    torch.manual_seed(0)
    if special is None:
        return run(residual_net(), IMAGES, members)
    return run(SPECIAL[special].build(has_it), SPECIAL[special].shape, members)


def alone(special: str | None, member: str | None) -> Result:
    """A general member on the plain form of a model, or the special one by itself."""
    return trial_of(special, member is None, () if member is None else (member,))


def check(together: Result, first: Result, second: Result, extra: int = 0) -> None:
    """Hold a pair to its bound; extra: the bytes that one of its members takes of any model."""
    lowest = min(max(first.peaks), max(second.peaks))
    assert len(together.peaks) == MEASURED
    assert max(together.peaks) <= RATIO * lowest + SLACK + extra, (
        f"together {together.peaks}, alone {first.peaks} and {second.peaks}, {extra} extra"
    )
    assert len(set(together.peaks)) == 1, f"not the same in every step: {together.peaks}"
    assert any(same(together.gradients, r.gradients) for r in (first, second)), "other gradients than either alone"


def same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(same_bits(x, y) for x, y in zip(a, b, strict=True))


@functools.cache
def hooks_hold(special: str | None) -> int:
    """What full backward hooks take: torch holds a module's incoming gradient for them until its backward is over."""
    model = residual_net() if special is None else SPECIAL[special].build(True)
    sizes: list[int] = []
    for block in model.blocks:  # type: ignore[union-attr]
        block.register_forward_hook(lambda module, given, made: sizes.append(made.nbytes))
    model(torch.randn(IMAGES if special is None else SPECIAL[special].shape))
    return max(sizes)


@pytest.fixture(autouse=True, scope="module")
def _whole_heap_afterwards() -> Iterator[None]:
    gc.collect()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _small_heap_and_one_thread() -> Iterator[None]:
    """What stands before a test is none of its business: ``measure`` looks through all objects that are not frozen."""
    gc.freeze()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    _warn_of_other_hooks.cache_clear()  # a ledger that steps aside says so once; here in each pair
    yield
    torch.set_num_threads(threads)


def refused(error: Exception, *members: str) -> None:
    """A refusal, by an error or a warning, is for the few that may refuse, and says what to do."""
    assert any(m.startswith(MAY_REFUSE) for m in members) or is_context_in_checkpoint(*members), error
    assert any(word in str(error) for word in ("leave", "use", "call", "Choose")), error


def is_context_in_checkpoint(*members: str) -> bool:
    return "AttentionContext" in members and any("checkpoint" in m for m in members)


@pytest.mark.filterwarnings("ignore:.*requires_grad=True. Gradients will be None")
@pytest.mark.parametrize(("a", "b"), [p for p in itertools.combinations(GENERAL, 2) if not reason_not_to_pair(*p)])
@pytest.mark.sampled(2)
def test_two_general_members(a: str, b: str) -> None:
    first, second = alone(None, a), alone(None, b)
    try:
        together = trial_of(None, False, (a, b))
    except (LeangradError, UserWarning) as error:
        refused(error, a, b)
        return
    check(together, first, second, hooks_hold(None) if HOOKS in (a, b) else 0)


@pytest.mark.filterwarnings("ignore:.*requires_grad=True. Gradients will be None")
@pytest.mark.parametrize("general", GENERAL)
@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.sampled(3)
def test_a_special_and_a_general_member(special: str, general: str) -> None:
    chosen = SPECIAL[special]
    first = alone(special, None)
    second = alone(special, general) if chosen.has_plain else first
    try:
        together = trial_of(special, True, (general,))
    except (LeangradError, UserWarning) as error:
        refused(error, special, general)
        return
    check(together, first, second, hooks_hold(special) if general == HOOKS else 0)


def test_convert_abn_with_in_place_abn() -> None:
    """Half of the norms by hand, the other half converted: no more than either half alone, and as exact."""

    def build(by_hand: bool, converted: bool) -> nn.Module:
        torch.manual_seed(0)
        model = conv_chain(False)
        for block in model.blocks if by_hand else ():  # type: ignore[union-attr]
            block[1], block[2] = lnn.InPlaceABN(16), nn.Identity()
        return lnn.convert_abn(model) if converted else model

    hand, converted = run(build(True, False), IMAGES, ()), run(build(False, True), IMAGES, ())
    plain, both = run(build(False, False), IMAGES, ()), run(build(True, True), IMAGES, ())
    assert max(both.peaks) <= RATIO * min(max(hand.peaks), max(converted.peaks)) + SLACK
    assert len(set(both.peaks)) == 1

    def distance(a: Result) -> float:
        return max(float((x - y).norm() / y.norm()) for x, y in zip(a.gradients, plain.gradients, strict=True))

    assert distance(both) <= 3 * max(distance(hand), distance(converted))


def test_the_pairs_that_are_not_run_are_few_and_have_reasons() -> None:
    reasons = Counter(reason_not_to_pair(a, b) for a, b in itertools.combinations([*GENERAL, *SPECIAL], 2))
    special = len(SPECIAL)
    assert reasons[ONE_MODE] == 1
    assert reasons[BATCH_NORMS] == 2 * (special - 2)
    assert reasons[SIDE_BY_SIDE] == (special - 2) * (special - 3) // 2
    assert reasons[""] == 44 + len(GENERAL) * special + 1  # what the tests above run


# ------------------------------------------------------------------------------------------------------------ on a GPU


def resnet50() -> nn.Module:
    """ResNet-50, as far as memory goes."""
    stem = nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
    )
    blocks: list[nn.Module] = []
    width = 64
    for stage, count in enumerate((3, 4, 6, 3)):
        inner = 64 * 2**stage
        for n in range(count):
            blocks.append(Bottleneck(width, inner, 2 if stage and not n else 1))
            width = 4 * inner
    return Net(stem, blocks, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000)))


def peaks_on_gpu(members: tuple[str, ...], converted: bool) -> list[int]:
    """Of the third to the sixth step of a ResNet-50 in bfloat16 and channels_last."""
    torch.manual_seed(0)
    model = resnet50().to("cuda", memory_format=torch.channels_last)
    trial = Trial(lnn.convert_abn(model) if converted else model)
    for name in members:
        GENERAL[name](trial)
    x = torch.randn(32, 3, 224, 224, device="cuda").contiguous(memory_format=torch.channels_last)
    peaks = []
    for _ in range(6):
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = requested_bytes("current")
        with torch.autocast("cuda", torch.bfloat16):
            y = trial.call(x)
        y.float().square().mean().backward()
        del y
        torch.cuda.synchronize()
        peaks.append(requested_bytes("peak") - start)
    return peaks[2:]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed")
@pytest.mark.parametrize("general", ["lean model", "lean submodules", "saving()", HOOKS])
def test_converted_resnet50_on_a_gpu(general: str) -> None:
    together = peaks_on_gpu((general,), converted=True)
    lowest = min(max(peaks_on_gpu((general,), converted=False)), max(peaks_on_gpu((), converted=True)))
    held = 32 * 256 * 56 * 56 * 2 if general == HOOKS else 0  # the incoming gradient of a block of the first stage
    assert max(together) <= RATIO * lowest + SLACK + held, (together, lowest)
    assert max(together) <= 1.001 * min(together), together  # cuDNN's workspaces may differ by a little
