"""The parts of the frontier: repeated modules, copies that share tensors, failures, and the meter."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import leangrad
from leangrad.errors import BudgetError
from leangrad.frontier.copies import Copies
from leangrad.frontier.failure import is_out_of_memory, sentence_of
from leangrad.frontier.meter import CudaMeter, Reading, bytes_on, meter_for
from leangrad.frontier.repeated import checkpoint_each, describe_repeated, repeated_modules
from leangrad.lean import is_lean
from tests.support import same_bits
from tests.support.small_models import Block, ConvNet, stack

# Repeated modules


class Listed(nn.Module):
    """Blocks in a list inside a part, as in transformers; the head is there once."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Module()
        self.body.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = Block()


class Raw(nn.Module):
    """A block without parts, with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


class Shared(nn.Module):
    """One block under two names, and another."""

    def __init__(self) -> None:
        super().__init__()
        self.a = self.b = Block()
        self.c = Block()


def leaves() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.GELU())


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (stack(3), ["1", "2", "3"]),
        (ConvNet(), ["stage1.0", "stage1.1", "stage2.0", "stage2.1"]),
        (Listed(), ["body.layers.0", "body.layers.1", "body.layers.2"]),
        (nn.Sequential(leaves(), leaves()), ["0", "1"]),
        (nn.ModuleList([Raw(), Raw()]), ["0", "1"]),
        (Shared(), ["a", "c"]),
        (nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)), []),
        (nn.Sequential(Block()), []),
        (nn.Linear(2, 2), []),
        (nn.Sequential(nn.Sequential(nn.GELU(), nn.ReLU()), nn.Sequential(nn.GELU(), nn.ReLU())), []),
    ],
)
def test_outermost_repeated_modules(model: nn.Module, names: list[str]) -> None:
    assert list(repeated_modules(model)) == names


def test_repeated_modules_in_words() -> None:
    assert describe_repeated(repeated_modules(stack(3))) == "3 × Block, from 1 on"


def test_checkpoints_keep_less_and_give_the_same_gradients() -> None:
    model, x = stack(), torch.randn(64, 16)
    other = copy.deepcopy(model)
    checkpoint_each(repeated_modules(other))
    kept = []
    for one in (model, other):
        torch.manual_seed(1)
        kept.append(leangrad.measure(lambda one=one: one(x).square().mean().backward(), timed_runs=0).kept_bytes)
    assert kept[1] < 0.4 * kept[0]
    assert all(same_bits(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters(), strict=True))


# Copies


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(4))
        self.head.weight.mark = "seen"  # type: ignore[attr-defined]


@pytest.mark.parametrize("own_values", [False, True])
def test_copies_share_their_tensors_and_stay_tied(own_values: bool) -> None:
    model = Tied()
    copies = Copies(model, own_values=own_values)
    one, other = copies.new(), copies.new()
    assert one is not other
    assert one.embed is not other.embed
    assert one.embed.weight is other.head.weight is copies.first.embed.weight is not model.embed.weight
    assert one.scale is other.scale
    assert one.scale.data_ptr() != model.scale.data_ptr()
    assert (one.embed.weight.data_ptr() == model.embed.weight.data_ptr()) == (not own_values)
    assert one.embed.weight.requires_grad
    assert one.embed.weight.grad is None
    one.embed.weight.grad = torch.ones(4, 4)
    assert model.embed.weight.grad is None
    copies.clear_gradients()
    assert other.embed.weight.grad is None


def test_an_alias_has_the_attributes_of_its_parameter() -> None:
    assert Copies(Tied(), own_values=False).first.embed.weight.mark == "seen"


def test_copies_of_a_lean_model_are_plain() -> None:
    model = leangrad.lean(nn.Sequential(leangrad.lean(nn.Linear(2, 2)), nn.GELU()))
    copies = Copies(model, own_values=False)
    assert not any(is_lean(module) for module in copies.new().modules())
    assert is_lean(model)
    assert is_lean(model[0])


def test_a_model_that_cannot_be_copied_is_told() -> None:
    model = nn.Linear(2, 2)
    model.numbers = (n for n in ())  # a generator
    with pytest.raises(TypeError, match=r"deepcopy can copy, got Linear, which it cannot: TypeError.*before it is wr"):
        Copies(model, own_values=False)


# Failures


@pytest.mark.parametrize(
    ("error", "out_of_memory", "sentence"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), True, "ran out of memory"),
        (MemoryError(), True, "ran out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True, "ran out of memory"),
        (RuntimeError("shapes differ\nmore"), False, "failed with RuntimeError: shapes differ"),
        (BudgetError("the budget is too small\nfor it", 7), False, "refused: the budget is too small"),
        (KeyError(), False, "failed with KeyError"),
    ],
)
def test_failures_in_a_sentence(error: Exception, out_of_memory: bool, sentence: str) -> None:
    assert is_out_of_memory(error) == out_of_memory
    assert sentence_of(error) == sentence


# The meter


def test_the_meter_of_a_cpu_is_measure() -> None:
    x = torch.ones(8, 8, requires_grad=True)
    meter = meter_for(nn.Linear(2, 2), x)
    reading = meter.read(lambda at_backward: x.exp().sum().backward())
    expected = leangrad.measure(lambda: x.exp().sum().backward(), timed_runs=0)
    assert (reading.peak_bytes, reading.kept_bytes) == (expected.peak_bytes, expected.kept_bytes)
    assert meter.budget_for(5) == meter.peak_at(5) == 5
    assert meter.capacity() is None


def test_bytes_count_a_storage_once_and_in_blocks() -> None:
    model = Tied()
    batch = [model.scale, torch.ones(256)]
    assert bytes_on(torch.device("cpu"), model, batch) == 512 + 512 + 1024
    assert bytes_on(torch.device("meta"), model, batch) == 0


def test_the_meter_of_a_gpu_counts_the_rest_of_the_device_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """With numbers in the place of a GPU: 10,000 bytes of others, the model and its batch, and a step."""
    model, x = Tied(), torch.ones(256)
    own = 512 + 512 + 1024
    now, peak = [10_000 + own], [0]

    def allocate(nbytes: int) -> None:
        now[0] += nbytes
        peak[0] = max(peak[0], now[0])

    def step(at_backward: Callable[[], object]) -> None:
        allocate(3000)
        at_backward()
        allocate(700)
        allocate(-3700)

    def reset(device: torch.device) -> None:
        peak[0] = now[0]

    for name, function in {
        "memory_allocated": lambda device: now[0],
        "max_memory_allocated": lambda device: peak[0],
        "memory_reserved": lambda device: 20_000,
        "mem_get_info": lambda device: (5000, 50_000),
        "reset_peak_memory_stats": reset,
        "synchronize": lambda device: None,
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    meter = CudaMeter(torch.device("cpu"), model, x)
    assert meter.read(step) == Reading(own + 3700, 3000)
    assert meter.budget_for(own + 3700) == 10_000 + own + 3700
    assert meter.peak_at(meter.budget_for(77)) == 77
    assert meter.capacity() == 25_000 - 10_000
    allocate(400)  # something that an earlier way holds on to
    meter.count_off(400)
    assert meter.read(step) == Reading(own + 3700, 3000)
    assert meter.standing_bytes() == 10_000 + own + 400
    meter.release()


@pytest.mark.gpu
def test_the_peak_on_a_gpu_is_that_of_the_model_alone() -> None:
    def peak(others: int) -> tuple[int, int]:
        ballast = torch.empty(others, dtype=torch.uint8, device="cuda")
        model, x = stack(4, 64).cuda(), torch.randn(512, 64, device="cuda")
        meter = meter_for(model, x)
        readings = []
        for _ in range(3):
            model.zero_grad()
            readings.append(meter.read(lambda at_backward: _train(model, x, at_backward)))
        seen = torch.cuda.max_memory_allocated()
        assert meter.budget_for(readings[-1].peak_bytes) == seen
        assert meter.peak_at(seen) == readings[-1].peak_bytes
        del ballast
        return readings[-1].peak_bytes, readings[-1].kept_bytes

    peak(0)  # what cuBLAS and others keep is there now
    assert peak(0) == peak(1 << 24)


def _train(model: nn.Module, x: torch.Tensor, at_backward: object) -> None:
    loss = model(x).square().mean()
    at_backward()  # type: ignore[operator]
    loss.backward()
