"""leangrad.exact: eager's own bits under torch.compile, with our cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from leangrad import floor
from leangrad.compiled import compile_lean
from leangrad.compiled.partitioner import chosen
from tests.support import assert_same_bits
from tests.support.compiling import DYNAMOS_OWN, prepared, skip_where_dynamo_is_wrong
from tests.support.processes import in_a_process
from tests.zoo import SMALL, Case, case

EXACT = {"leangrad.exact": True}
pytestmark = DYNAMOS_OWN


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    chosen.clear()


def run(one: Case, backend: object, **options: object) -> tuple[nn.Module, list[Tensor]]:
    """Two steps, loss included. Returns the model and its losses."""
    model, step, batch = prepared(one, backend, **options)
    losses = []
    for seed in range(2):
        torch.manual_seed(seed)
        loss = step(*batch)
        loss.backward()  # gradients accumulate
        losses.append(loss.detach())
    return model, losses


@pytest.mark.slow
@pytest.mark.parametrize("one", SMALL, ids=lambda one: one.name)
@pytest.mark.sampled(4)
def test_the_zoo_has_the_bits_of_eager(one: Case) -> None:
    skip_where_dynamo_is_wrong(one)
    ours, losses = run(one, compile_lean, options=EXACT)
    plain, expected = run(one, None)
    for mine, other in zip(losses, expected, strict=True):
        assert_same_bits(mine, other)
    for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert_same_bits(p.grad, q.grad, name)
    for (name, p), q in zip(ours.named_buffers(), plain.buffers(), strict=True):
        assert_same_bits(p, q, name)
    assert chosen


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(nn.functional.dropout(layer(x), 0.3))
        return x


def test_of_dropout_only_the_mask_is_kept() -> None:
    """Beside each product's result: 4 bytes and 1 for each element, not 4, 4 and 1."""
    models = Dropped(), Dropped()
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(64, 32)
    for model in models:
        run = torch.compile(model, backend=compile_lean, options=EXACT) if model is models[0] else model
        torch.manual_seed(1)
        run(x).sum().backward()
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert_same_bits(p.grad, q.grad)
    assert [one.choice.outcome.kept_bytes for one in chosen] == [3 * 64 * 32 * (4 + 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("p", [0.1, 0.15, 0.3, 0.85])
def test_dropout_rounds_as_eager(p: float, dtype: torch.dtype) -> None:
    """On a CPU eager multiplies by the rounded factor 1 / (1 - p), on a GPU by the mask and by the scale."""
    _dropout_rounds_as_eager(p, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("p", [0.1, 0.15, 0.3, 0.85])
def test_dropout_rounds_as_eager_on_a_gpu(p: float, dtype: torch.dtype) -> None:
    _dropout_rounds_as_eager(p, dtype, "cuda")


def _dropout_rounds_as_eager(p: float, dtype: torch.dtype, device: str) -> None:
    def step(x: Tensor) -> Tensor:
        return nn.functional.dropout(nn.functional.dropout(x.sin(), p).exp(), p).sin()

    x = torch.randn(500, 3, device=device).to(dtype).requires_grad_()
    given = torch.randn(500, 3, device=device).to(dtype)
    found = []
    for run in (step, torch.compile(step, backend=compile_lean, options=EXACT)):
        torch.manual_seed(1)
        result = run(x)
        found.append((result.detach(), *torch.autograd.grad(result, x, given)))
    for mine, other in zip(*found, strict=True):
        assert_same_bits(mine, other)


class Counter(nn.Module):
    """Its forward changes a buffer after what backward needs was made from it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("steps", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        z = y * (self.steps * 2).exp() * y
        self.steps.add_(1)
        return z


def test_a_buffer_that_forward_changes_is_not_read_again_in_backward() -> None:
    models = Counter(), Counter()
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(4, 8)
    for _ in range(2):
        for model in models:
            run = torch.compile(model, backend=compile_lean, options=EXACT) if model is models[0] else model
            run(x).sum().backward()
    assert_same_bits(models[0].linear.weight.grad, models[1].linear.weight.grad)
    assert_same_bits(models[0].steps, models[1].steps)


REFUSED = """
import torch
from leangrad.compiled import compile_lean
def step(x, b):
    y = x * b
    b.add_(1)
    return y.sum()
x = torch.ones(3, requires_grad=True)
for function in (step, torch.compile(step, backend=compile_lean, options={"leangrad.exact": True})):
    try:
        function(x, torch.ones(3)).backward()
    except RuntimeError as error:
        print("modified by an inplace operation" in str(error))
"""


def test_what_eager_refuses_is_refused() -> None:
    """In a process of its own: after a compile that raised, Dynamo evaluates the frames of the whole process."""
    assert in_a_process(REFUSED).split().count("True") == 2


def test_gpt_keeps_the_floor_and_its_masks() -> None:
    """The floor draws masks again from the generator's state; here they are kept, a byte for each element."""
    one = case("gpt")
    model, _ = run(one, compile_lean, options={**EXACT, "leangrad.slowdown": 2.0})
    least = floor(model, one.batch(), one.loss).bytes
    (kept,) = (found.choice.outcome.kept_bytes for found in chosen)
    assert least < kept < 1.12 * least
