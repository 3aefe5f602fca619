"""Random training loops: whatever is done to gradients in whatever order, packed ones are what plain ones are."""

import copy
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leangrad.errors import LeangradError
from leangrad.nn import MLP
from leangrad.packed import PackedGradients, pack_gradients

LOOPS, STEPS = 60, 25


class Model(nn.Module):
    """A tied table, layers that write and layers that do not, and a branch that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.norm = nn.LayerNorm(6)
        self.body = nn.Linear(6, 6)
        self.mlp = MLP([6, 5, 6], "tanh")
        self.branch = nn.Linear(6, 6, bias=False)

    def forward(self, tokens: Tensor, branch: bool) -> Tensor:
        h = self.body(self.norm(self.table(tokens))).tanh()
        h = h + self.mlp(h)
        return F.linear(h + self.branch(h) if branch else h, self.table.weight)


class Loop:
    """One training loop, plain and packed side by side."""

    def __init__(self, seed: int, device: str) -> None:
        torch.manual_seed(seed)
        self.random, self.device = random.Random(seed), device
        self.plain = Model().to(device, torch.float64)
        self.mine = copy.deepcopy(self.plain)
        self.packed: PackedGradients = pack_gradients(self.mine, range_bytes=self.random.choice([256, 512, None]))
        self.held: list[tuple[str, Tensor, Tensor]] = []

    def both(self, call: Callable[[nn.Module], object]) -> None:
        state = self.random.getstate()
        for model in (self.plain, self.mine):
            self.random.setstate(state)
            call(model)

    def name(self) -> str:
        return self.random.choice([name for name, _ in self.plain.named_parameters()])

    def loss(self, model: nn.Module) -> Tensor:
        generator = torch.Generator().manual_seed(self.random.randrange(10**6))
        tokens = torch.randint(7, (4,), generator=generator).to(self.device)
        y = model(tokens, self.random.random() < 0.5)
        return (y * torch.randn(y.shape, generator=generator, dtype=y.dtype).to(self.device)).sum()

    def backward(self) -> None:
        self.both(lambda model: self.loss(model).backward())

    def backward_twice(self) -> None:
        def twice(model: nn.Module) -> None:
            loss = self.loss(model)
            loss.backward(retain_graph=True)
            loss.backward()

        self.both(twice)

    def backward_to_one(self) -> None:
        name = self.name()

        def one(model: nn.Module) -> None:
            if name != "branch.weight" and model.get_parameter(name).requires_grad:  # that one may not be reached
                self.loss(model).backward(inputs=[model.get_parameter(name)])

        self.both(one)

    def ask_for_gradients(self) -> None:
        def ask(model: nn.Module) -> None:
            wanted = [p for p in model.body.parameters() if p.requires_grad]
            torch.autograd.grad(self.loss(model), [model.table.weight, *wanted])

        self.both(ask)

    def zero(self) -> None:
        set_to_none = self.random.random() < 0.7
        self.both(lambda model: model.zero_grad(set_to_none=set_to_none))

    def drop_one(self) -> None:
        name = self.name()
        self.both(lambda model: setattr(model.get_parameter(name), "grad", None))

    def replace_one(self) -> None:
        name = self.name()

        def replace(model: nn.Module) -> None:
            parameter = model.get_parameter(name)
            if parameter.grad is not None:
                parameter.grad = parameter.grad * 2

        self.both(replace)

    def hold_one(self) -> None:
        name = self.name()
        mine, plain = self.mine.get_parameter(name).grad, self.plain.get_parameter(name).grad
        # One that stands outside is moved into the buffer by the next pass: what is held is then no gradient any more.
        if mine is not None and plain is not None and mine._is_view():
            way = self.random.choice([lambda g: g, lambda g: g.detach(), lambda g: g.view(-1)])
            self.held.append((name, way(mine), way(plain)))

    def let_go(self) -> None:
        self.held.clear()

    def freeze_or_thaw(self) -> None:
        name = self.name()
        if name != "table.weight":  # so that every loss has a gradient
            parameter = self.plain.get_parameter(name)
            needs_grad = not parameter.requires_grad
            self.both(lambda model: model.get_parameter(name).requires_grad_(needs_grad))

    def clip(self) -> None:
        try:
            norm = self.packed.clip_norm_(2.0)
        except LeangradError as error:
            if not self.held or "still held" not in str(error):  # only an old gradient that is held may be in the way
                raise
            return
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(self.plain.parameters(), 2.0))

    def check(self) -> None:
        for (name, a), (_, b) in zip(self.mine.named_parameters(), self.plain.named_parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), name
            if a.grad is not None:
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
        for name, mine, plain in self.held:
            torch.testing.assert_close(mine, plain, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"held {n}: {m}")


WAYS = [Loop.backward] * 6 + [
    Loop.backward_twice, Loop.backward_to_one, Loop.ask_for_gradients, Loop.zero, Loop.zero, Loop.drop_one,
    Loop.replace_one, Loop.hold_one, Loop.let_go, Loop.freeze_or_thaw, Loop.clip,
]  # fmt: skip


@pytest.mark.parametrize("first_seed", range(0, LOOPS, 10))
@pytest.mark.sampled(3)
def test_random_loops(first_seed: int) -> None:
    run_loops(range(first_seed, first_seed + 10), "cpu")


@pytest.mark.gpu
def test_random_loops_on_a_gpu() -> None:
    run_loops(range(10), "cuda")


def run_loops(seeds: range, device: str) -> None:
    for seed in seeds:
        loop, steps = Loop(seed, device), []
        for _ in range(STEPS):
            way = loop.random.choice(WAYS)
            steps.append(way.__name__)
            try:
                way(loop)
                loop.check()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, after {', '.join(steps)}: {error}") from error
