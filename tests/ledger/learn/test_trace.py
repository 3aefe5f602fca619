"""Hooks only where they are needed: later steps follow the trace of the recorded one, and leave it without harm."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import leangrad
from leangrad import _torch
from leangrad.errors import ChangedError
from leangrad.ledger import Region
from leangrad.ledger.decision import Decider
from leangrad.ledger.learn import items
from leangrad.ledger.ledger import _warn_of_other_hooks
from tests.support import same_bits
from tests.zoo import CASES, Case


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.extra: Callable[[Tensor], Any] = lambda x: None

    def forward(self, x: Tensor) -> Tensor:
        self.extra(x)
        return x + self.down(F.gelu(self.up(self.norm(x))))


def blocks(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Block(), Block(), Block())


def step(model: nn.Module, x: Tensor, region: Any = None) -> list[Tensor]:
    """The gradients of one step, its forward in ``region``."""
    model.zero_grad()
    y = model(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_same(a: list[Tensor], b: list[Tensor]) -> None:
    assert len(a) == len(b) > 0
    for n, (p, q) in enumerate(zip(a, b, strict=True)):
        assert same_bits(p, q), n


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors went through the hooks, counted in its one element."""
    count, pack = [0], Region.pack_along

    def counted(self: Region, tensor: Tensor) -> Any:
        count[0] += 1
        return pack(self, tensor)

    monkeypatch.setattr(Region, "pack_along", counted)
    return count


def test_only_what_is_rebuilt_goes_through_hooks(packs: list[int]) -> None:
    """Plain saves 10 tensors a block: 5 for the norm, 2 for each product, 1 for GELU. Norm and GELU are rebuilt."""
    model, x = leangrad.lean(blocks(), min_bytes=0), torch.randn(8, 16)
    step(model, x)
    recorded, packs[0] = packs[0], 0
    step(model, x)
    assert recorded == 10 * 3
    assert packs[0] == 2 * 3


def test_later_steps_decide_only_on_what_is_to_be_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decision looks into every tensor of the recorded step, and later into two of each block."""
    asked, decide = [0], Decider.decide

    def counted(self: Decider, tensor: Tensor) -> Any:
        asked[0] += 1
        return decide(self, tensor)

    monkeypatch.setattr(Decider, "decide", counted)
    model, plain, x = leangrad.lean(blocks(), min_bytes=0), blocks(), torch.randn(8, 16)
    counts = []
    for _ in range(4):
        assert_same(step(model, x), step(plain, x))
        counts.append(asked[0])
        asked[0] = 0
    assert counts == [10 * 3, 2 * 3, 2 * 3, 2 * 3]


def test_what_is_kept_is_the_same_with_and_without_hooks() -> None:
    model, x = leangrad.lean(blocks(), min_bytes=0), torch.randn(64, 16)
    first = leangrad.measure(lambda: step(model, x), timed_runs=0)
    later = leangrad.measure(lambda: step(model, x), timed_runs=0)
    assert later.kept_bytes == first.kept_bytes


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.sampled(3)
def test_no_model_of_the_zoo_leaves_its_trace(case: Case) -> None:
    torch.manual_seed(0)
    model, batch, ledger = case.make(), case.batch(), leangrad.saving()
    for _ in range(2):
        with ledger:
            loss = case.step(model, batch)
        loss.backward()
    trace = ledger.trace
    assert trace is not None
    with ledger:
        case.step(model, batch)
    assert ledger.trace is trace


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.sampled(5)
def test_nor_does_it_where_small_tensors_are_too_dear(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are kept, though they could be rebuilt; what their walks had found is decided anew."""
    is_dear = items._is_dear
    monkeypatch.setattr(items, "_is_dear", lambda value: is_dear(value) or (not value.depth and value.nbytes < 4096))
    torch.manual_seed(0)
    model, batch, ledger = case.make(), case.batch(), leangrad.saving(min_bytes=256)
    for _ in range(3):
        with ledger:
            loss = case.step(model, batch)
        loss.backward()
        assert "follow no trace" not in ledger.trace_status
    assert ledger.trace is not None


class Squeeze(nn.Module):
    """Squeeze and excitation: the map is averaged before it is saved for the product with the gate."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.reduce, self.expand = nn.Conv2d(channels, channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.conv(x))
        gate = self.expand(F.silu(self.reduce(x.mean((2, 3), keepdim=True)))).sigmoid()
        return x * gate


def test_what_the_walk_of_a_kept_tensor_would_have_found_is_decided_in_its_place() -> None:
    """The mean is kept, being dear to rebuild. Only the recorded step walks from it and so finds the map below."""
    torch.manual_seed(0)
    model = leangrad.lean(nn.Sequential(Squeeze(), Squeeze()), min_bytes=0)
    torch.manual_seed(0)
    plain, x = nn.Sequential(Squeeze(), Squeeze()), torch.randn(2, 8, 16, 16)
    ledger = leangrad.ledger_of(model)
    kept = [leangrad.measure(lambda: step(model, x), timed_runs=0).kept_bytes]
    step(plain, x)
    for _ in range(4):
        assert_same(step(model, x), step(plain, x))
        assert "follow no trace" not in ledger.trace_status
        assert ledger.trace is not None
        kept.append(leangrad.measure(lambda: step(model, x), timed_runs=0).kept_bytes)
        step(plain, x)
    assert len(set(kept[1:])) == 1
    assert kept[1] <= 1.01 * kept[0]  # the map that nobody decided about has a recipe in the later steps, too


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        (lambda y: y.exp().sin(), "torch.Tensor.exp was called, which the recorded step did not do"),
        (lambda y: F.gelu(y), "torch.nn.functional.gelu was called where torch.nn.functional.layer_norm was before"),
    ],
)
def test_the_status_names_the_call_that_differed(extra: Callable[[Tensor], Any], why: str) -> None:
    model, x = leangrad.lean(blocks(), min_bytes=0), torch.randn(4, 16)
    ledger = leangrad.ledger_of(model)
    assert ledger.trace_status == ""
    step(model, x)
    assert ledger.trace_status == "no step has followed this one yet"
    step(model, x)
    assert ledger.trace_status == "steps follow the trace of the recorded one"
    model[1].extra = extra
    step(model, x)
    assert ledger.trace_status == f"steps follow no trace: {why}"


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param(lambda x: x.shape, id="a_look"),
        pytest.param(lambda x: x.detach().abs().max().item(), id="a_figure"),
        pytest.param(lambda x: torch.exp(x.detach()), id="a_new_function_that_saves_nothing"),
    ],
)
def test_calls_that_save_nothing_are_no_part_of_it(extra: Callable[[Tensor], Any]) -> None:
    model, plain, x = leangrad.lean(blocks(), min_bytes=0), blocks(), torch.randn(8, 16)
    for _ in range(2):
        step(model, x)
    trace = leangrad.ledger_of(model).trace
    model[1].extra = extra
    assert_same(step(model, x), step(plain, x))
    assert leangrad.ledger_of(model).trace is trace is not None


def test_a_call_that_saves_ends_it_and_the_next_step_is_recorded(packs: list[int]) -> None:
    model, plain, x = leangrad.lean(blocks(), min_bytes=0), blocks(), torch.randn(8, 16)
    for _ in range(2):
        step(model, x)
    ledger = leangrad.ledger_of(model)
    kept: list[Tensor] = []
    model[1].extra = plain[1].extra = lambda t: kept.append(t.exp())
    for _ in range(2):
        assert_same(step(model, x), step(plain, x))
        kept.clear()
    assert ledger.trace is None
    assert_same(step(model, x), step(plain, x))
    assert ledger.trace is not None


def test_after_its_end_tensors_are_still_rebuilt() -> None:
    """The step that differs keeps no more than one that was never recorded, and one block's worth."""
    model, x = leangrad.lean(blocks(), min_bytes=0), torch.randn(64, 16)
    for _ in range(2):
        step(model, x)
    model[0].extra = lambda t: t.exp()
    note_difference = leangrad.measure(lambda: step(model, x), timed_runs=0).kept_bytes
    plain = leangrad.measure(lambda: step(leangrad.plain(model), x), timed_runs=0).kept_bytes
    gelu, norm = 64 * 64 * 4, 64 * 16 * 4
    assert plain - note_difference >= 2 * (gelu + norm)


def test_batches_of_any_length_follow_one_trace() -> None:
    model, plain = leangrad.lean(blocks(), min_bytes=0), blocks()
    traces = []
    for rows in (8, 8, 12, 64, 5, 8):
        x = torch.randn(rows, 16)
        assert_same(step(model, x), step(plain, x))
        traces.append(leangrad.ledger_of(model).trace)
    assert all(c is traces[1] is not None for c in traces[1:])


def test_what_was_learned_at_one_length_keeps_as_little_at_another() -> None:
    model, fresh, x = leangrad.lean(blocks(), min_bytes=0), leangrad.lean(blocks(), min_bytes=0), torch.randn(64, 16)
    for _ in range(2):
        step(model, torch.randn(8, 16))
        step(fresh, x)
    mine, theirs = (leangrad.measure(lambda m=m: step(m, x), timed_runs=0) for m in (model, fresh))
    assert mine.kept_bytes == theirs.kept_bytes
    assert mine.peak_bytes == theirs.peak_bytes


def test_a_first_batch_that_is_too_small_to_look_into_teaches_nothing_about_large_ones() -> None:
    """Trying a model out on one row must not make it keep everything for ever."""
    model, fresh = leangrad.lean(blocks(), min_bytes=4096), leangrad.lean(blocks(), min_bytes=4096)
    large = torch.randn(256, 16)
    for _ in range(3):
        step(model, torch.randn(1, 16))
    for _ in range(3):
        step(model, large)
        step(fresh, large)
    mine, theirs = (leangrad.measure(lambda m=m: step(m, large), timed_runs=0) for m in (model, fresh))
    assert mine.kept_bytes == theirs.kept_bytes


class GroupedQueries(nn.Module):
    """Attention with four heads of queries and one of keys and values, which is repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(64, 64), nn.Linear(64, 16), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        heads = [p(x).view(n, length, -1, 16).transpose(1, 2) for p in (self.query, self.key, self.value)]
        q, k, v = (h.expand(n, 4, length, 16).reshape(n, 4, length, 16) for h in heads)
        return (q @ k.mT).softmax(-1) @ v


def test_what_was_too_small_to_be_caught_teaches_nothing_about_large_ones() -> None:
    """The keys before they are repeated: those of the first batch have 8192 bytes, repeated they have 32768."""
    model, fresh, large = GroupedQueries(), GroupedQueries(), torch.randn(8, 64, 64)
    for m in (model, fresh):
        leangrad.lean(m, min_bytes=16384)
    for _ in range(3):
        step(model, torch.randn(2, 64, 64))
    for _ in range(3):
        step(model, large)
        step(fresh, large)
    mine, theirs = (leangrad.measure(lambda m=m: step(m, large), timed_runs=0) for m in (model, fresh))
    assert mine.kept_bytes == theirs.kept_bytes


def test_what_was_caught_is_not_kept_where_it_is_the_larger() -> None:
    """Rows of a product, which are chosen anew in each step: many in the recorded one, few later."""
    x, weight = torch.randn(64, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
    ledger = leangrad.saving(residual_depth=2, min_bytes=0)

    def step(rows: int, region: Any) -> None:
        with region:
            total = (F.linear(x, weight)[torch.arange(rows) % 64] * 2).sin().sum()
        total.backward()

    for rows in (256, 256, 8, 256, 8):
        lean, plain = (leangrad.measure(partial(step, rows, r), timed_runs=0) for r in (ledger, nullcontext()))
        others = 8 * rows + 4 + 8  # the indices, the total, and the number 2
        assert lean.kept_bytes == others + 64 * min(64, rows), rows  # the output of the product, or what the sine keeps
        assert plain.kept_bytes == others + 64 * rows
    assert ledger.trace is not None


@pytest.mark.parametrize("first", [0, 3])
def test_small_batches_of_any_length_follow_one_trace_while_they_are_small(first: int) -> None:
    """Gradients of blocks 16 wide: rows of 64 floats are 256 bytes each, so up to 15 rows all is below 4096."""
    model, plain = leangrad.lean(blocks(), min_bytes=4096), blocks()
    ledger = leangrad.ledger_of(model)
    for _ in range(2):
        step(model, torch.randn(first, 16))
    trace = ledger.trace
    assert trace is not None
    for rows in (4, 9, 15) if first else (0,):
        x = torch.randn(rows, 16)
        assert_same(step(model, x), step(plain, x))
        assert ledger.trace is trace
    step(model, torch.randn(16, 16))
    assert ledger.trace is None


def freeze(model: nn.Sequential) -> None:
    model[:2].requires_grad_(False)


def unfreeze(model: nn.Sequential) -> None:
    model.requires_grad_(True)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(freeze, unfreeze, id="layers_that_were_frozen"),
        pytest.param(lambda m: m.requires_grad_(False)[2].down.requires_grad_(True), unfreeze, id="all_but_the_last"),
        pytest.param(nn.Module.eval, nn.Module.train, id="dropout_that_did_nothing"),
    ],
)
def test_what_gets_a_gradient_later_is_recorded_anew(
    before: Callable[[nn.Sequential], Any], after: Callable[[nn.Sequential], Any]
) -> None:
    """A call that needed no gradient saved nothing, which says nothing about the same call with one."""

    def make() -> nn.Sequential:
        model = blocks()
        for block in model:
            block.down = nn.Sequential(block.down, nn.Dropout(0.5))
        return leangrad.lean(model, min_bytes=0)

    model, fresh, x = make(), make(), torch.randn(256, 16)
    before(model)
    for _ in range(3):
        step(model, x)
    after(model)
    for _ in range(3):
        step(model, x)
        step(fresh, x)
    mine, theirs = (leangrad.measure(lambda m=m: step(m, x), timed_runs=0) for m in (model, fresh))
    assert mine.kept_bytes == theirs.kept_bytes


def test_a_checkpoint_around_it_sees_the_same_in_every_run() -> None:
    """It counts what is saved under its hooks, in forward and when it runs the model again."""
    model, plain, x = leangrad.lean(blocks(), min_bytes=0), blocks(), torch.randn(8, 16)

    def checkpointed(t: Tensor) -> Tensor:
        return checkpoint(model, checkpoint(model, t, use_reentrant=False), use_reentrant=False)

    for _ in range(4):
        for m in (model, plain):
            m.zero_grad()
        y, z = checkpointed(x), plain(plain(x))
        for out in (y, z):
            out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)))
        assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    step(model, x)  # once it has learned, and with a checkpoint of the same
    assert_same(step(model, x), step(plain, x))
    model.zero_grad()
    checkpointed(x).sum().backward()


def test_hooks_of_others_around_it_get_every_tensor_in_every_step() -> None:
    """The model steps aside, with one warning: hidden hooks that offload would cost memory without a word."""
    _warn_of_other_hooks.cache_clear()
    model, plain, x = leangrad.lean(blocks(), min_bytes=0), blocks(), torch.randn(8, 16)
    counts = []
    for step in range(4):
        for m in (plain, model):
            seen: list[Tensor] = []
            warns = pytest.warns(UserWarning, match=r"others have set around it.*Choose one of the two")
            with (
                warns if m is model and step == 0 else nullcontext(),
                saved_tensors_hooks(lambda t, seen=seen: seen.append(t.detach()) or t, lambda t: t),
            ):
                y = m(x)
            y.sum().backward()
            counts.append(len(seen))
    assert len(set(counts)) == 1
    assert counts[0] > 10


def test_an_exception_on_the_way_leaves_no_hooks() -> None:
    model, plain, x = leangrad.lean(blocks(), min_bytes=0), blocks(), torch.randn(8, 16)
    for _ in range(2):
        step(model, x)
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.randn(8, 15))
    assert _torch.innermost_pack_hook() is None
    assert_same(step(model, x), step(plain, x))


def test_hooks_of_others_inside_are_theirs() -> None:
    """Whoever sets hooks inside a lean model gets what is saved there, in the recorded step and in later ones."""
    model, plain, x = leangrad.lean(blocks(), min_bytes=0), blocks(), torch.randn(8, 16)
    inner, seen = model[1].forward, [0]

    def forward(t: Tensor) -> Tensor:
        def pack(saved: Tensor) -> Tensor:
            seen[0] += 1
            return saved.clone()

        with saved_tensors_hooks(pack, lambda saved: saved):
            return inner(t)

    model[1].forward = forward
    counts = []
    for _ in range(4):
        seen[0] = 0
        assert_same(step(model, x), step(plain, x))
        counts.append(seen[0])
    assert counts == [10] * 4


class Lossy(TorchFunctionMode):
    """What the calls under it save is rounded, from some step on."""

    on = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with saved_tensors_hooks(Tensor.bfloat16, Tensor.float) if self.on else nullcontext():
            return func(*args, **(kwargs or {}))


def test_hooks_of_others_that_are_set_inside_a_call_are_theirs() -> None:
    """A tensor that is read off its node is no anchor if it would come through their hooks."""
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    ledger, mode = leangrad.saving(min_bytes=0), Lossy()
    for number in range(4):
        made = []
        for region in (nullcontext(), ledger):
            mode.on = number >= 2
            with mode, region:
                h = torch.tanh(x @ torch.eye(8))
                mode.on = False
                y = torch.exp(-(h.cos() * h)) * w
            made.append([*torch.autograd.grad(y, (x, w), torch.linspace(-1, 1, y.numel()).view_as(y))])
        assert_same(*made)


def test_an_anchor_changed_in_place_raises_as_plain_does() -> None:
    """The input of a GELU is kept by autograd itself in later steps, and read by the recipe of the GELU's output."""
    w = torch.randn(16, 16, requires_grad=True)
    x = torch.randn(8, 16, requires_grad=True)
    ledger = leangrad.saving(min_bytes=0)
    for n in range(3):
        with ledger:
            h = x @ w
            y = F.gelu(h) @ w
        if n < 2:
            y.sum().backward()
    with torch.no_grad():
        h.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_buffer_of_no_dimension_that_changes_after_forward_raises() -> None:
    """It is saved with no hook, as a Python number is, but it is none."""
    scale = torch.tensor(2.0, dtype=torch.float64)
    x = torch.randn(8, 16, requires_grad=True)
    ledger = leangrad.saving(min_bytes=0)
    for n in range(3):
        with ledger:
            y = (x * scale).sin().exp()
        if n < 2:
            y.sum().backward()
    scale.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_cast_weight_is_rebuilt_and_its_change_is_noticed() -> None:
    model, plain, x = leangrad.lean(blocks(), min_bytes=0), blocks(), torch.randn(8, 16)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            mine, theirs = step(model, x), step(plain, x)
        assert_same(mine, theirs)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    with torch.no_grad():
        model[0].up.weight.add_(1)
    with pytest.raises(ChangedError, match="a parameter or input"):
        y.sum().backward()


def test_a_cast_weight_changed_in_forward_keeps_what_it_was() -> None:
    model, plain, x = leangrad.lean(blocks(), min_bytes=0), blocks(), torch.randn(8, 16)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            step(model, x)

    for m in (model, plain):
        first = m[0].up.weight
        m[1].extra = lambda t, first=first: first.data.mul_(0.5)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(step(model, x), step(plain, x))


def test_a_conjugated_cast_off_the_trace_is_no_view_by_strides() -> None:
    w = torch.randn(8, 8, dtype=torch.complex128, requires_grad=True)
    x = torch.randn(8, 8, requires_grad=True)
    ledger = leangrad.saving(min_bytes=0)

    def gradients(region: Any, n: int) -> list[Tensor]:
        with region:
            t = x.erf() if n == 2 else x  # which ends the trace
            y = torch.view_as_real(w.to(torch.complex64).conj() * t)
        seed = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
        return [torch.view_as_real(g) if g.is_complex() else g for g in torch.autograd.grad(y, (w, x), seed)]

    for n in range(4):
        assert_same(gradients(ledger, n), gradients(nullcontext(), n))


def test_the_collector_rests_in_forward_only() -> None:
    model, x, seen = leangrad.lean(blocks(), min_bytes=0), torch.randn(8, 16), []
    model[1].extra = lambda t: seen.append(gc.isenabled())
    step(model, x)
    assert seen == [False]
    assert gc.isenabled()
    with pytest.raises(RuntimeError):
        model(torch.randn(8, 15))
    assert gc.isenabled()
    with torch.no_grad():
        model(x)
    assert seen == [False, True]
    gc.disable()
    try:
        step(model, x)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_steps_leave_nothing_to_the_collector() -> None:
    """Regions, recorders and values know each other; none of them waits for the collector to find that out.

    Only what is ours counts: tensors, and what leangrad makes; and only what was made here, not what other tests left.
    """
    model, x = leangrad.lean(blocks(), min_bytes=0), torch.randn(8, 16)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for _ in range(4):
            step(model, x)
        with leangrad.saving(min_bytes=0):
            y = model(x)
        del y  # backward never runs
        assert not waiting_for_the_collector()
    finally:
        gc.enable()


def waiting_for_the_collector() -> list[str]:
    """The kinds of our objects that only the collector finds dead."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        homes = [(type(found) if not isinstance(found, FunctionType) else found) for found in gc.garbage]
        return [str(home) for home in homes if home is Tensor or home.__module__.startswith("leangrad")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def test_a_region_that_waits_for_the_collector_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would see it."""
    model, x = leangrad.lean(blocks(), min_bytes=0), torch.randn(8, 16)
    end = Region.__exit__

    def exit_and_stay(self: Region, *error: Any) -> None:
        parts = dict(vars(self))
        end(self, *error)
        vars(self).update(parts, saved_count=-1, is_packing=True)

    monkeypatch.setattr(Region, "__exit__", exit_and_stay)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):  # the region of the first is held by what it recorded
            step(model, x)
        assert any("Region" in kind for kind in waiting_for_the_collector())
    finally:
        gc.enable()


@pytest.fixture
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_what_a_region_makes_does_not_call_the_collector(thresholds: None) -> None:
    """It dies in backward. Outside of regions the collector runs as it was told to, by nobody but the caller."""
    model, x = leangrad.lean(nn.Sequential(*[blocks() for _ in range(8)]), min_bytes=0), torch.randn(8, 16)
    inside: list[bool] = []
    runs = [False]
    model[0].register_forward_pre_hook(lambda *_: runs.__setitem__(0, True))
    model[-1].register_forward_hook(lambda *_: runs.__setitem__(0, False))

    def collected(phase: str, info: dict[str, int]) -> None:
        inside.append(runs[0])

    for _ in range(3):
        model(x).sum().backward()  # gradients are there to stay
    gc.collect()
    gc.set_threshold(300, 10, 10)
    gc.callbacks.append(collected)
    try:
        for _ in range(5):
            y = model(x)
            assert gc.get_threshold() == (300, 10, 10)
            y.sum().backward()
            del y
        kept = [[i] for i in range(5000)]
        assert inside
        assert not any(inside)
        assert len(kept) == 5000
    finally:
        gc.callbacks.remove(collected)


def test_the_collector_rests_in_a_region_of_code() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    with leangrad.saving(min_bytes=0):
        y = (x @ x).sin()
        assert not gc.isenabled()
    assert gc.isenabled()
    y.sum().backward()
    with pytest.raises(ZeroDivisionError), leangrad.saving(), leangrad.saving():
        _ = 1 // 0
    assert gc.isenabled()


def test_threads_under_autocast_learn_each_for_itself() -> None:
    """Autocast's cache hands one thread the cast that another made, and with it a value of the other's step."""
    model, plain, errors = leangrad.lean(blocks(), min_bytes=0), blocks(), []
    xs = [torch.randn(8 + n, 16) for n in range(4)]

    def gradients(net: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            y = net(x)
        return torch.autograd.grad(y.float(), list(net.parameters()), torch.ones_like(y, dtype=torch.float32).sin())

    wanted = [gradients(plain, x) for x in xs]

    def work(start: int) -> None:
        try:
            for n in range(start, start + 12):
                assert_same([*gradients(model, xs[n % 4])], [*wanted[n % 4]])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_trace_that_another_thread_ends_just_now_is_followed_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain, x = leangrad.lean(blocks(), min_bytes=0), blocks(), torch.randn(8, 16)
    ledger = leangrad.ledger_of(model)
    for _ in range(2):
        step(model, x)
    assert ledger.trace is not None
    active = _torch.saved_tensor_hooks_active

    def end_and_ask() -> bool:  # a region asks it between two looks at the trace
        ledger.note_difference("another thread")
        return active()

    with monkeypatch.context() as patch:
        patch.setattr(_torch, "saved_tensor_hooks_active", end_and_ask)
        assert_same(step(model, x), step(plain, x))
    for _ in range(2):
        assert_same(step(model, x), step(plain, x))


def test_a_model_that_changes_now_and_then_is_learned_anew() -> None:
    """Gradual unfreezing: each change of what is trained is one lesson, and after each there is a trace again."""
    model, x = leangrad.lean(blocks(), min_bytes=0), torch.randn(4, 16)
    ledger = leangrad.ledger_of(model)
    for part in model:
        part.requires_grad_(False)
    for part in reversed(list(model)):
        part.requires_grad_(True)
        for _ in range(12):
            step(model, x)
        assert ledger.trace is not None


def test_a_model_that_never_repeats_itself_is_recorded_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """And once it does repeat itself it is learned from all the same."""
    model, x = leangrad.lean(blocks(), min_bytes=0), torch.randn(4, 16)
    ledger = leangrad.ledger_of(model)
    recorded = []
    learn = type(ledger)._begin_step

    def counted(self: Any, *args: Any) -> Any:
        recorder = learn(self, *args)
        recorded.append(recorder is not None)
        return recorder

    monkeypatch.setattr(type(ledger), "_begin_step", counted)
    for n in range(60):  # odd steps are not like even ones
        model[1].extra = (lambda y: y.exp().sin()) if n % 2 else (lambda y: None)
        step(model, x)
    assert sum(recorded[:10]) == 3
    assert sum(recorded[30:]) == 1
    for _ in range(70):
        step(model, x)
    assert ledger.trace is not None
