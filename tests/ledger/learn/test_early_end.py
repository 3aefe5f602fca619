"""The override ends where nothing is rebuilt any more: the gradients are plain's, or an error says why not."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import leangrad
from leangrad.errors import ChangedError
from leangrad.ledger import Goal, Region
from leangrad.ledger.learn import early_end
from leangrad.ledger.learn.early_end import Border, Change, Ends, Exit
from leangrad.ledger.learn.recorded_step import RecordedStep
from leangrad.ledger.learn.trace import TraceMode
from leangrad.ledger.tune.goal import StepMode
from leangrad.ledger.tune.tuner import Tuner
from leangrad.policy.replay import Replay
from tests.support import assert_same_bits

STEPS = 5
Extra = Callable[["Net", Tensor], Any]


class Block(nn.Module):
    """What it saves is rebuilt from its product, and from a shift that plain does not keep."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.linear, self.drop = nn.LayerNorm(width), nn.Linear(width, width), nn.Dropout(0.3)
        self.shift = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.drop((F.gelu(self.linear(self.norm(x))) + self.shift).sin())


class Net(nn.Module):
    """A head, whose blocks are rebuilt, and a tail, whose blocks are kept."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.tail = nn.Sequential(Block(), Block()), nn.Sequential(*(Block() for _ in range(4)))
        self.step = 0
        self.between: Extra = lambda net, h: h
        self.inside: Extra = lambda net, h: h

    def forward(self, x: Tensor) -> Tensor:
        h = self.between(self, self.head(x))
        for block in self.tail[:2]:
            h = block(h)
        h = self.inside(self, h)
        for block in self.tail[2:]:
            h = block(h)
        return h


class KeepsTheTail(Tuner):
    """Instead of a course: every step keeps all but the first few of what was saved."""

    def __init__(self, rebuilds: int) -> None:
        super().__init__(Goal(budget=2**60))
        self._rebuilds = rebuilds

    def start(self, step: RecordedStep, replay: Replay, kept: frozenset[int] | None, outputs_nbytes: int) -> None:
        rebuilt = {n for n, item in enumerate(step.items[: self._rebuilds]) if not item.is_fixed}
        assert rebuilt
        self.kept = frozenset(range(len(step.items))) - rebuilt

    def next_step_mode(self) -> StepMode:
        return StepMode(self.kept)


def lean(net: nn.Module, rebuilds: int = 6) -> nn.Module:
    made = leangrad.lean(net, budget=2**60, min_bytes=0)
    ledger = leangrad.ledger_of(made)
    ledger._tuner, ledger.products = KeepsTheTail(rebuilds), 0
    return made


@pytest.fixture(autouse=True)
def always_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_end, "WORTH", 1)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often an override was taken away, counted in its one element."""
    count, end = [0], TraceMode.end_early

    def counted(self: TraceMode) -> None:
        had_ended = self.has_ended
        end(self)
        count[0] += self.has_ended and not had_ended

    monkeypatch.setattr(TraceMode, "end_early", counted)
    return count


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def gradients(net: nn.Module, x: Tensor, seed: int = 0) -> list[Tensor | None]:
    net.zero_grad()
    torch.manual_seed(seed)
    net(x).square().sum().backward()
    return [p.grad for p in net.parameters()]


def compare(net: nn.Module, x: Tensor, steps: int = STEPS, rebuilds: int = 6) -> nn.Module:
    """Plain and lean for some steps, bit for bit. Returns the lean one."""
    plain, made = copy.deepcopy(net), lean(net, rebuilds)
    for step in range(steps):
        for one in (plain, made):
            if isinstance(one, Net):
                one.step = step
        for a, b in zip(gradients(plain, x, step), gradients(made, x, step), strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert_same_bits(a, b, f"step {step}")
    return made


def border(net: nn.Module) -> Border | None:
    trace = leangrad.ledger_of(net).trace
    return None if trace is None else trace.border


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    yield
    assert torch.overrides._get_current_function_mode_stack() == []


def test_no_override_in_the_tail(x: Tensor, ends: list[int]) -> None:
    seen: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *_: seen.append(name) if torch.overrides._get_current_function_mode() is not None else None

    net = Net()
    for name, module in net.named_modules():
        if isinstance(module, Block):
            module.register_forward_pre_hook(note(name))
    made = compare(net, x)
    assert ends[0] == STEPS - 1
    assert leangrad.ledger_of(made).differences == 0
    blocks = ["head.0", "head.1", *(f"tail.{n}" for n in range(4))]
    assert [name for name in seen if name.startswith("tail")].count("tail.3") == 1  # of the recorded step
    assert seen.count("head.1") == STEPS
    assert set(seen) == set(blocks)
    assert any(entry.outcome == "rebuilt" for entry in leangrad.ledger_of(made).entries(planned=True))
    assert all(not module._forward_hooks for module in made.modules() if not leangrad.is_lean(module))


def test_where_all_is_rebuilt_it_stays(x: Tensor, ends: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_end, "WORTH", 4)
    compare(Net(), x, rebuilds=99)
    assert ends[0] == 0


def test_without_a_goal_it_stays(x: Tensor, ends: list[int]) -> None:
    made = leangrad.lean(Net(), min_bytes=0)
    for step in range(STEPS):
        gradients(made, x, step)
    assert ends[0] == 0


# ------------------------------------------------------------------------------------------------- changes in the tail


def remember(net: Net, h: Tensor) -> Tensor:
    net.__dict__["kept"] = h
    return h


def test_a_recorded_change_of_what_the_head_made(x: Tensor, ends: list[int]) -> None:
    """The override stays until then, and what recipes read moves away before it."""

    class Skips(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.head[0](x)
            skip = self.head[1].linear(h)
            other = self.tail[0](skip.sigmoid())
            other = self.tail[1](other)
            skip += other
            return self.tail[3](self.tail[2](skip.sigmoid()))

    made = compare(Skips(), x, rebuilds=8)
    assert ends[0] == STEPS - 1
    found = border(made)
    assert found is not None
    assert found.module.startswith("tail.2")


def test_a_change_of_what_the_tail_made_itself(x: Tensor, ends: list[int]) -> None:
    net = Net()
    net.inside = lambda net, h: (h * 2).add_(1).relu_()
    found = border(compare(net, x))
    assert ends[0] == STEPS - 1
    assert found is not None
    assert found.module.startswith(("head", "tail.0"))


def changes_a_parameter(net: Net, h: Tensor) -> Tensor:
    with torch.no_grad():
        net.head[0].shift.add_(1)
    return h


def test_a_parameter_that_the_head_has_read(x: Tensor, ends: list[int]) -> None:
    net = Net()
    net.inside = changes_a_parameter
    found = border(compare(net, x))
    assert found is not None
    assert found.module.startswith("tail.2")
    assert ends[0] == STEPS - 1


def test_a_change_that_the_recorded_step_did_not_make(x: Tensor, ends: list[int]) -> None:
    """It moves a version, and backward says so."""
    net = Net()
    net.inside = lambda net, h: changes_a_parameter(net, h) if net.step == 3 else h
    with pytest.raises(ChangedError, match="a parameter or input"):
        compare(net, x)
    assert ends[0] == 3
    net.step = 0
    gradients(net, x)  # and goes on


def test_after_such_a_change_it_is_watched_to_the_end(x: Tensor, ends: list[int]) -> None:
    """A running average that begins after a while: one error, and from then on plain's gradients."""
    net = Net()
    net.inside = lambda net, h: changes_a_parameter(net, h) if net.step >= 3 else h
    plain, made = copy.deepcopy(net), lean(net, 6)
    errors = []
    for step in range(3 * STEPS):
        plain.step = made.step = step  # type: ignore[assignment]
        expected = gradients(plain, x, step)
        try:
            found = gradients(made, x, step)
        except ChangedError:
            errors.append(step)
            continue
        for a, b in zip(expected, found, strict=True):
            assert_same_bits(a, b, f"step {step}")
    assert errors == [3]
    assert ends[0] == 3  # and never again


def writes_in_a_hook(module: nn.Module, args: Any, output: Any) -> None:
    """Of a net that stands among the globals; no version tells."""
    if HOOKED[0] is not None and module is HOOKED[0].tail[3]:
        HOOKED[0].head[0].shift.data.add_(1)


HOOKED: list[Net | None] = [None]


def compare_hooked(plain: nn.Module, made: nn.Module, x: Tensor) -> None:
    """Steps in which each of the two is the net that hooks write to."""
    for step in range(STEPS):
        found = []
        for one in (plain, made):
            HOOKED[0] = one  # type: ignore[call-overload]
            found.append(gradients(one, x, step))
        for a, b in zip(*found, strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("is_global", [False, True])
def test_a_hook_that_came_later(x: Tensor, ends: list[int], is_global: bool) -> None:
    net = Net()
    plain, made = copy.deepcopy(net), lean(net, 6)
    for step in range(STEPS):
        for a, b in zip(gradients(plain, x, step), gradients(made, x, step), strict=True):
            assert_same_bits(a, b)
    assert (before := ends[0]) > 0
    register = nn.modules.module.register_module_forward_hook
    handles = [register(writes_in_a_hook)] if is_global else []
    try:
        for one in (plain, made):
            if not is_global:
                handles.append(one.tail[3].register_forward_hook(writes_in_a_hook))  # type: ignore[union-attr, index]
        compare_hooked(plain, made, x)
    finally:
        HOOKED[0] = None
        for handle in handles:
            handle.remove()
    assert ends[0] == before


def does_nothing(module: nn.Module, args: Any, output: Any) -> None:
    """A hook of the recorded step."""


def another_hook(net: Net) -> None:
    """In the place of the one that the recorded step had."""
    net.hook.remove()  # type: ignore[attr-defined]
    net.tail[3].register_forward_hook(writes_in_a_hook)


def another_forward(net: Net) -> None:
    last, forward = net.tail[3], net.tail[3].forward

    def writes(x: Tensor) -> Tensor:
        net.head[0].shift.data.add_(1)  # type: ignore[union-attr]
        return forward(x)  # type: ignore[no-any-return]

    last.forward = writes


def another_function(net: Net) -> None:
    def writes(net: Net, h: Tensor) -> Tensor:
        net.head[0].shift.data.add_(1)  # type: ignore[union-attr]
        return h

    net.inside = writes


class WritingBlock(Block):
    """Knows whose head it writes to."""

    net: list[Net]

    def forward(self, x: Tensor) -> Tensor:
        self.net[0].head[0].shift.data.add_(1)  # type: ignore[union-attr]
        return super().forward(x)


def another_module(net: Net) -> None:
    last = WritingBlock()
    last.load_state_dict(net.tail[3].state_dict())
    last.net = [net]
    net.tail[3] = last


def a_function_where_there_was_none(net: Net) -> None:
    net.tail[3].drop.after = lambda h: writes_in_a_hook(net.tail[3], (), h)


def one_more_in_a_list(net: Net) -> None:
    net.tail[3].drop.all_after.append(lambda h: writes_in_a_hook(net.tail[3], (), h))


class Watched(nn.Dropout):
    """Calls what stands in its attributes, if anything does."""

    def __init__(self) -> None:
        super().__init__(0.3)
        self.after: Callable[[Tensor], None] | None = None
        self.all_after: list[Callable[[Tensor], None]] = []

    def forward(self, x: Tensor) -> Tensor:
        for function in [*self.all_after, self.after]:
            if function is not None:
                function(x)
        return super().forward(x)


CHANGES = [another_hook, another_forward, another_function, another_module]


@pytest.mark.parametrize("change", [*CHANGES, a_function_where_there_was_none, one_more_in_a_list])
def test_code_that_takes_the_place_of_other_code(x: Tensor, ends: list[int], change: Callable[[Net], None]) -> None:
    """It writes where no version tells; the recorded step had as many hooks and modules."""
    net = Net()
    net.tail[3].drop = Watched()
    plain, made = copy.deepcopy(net), lean(net, 6)
    for one in (plain, made):
        one.hook = one.tail[3].register_forward_hook(does_nothing)  # type: ignore[index]
    for step in range(STEPS):
        for a, b in zip(gradients(plain, x, step), gradients(made, x, step), strict=True):
            assert_same_bits(a, b)
    assert (before := ends[0]) > 0
    for one in (plain, made):
        change(one)  # type: ignore[arg-type]
    try:
        compare_hooked(plain, made, x)
    finally:
        HOOKED[0] = None
    assert ends[0] == before


@pytest.mark.parametrize("what", ["a flat buffer", "a buffer"])
def test_parameters_whose_memory_lies_elsewhere_too(x: Tensor, ends: list[int], what: str) -> None:
    """The other tensor has a version counter of its own: a change through it would not be found out."""

    class Flat(Net):
        def __init__(self) -> None:
            super().__init__()
            parameters = [*self.parameters()] if what == "a flat buffer" else [self.head[0].shift]
            self.flat, at = torch.cat([p.data.flatten() for p in parameters]), 0
            for p in parameters:
                p.data = self.flat[at : at + p.numel()].view(p.shape)
                at += p.numel()
            self.inside = lambda net, h: net.changes(h)  # type: ignore[attr-defined]

        def changes(self, h: Tensor) -> Tensor:
            if self.step >= 3:
                with torch.no_grad():
                    self.flat.mul_(1.5)
            return h

    plain, made = Flat(), lean(Flat(), 6)
    for step in range(STEPS):
        plain.step = made.step = step  # type: ignore[assignment]
        for a, b in zip(gradients(plain, x, step), gradients(made, x, step), strict=True):
            assert_same_bits(a, b, f"step {step}")
    assert ends[0] == 0


def test_a_module_that_trains_from_some_step_on(x: Tensor, ends: list[int]) -> None:
    """Batch norm writes its statistics in training only."""
    net = Net()
    net.tail[3].norm.eval()
    made = lean(net, 6)
    for step in range(STEPS):
        gradients(made, x, step)
    assert (before := ends[0]) > 0
    made.tail[3].norm.train()  # type: ignore[union-attr, index]
    for step in range(STEPS):
        gradients(made, x, step)
    assert ends[0] == before


def test_a_model_that_is_copied_in_its_forward(x: Tensor, ends: list[int]) -> None:
    copies: list[nn.Module] = []
    net = Net()

    def copied(net: Net, h: Tensor) -> Tensor:
        copies.append(copy.deepcopy(net.tail))
        return h

    net.inside = copied
    compare(net, x)
    hooks = [hook for made in copies for module in made.modules() for hook in module._forward_hooks.values()]
    assert {type(hook) for hook in hooks} <= {early_end.InertHook}
    copies[-1](x).sum().backward()  # and they run


def writes_data(net: Net, h: Tensor) -> Tensor:
    net.head[0].shift.data.add_(1)
    return h


def writes_data_once(net: Net, h: Tensor) -> Tensor:
    return writes_data(net, h) if net.step == 3 else h


@pytest.mark.parametrize("writes", [writes_data, writes_data_once])
def test_a_write_that_moves_no_version(x: Tensor, ends: list[int], writes: Extra) -> None:
    """Code that may make one is watched to the end, whether or not the recorded step came by."""
    net = Net()
    net.inside = writes
    compare(net, x)
    assert ends[0] == 0


def test_running_statistics_and_counters_do_not_hold_it(x: Tensor, ends: list[int]) -> None:
    net = Net()
    net.norm = nn.BatchNorm1d(8)
    net.inside = lambda net, h: net.norm(h)
    made = compare(net, x)
    assert ends[0] == STEPS - 1
    assert made.norm.num_batches_tracked == STEPS


# --------------------------------------------------------------------------------------------- ways of forward to go on


def test_a_module_that_runs_twice(x: Tensor, ends: list[int]) -> None:
    class Twice(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.head[1](self.head[0](x))
            return self.head[1](self.head[0](h)) + self.tail(h)

    for rebuilds in range(2, 20, 3):
        compare(Twice(), x, rebuilds=rebuilds)
    assert ends[0] > 3 * STEPS


def test_the_turn_counts_the_runs_of_a_module() -> None:
    exits = [Exit("a", 2), Exit("b", 4), Exit("a", 6), Exit("a", 8)]
    assert Ends(exits, [], range(40)).border(4) == Border("a", 1)
    assert Ends(exits, [], range(40)).border(6) == Border("a", 2)
    assert Ends(exits, [], range(40)).border(8) is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([], "a"),
        ([Change(1, -1)], "a"),  # before
        ([Change(3, 30)], "a"),  # of what the third call has made itself
        ([Change(3, 15)], "b"),  # of what the second one has
        ([Change(3, -1)], "b"),
        ([Change(3, 15), Change(5, 35)], "c"),  # and then of what lies before that one
        ([Change(5, -1)], "c"),
        ([Change(9, -1)], None),
    ],
)
def test_the_border_comes_after_changes_of_what_was_made_before(changes: list[Change], expected: str | None) -> None:
    exits = [Exit("a", 2), Exit("b", 4), Exit("c", 6)]
    found = Ends(exits, changes, range(0, 100, 10)).border(1)
    assert (None if found is None else found.module) == expected


def test_an_end_that_is_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_end, "WORTH", 4)
    assert Ends([Exit("a", 5)], [], range(9)).border(3) == Border("a", 0)
    assert Ends([Exit("a", 6)], [], range(9)).border(3) is None


def test_a_step_that_goes_another_way(x: Tensor, ends: list[int]) -> None:
    """In the tail it is plain's; in the head it leads off the trace, and the override stays."""
    net = Net()
    net.inside = lambda net, h: h.exp().cumsum(0).tanh() if net.step == 2 else h
    made = compare(net, x)
    assert leangrad.ledger_of(made).differences == 0
    assert ends[0] == STEPS - 1
    net = Net()
    net.between = lambda net, h: h
    net.head[0].register_forward_hook(lambda m, a, out: out.exp().cumsum(0).tanh() if net.step == 2 else None)
    compare(net, x, steps=2 * STEPS)
    assert ends[0] > 0


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("at", [None, 0, 3])
def test_a_checkpoint_in_the_tail(x: Tensor, ends: list[int], use_reentrant: bool, at: int | None) -> None:
    """In every step, in the recorded one alone, or in a later one alone."""

    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.tail[:2](self.head(x))
            if at is None or self.step == at:
                h = checkpoint(self.tail[2], h, use_reentrant=use_reentrant)
            else:
                h = self.tail[2](h)
            return self.tail[3](h) + self.tail[1](h)

    compare(Checkpointed(), x, steps=2 * STEPS)
    assert ends[0] > 0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["between", "inside"])
@pytest.mark.sampled(2)
def test_an_exception(x: Tensor, ends: list[int], error: type[BaseException], where: str) -> None:
    def fails(net: Net, h: Tensor) -> Tensor:
        if net.step == -1:
            raise error
        return h

    net = Net()
    setattr(net, where, fails)
    made = compare(net, x)
    made.step = -1
    for _ in range(2):
        with pytest.raises(error):
            made(x)
        gc.collect()
        assert torch.overrides._get_current_function_mode_stack() == []
        assert all(not module._forward_hooks for module in made.modules() if module is not made)
    made.step = 0
    plain = leangrad.plain(copy.deepcopy(made))
    for a, b in zip(gradients(plain, x), gradients(made, x), strict=True):
        assert_same_bits(a, b)


def test_a_lean_module_in_the_tail(x: Tensor, ends: list[int]) -> None:
    """The region is open to the end of forward: none begins inside it."""
    net = Net()
    leangrad.lean(net.tail[2], min_bytes=0)
    entered: list[Any] = []
    compare(net, x)
    assert ends[0] == STEPS - 1
    assert leangrad.ledger_of(net.tail[2]).entries() == entered


def test_backward_inside_the_tail(x: Tensor, ends: list[int]) -> None:
    def penalty(net: Net, h: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(h.square().sum(), h.grad_fn.next_functions and net.kept, create_graph=True)
        return h + slope.mean()

    net = Net()
    net.between, net.inside = remember, penalty
    compare(net, x)


class Silent(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_under_a_mode_of_others_it_stays(x: Tensor, ends: list[int]) -> None:
    class Watched(Net):
        def forward(self, x: Tensor) -> Tensor:
            with Silent():
                h = self.tail[:2](self.head(x))
            return self.tail[2:](h)

    compare(Watched(), x)
    assert ends[0] == 0

    class InTheTail(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.tail[:2](self.head(x))
            with Silent():
                return self.tail[2:](h)

    compare(InTheTail(), x)
    assert ends[0] == STEPS - 1


def test_two_threads(x: Tensor, ends: list[int]) -> None:
    plain, made = Net().eval(), lean(Net().eval())
    expected = torch.autograd.grad(plain(x).square().sum(), list(plain.parameters()))
    gradients(made, x)
    failures: list[BaseException] = []

    def train() -> None:
        try:
            for _ in range(30):
                found = torch.autograd.grad(made(x).square().sum(), list(made.parameters()))
                for a, b in zip(expected, found, strict=True):
                    assert_same_bits(a, b)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=train) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert ends[0] > 30
    assert all(not module._forward_hooks for module in made.modules() if module is not made)


def test_a_model_that_was_changed(x: Tensor, ends: list[int]) -> None:
    made = compare(Net(), x)
    found = border(made)
    assert found is not None
    path, _, name = found.module.rpartition(".")
    setattr(made.get_submodule(path), name, nn.Identity())
    plain = leangrad.plain(copy.deepcopy(made))
    for a, b in zip(gradients(plain, x), gradients(made, x), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_same_bits(a, b)


def test_the_region_dies_with_its_graph(x: Tensor, monkeypatch: pytest.MonkeyPatch, ends: list[int]) -> None:
    regions: list[weakref.ref[Region]] = []
    enter = Region.__enter__

    def noted(self: Region) -> Region:
        regions.append(weakref.ref(self))
        return enter(self)

    made = compare(Net(), x)
    monkeypatch.setattr(Region, "__enter__", noted)
    gc.disable()
    try:
        made(x)
        assert [region() for region in regions] == [None]
    finally:
        gc.enable()
    assert ends[0] == STEPS


def test_compiled_parts_and_replicas_are_watched_to_the_end(x: Tensor, ends: list[int]) -> None:
    net = Net()
    net.tail[3]._compiled_call_impl = net.tail[3]._call_impl
    made = lean(net)
    for _ in range(3):
        gradients(made, x)
    assert ends[0] == 0
    made = lean(Net())
    made._is_replica = True
    for _ in range(3):
        made(x).sum().backward()
    assert ends[0] == 0
