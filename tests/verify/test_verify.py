"""`leangrad.verify`: what it must catch, what it must leave alone, and what it says about bad input."""

import contextlib
import importlib
import itertools
import math
import pickle
import random
from collections import Counter, UserDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from leangrad.ledger.observe.active_region import current
from leangrad.ledger.region import Region
from leangrad.verify import Verification, verify
from leangrad.verify.comparison import difference
from leangrad.verify.memory import Memory
from tests.support import same_bits

verify_module = importlib.import_module("leangrad.verify")

Lean = Callable[[Callable[[nn.Module], Any]], None]


@pytest.fixture
def lean(monkeypatch: pytest.MonkeyPatch) -> Lean:
    """Say which region the lean run is in; at first one that changes nothing."""

    def use(region: Callable[[nn.Module], Any]) -> None:
        monkeypatch.setattr(verify_module, "lean_region", lambda model: lambda: region(model))

    use(lambda model: contextlib.nullcontext())
    return use


def conv_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(16, 2))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def scaled(factor: float, only: Callable[[Tensor], bool] = lambda tensor: True) -> Callable[[nn.Module], Any]:
    """A wrong region: what autograd saves comes back scaled."""
    return lambda model: saved_tensors_hooks(lambda t: t.detach(), lambda t: t * factor if only(t) else t)


@pytest.mark.parametrize(("make", "shape"), [(conv_net, (2, 3, 4, 4)), (mlp, (3, 4))])
def test_the_same_is_equal(lean: Lean, make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    result = verify(make(), torch.randn(shape))
    assert result.equal
    assert result
    assert result.within_noise
    assert result.max_difference == 0
    assert result.noise == 0
    assert result.differences == ()
    assert [event.bytes for event in result.plain.timeline] == [event.bytes for event in result.lean.timeline]
    assert "equal, bit for bit" in str(result)


def test_a_small_error_in_what_is_saved_is_caught(lean: Lean) -> None:
    lean(scaled(1.001))
    result = verify(conv_net(), torch.randn(2, 3, 4, 4))
    assert not result.equal
    assert not result
    assert not result.within_noise
    assert result.noise == 0
    by_name = {entry.name: entry.max_difference for entry in result.differences}
    assert by_name["5.weight"] == pytest.approx(2e-3, rel=1e-2)  # its input, and the output that is squared
    assert result.max_difference == max(by_name.values())
    assert "0.weight" in by_name
    assert {entry.kind for entry in result.differences} == {"gradient"}
    assert "MORE than plain differs from itself" in str(result)
    assert "gradient 5.weight" in str(result)


def test_only_what_differs_is_named(lean: Lean) -> None:
    lean(scaled(1.001, only=lambda t: t.shape == (3, 4)))  # the batch, which only the first weight's gradient needs
    result = verify(mlp(), torch.randn(3, 4))
    assert [(entry.kind, entry.name) for entry in result.differences] == [("gradient", "0.weight")]
    assert result.max_difference == pytest.approx(1e-3, rel=1e-3)


def test_one_ulp_is_caught(lean: Lean) -> None:
    def nudge(t: Tensor) -> Tensor:
        return torch.nextafter(t, torch.full_like(t, torch.inf)) if t.shape == (3, 4) else t

    lean(lambda model: saved_tensors_hooks(lambda t: t.detach(), nudge))
    result = verify(mlp(), torch.randn(3, 4))
    assert not result.equal
    assert 0 < result.max_difference < 1e-6


@pytest.mark.parametrize("wrong_run", [1, 2, 3])
def test_every_lean_run_is_compared(lean: Lean, wrong_run: int) -> None:
    runs = itertools.count(1)
    right, wrong = scaled(1.0), scaled(1.5)
    lean(lambda model: wrong(model) if next(runs) == wrong_run else right(model))
    assert not verify(mlp(), torch.randn(3, 4)).equal


def test_a_draw_too_many_is_caught(lean: Lean) -> None:
    def draw(t: Tensor) -> Tensor:
        torch.rand(1)
        return t

    lean(lambda model: saved_tensors_hooks(lambda t: t.detach(), draw))
    result = verify(mlp(), torch.randn(3, 4))
    assert [(entry.kind, entry.name) for entry in result.differences] == [("random state", "cpu")]


def test_a_changed_buffer_is_caught(lean: Lean) -> None:
    @contextlib.contextmanager
    def region(model: nn.Module) -> Iterator[None]:
        yield
        model[1].num_batches_tracked += 1

    lean(region)
    result = verify(conv_net(), torch.randn(2, 3, 4, 4))
    assert [(entry.kind, entry.name) for entry in result.differences] == [("buffer", "1.num_batches_tracked")]
    assert result.max_difference == torch.inf


def test_a_missing_gradient_is_caught(lean: Lean) -> None:
    @contextlib.contextmanager
    def region(model: nn.Module) -> Iterator[None]:
        model[0].requires_grad_(False)
        yield

    lean(region)
    model = mlp()
    result = verify(model, torch.randn(3, 4))
    assert {entry.name for entry in result.differences} == {"0.weight", "0.bias"}
    assert result.max_difference == torch.inf
    assert model[0].weight.requires_grad


def test_a_changed_loss_and_input_gradient_are_caught(lean: Lean) -> None:
    @contextlib.contextmanager
    def region(model: nn.Module) -> Iterator[None]:
        with torch.no_grad():
            model[2].bias.mul_(2)
        yield

    lean(region)
    result = verify(mlp(), torch.randn(3, 4, requires_grad=True))
    assert {entry.kind for entry in result.differences} == {"loss", "gradient", "input gradient"}


def test_inputs_are_named_by_their_place(lean: Lean) -> None:
    class Sum(nn.Linear):
        def forward(self, first: Tensor, pair: Any, *, scale: Tensor) -> Tensor:
            return super().forward((first + pair[0] * pair[1]["b"]) * scale)

    lean(scaled(1.5))
    x, b, scale = (torch.randn(2, 3, requires_grad=True) for _ in range(3))
    by_name = verify(Sum(3, 2), {"first": x, "pair": (torch.ones(2, 3), {"b": b}), "scale": scale})
    named = {entry.name for entry in by_name.differences if entry.kind == "input gradient"}
    assert named == {"first", "pair.1.b", "scale"}


def test_nan_equals_nan(lean: Lean) -> None:
    model = mlp()
    with torch.no_grad():
        model[2].weight[0] = torch.nan
    assert verify(model, torch.randn(3, 4)).equal
    lean(scaled(1.001))
    assert not verify(model, torch.randn(3, 4)).equal


def test_noise_of_plain_is_told(lean: Lean) -> None:
    class Unsteady(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 2)
            self.calls = itertools.count()  # of a class that is not put back

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + 1e-3 * (next(self.calls) % 2))

    result = verify(Unsteady(), torch.randn(3, 4))
    assert not result.equal
    assert 1e-3 < result.noise < 3e-3
    assert result.max_difference == pytest.approx(result.noise)
    lean(scaled(2.0))
    assert not verify(Unsteady(), torch.randn(3, 4)).within_noise


def test_memory_is_measured_on_both(lean: Lean) -> None:
    class Exp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(100))

        def forward(self, x: Tensor) -> Tensor:
            return ((self.weight * x).exp()).sum()

    x = torch.randn(100)

    @contextlib.contextmanager
    def region(model: Any) -> Iterator[None]:
        kept = model.weight.detach(), x

        def pack(t: Tensor) -> Tensor | None:
            return None if t.grad_fn is not None else t

        with saved_tensors_hooks(pack, lambda t: (kept[0] * kept[1]).exp() if t is None else t):
            yield

    lean(region)
    result = verify(Exp(), x)
    assert result.equal
    assert result.plain.kept_bytes == 400 + 4  # exp's output, and the loss
    assert result.lean.kept_bytes == 4
    assert "0.01" in str(result)


class Stateful(nn.Module):
    """Changes everything that a forward can change."""

    def __init__(self, fail_in_run: int = 0) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 2)
        self.register_buffer("average", torch.zeros(2))
        self.steps = 0
        self.log: list[Any] = ["begin"]
        self.cache: dict[str, Any] = {"sizes": {1, 2}}
        self.counts = Counter("aab")
        self.generator = torch.Generator().manual_seed(5)
        self.note = torch.zeros(3)
        self._tries = itertools.count(1)
        self._fail_in_run = fail_in_run

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.log.append(self.steps)
        self.cache["sizes"].add(len(self.cache))
        self.cache["new"] = x
        self.counts["a"] += 1
        self.late = torch.ones(2)
        self.note[0] += 1
        self.average = self.average + 1
        self.norm.train(not self.norm.training)
        self.norm.train(not self.norm.training)
        x.mul_(0.5)
        noise = torch.rand(2, generator=self.generator) + torch.rand(2) + random.random()
        y = self.linear(self.norm(x)) * noise * self.steps
        self.linear.eval()
        if next(self._tries) == self._fail_in_run:
            raise ZeroDivisionError("from forward")
        return y


def state(model: Stateful, x: Tensor) -> dict[str, Any]:
    return {
        "tensors": {name: t.clone() for name, t in model.state_dict().items()},
        "identity": {name: id(t) for name, t in [*model.named_parameters(), *model.named_buffers()]},
        "grad": {
            name: (id(p.grad), None if p.grad is None else p.grad.clone()) for name, p in model.named_parameters()
        },
        "python": (model.steps, list(model.log), set(model.cache["sizes"]), sorted(model.cache), dict(model.counts)),
        "late": hasattr(model, "late"),
        "note": model.note.clone(),
        "generator": model.generator.get_state(),
        "training": [m.training for m in model.modules()],
        "x": (x.clone(), x.grad),
        "random": (torch.get_rng_state(), random.getstate()),
    }


def assert_same(before: Any, after: Any) -> None:
    if isinstance(before, Tensor):
        assert same_bits(before, after)
    elif isinstance(before, dict):
        assert before.keys() == after.keys()
        for key in before:
            assert_same(before[key], after[key])
    elif isinstance(before, tuple | list):
        assert len(before) == len(after)
        for a, b in zip(before, after, strict=True):
            assert_same(a, b)
    else:
        assert before == after


@pytest.mark.parametrize("fail_in_run", range(7))
def test_nothing_is_left_changed(lean: Lean, fail_in_run: int) -> None:
    model, x = Stateful(fail_in_run), torch.randn(3, 4)
    model.linear.weight.grad = torch.randn(2, 4)
    before = state(model, x)
    if fail_in_run:
        with pytest.raises(ZeroDivisionError, match="from forward") as caught:
            verify(model, x)
        run = "the plain run" if fail_in_run <= 3 else "the lean run"
        assert any(run in note for note in caught.value.__notes__)
    else:
        assert verify(model, x).equal  # so every run began with the same counter, cache and generators
    assert_same(before, state(model, x))


def test_an_error_in_backward_leaves_nothing_changed(lean: Lean) -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ZeroDivisionError("from backward")

    model, x = Stateful(), torch.randn(3, 4)
    before = state(model, x)
    with pytest.raises(ZeroDivisionError, match="from backward"):
        verify(model, x, loss=lambda out: Failing.apply(out).sum())
    assert_same(before, state(model, x))


def test_gradients_and_graphs_of_the_caller_are_left_alone(lean: Lean) -> None:
    model, root = mlp(), torch.randn(3, 4, requires_grad=True)
    leaf = torch.randn(3, 4, requires_grad=True)
    leaf.grad = kept = torch.randn(3, 4)
    kept_values = kept.clone()
    pending = model(leaf).square().sum()
    assert verify(model, leaf).equal
    assert verify(model, root * 2).equal
    assert leaf.grad is kept
    assert same_bits(kept, kept_values)
    assert root.grad is None
    assert all(parameter.grad is None for parameter in model.parameters())
    pending.backward()  # no parameter was written to, so the older graph is still good


def test_verify_runs_under_no_grad_and_twice(lean: Lean) -> None:
    model, x = mlp(), torch.randn(3, 4)
    with torch.no_grad():
        assert verify(model, x).equal
    first, second = verify(model, x), verify(model, x)
    assert first.plain.peak_bytes == second.plain.peak_bytes


def test_every_form_of_batch(lean: Lean) -> None:
    class Two(nn.Linear):
        def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
            return super().forward(x) * scale

    Pair = namedtuple("Pair", ["x", "scale"])
    model, x, scale = Two(4, 2), torch.randn(3, 4), torch.randn(2)
    for batch in (x, (x,), [x, scale], {"x": x, "scale": scale}, UserDict(x=x), Pair(x, scale)):
        assert verify(model, batch).equal


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


def gradient_of(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("form", ["scalar", "attribute", "mapping", "attribute None", "squares", "given"])
def test_every_form_of_loss(lean: Lean, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    weights = torch.randn(3, 2)

    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            loss = (y * weights).sum()
            return {
                "scalar": loss,
                "attribute": Output(y, loss),
                "mapping": {"loss": loss, "logits": y},
                "attribute None": Output(y),
                "squares": (y, [y.double() * 3, torch.arange(3)], None),
                "given": y,
            }[form]

    model, x = Model(4, 2), torch.randn(3, 4)
    y = F.linear(x, model.weight, model.bias)
    squares = y.square().mean()
    expected = {"attribute None": squares, "squares": squares + (y * 3).square().mean()}.get(form, (y * weights).sum())
    seen: list[list[Tensor]] = []
    collect = verify_module.collect

    def spy(model: nn.Module, inputs: Any, loss: Tensor) -> Any:
        seen.append([parameter.grad.clone() for parameter in model.parameters()])
        return collect(model, inputs, loss)

    monkeypatch.setattr(verify_module, "collect", spy)
    assert verify(model, x, loss=(lambda out: (out * weights).sum()) if form == "given" else None).equal
    assert len(seen) == 6
    for grads in seen:
        torch.testing.assert_close(grads, gradient_of(model, expected) if grads is seen[-1] else seen[-1])


def test_autocast(lean: Lean) -> None:
    seen: set[torch.dtype] = set()

    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            seen.add(y.dtype)
            return y

    model, x = Model(4, 2), torch.randn(3, 4)
    assert verify(model, x, autocast=torch.bfloat16).equal
    assert seen == {torch.bfloat16}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert verify(model, x).equal


def test_frozen_and_unused_parameters(lean: Lean) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    model.unused = nn.Parameter(torch.ones(3))
    assert verify(model, torch.randn(3, 4), loss=lambda out: out.sum()).equal


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": mlp}, TypeError, "expected model to be a torch.nn.Module, got function"),
        ({"model": nn.ReLU()}, ValueError, r"ReLU with none; unfreeze .* model.requires_grad_\(True\)"),
        ({"model": mlp().requires_grad_(False)}, ValueError, "unfreeze what is to be trained"),
        ({"model": nn.LazyLinear(3)}, ValueError, "call the model once"),
        ({"batch": "text"}, TypeError, "expected batch to be a tensor, .* got str"),
        ({"batch": {1: torch.ones(3, 4)}}, TypeError, r"expected batch .* got \{1: float32\[3, 4\]\}"),
        ({"loss": 3}, TypeError, "expected loss to be a function .* got int"),
        (
            {"loss": lambda out: out},
            ValueError,
            r"expected the loss to be a scalar, got float32\[3, 2\]; pass `loss=`",
        ),
        ({"loss": lambda out: 3.0}, TypeError, "expected the loss to be a scalar tensor, got float"),
        ({"loss": lambda out: out.detach().sum()}, ValueError, "requires no gradient"),
        ({"loss": lambda out: torch.ones((), requires_grad=True) * 2}, ValueError, "nothing to compare"),
        ({"autocast": True}, TypeError, "expected autocast to be a dtype such as torch.bfloat16, .* got bool"),
    ],
)
def test_bad_arguments(lean: Lean, change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"model": mlp(), "batch": torch.randn(3, 4), "loss": None, "autocast": None} | change
    random_state = torch.get_rng_state()
    with pytest.raises(error, match=message):
        verify(arguments.pop("model"), arguments.pop("batch"), **arguments)
    assert same_bits(random_state, torch.get_rng_state())


def test_inference_mode_is_refused(lean: Lean) -> None:
    with torch.inference_mode(), pytest.raises(ValueError, match="leave it first"):
        verify(mlp(), torch.randn(3, 4))


def test_an_output_without_tensors_asks_for_a_loss(lean: Lean) -> None:
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return {"text": "none", "ids": torch.arange(3)}

    with pytest.raises(ValueError, match=r"got \{text: str, ids: int64\[3\]\}; pass `loss=`"):
        verify(Model(4, 2), torch.randn(3, 4))


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        (torch.zeros(3, 5), r"float32[3, 5]"),
        ((torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64)), "(float32[3, 4], int64[2])"),
        ({"tokens": torch.zeros(3, 4)}, "{tokens: float32[3, 4]}"),
    ],
)
def test_a_batch_that_does_not_fit_is_named(lean: Lean, batch: Any, named: str) -> None:
    with pytest.raises((RuntimeError, TypeError)) as caught:
        verify(mlp(), batch)
    assert f"leangrad.verify called Sequential with the batch {named}" in caught.value.__notes__


def huge_complex(other: float) -> Tensor:
    """Of which the size of one element is beyond float64."""
    return torch.tensor([1.5e308 + 1.5e308j, other], dtype=torch.complex128)


@pytest.mark.parametrize(
    ("plain", "lean_value", "expected"),
    [
        (torch.tensor([1.0, 4.0]), torch.tensor([1.0, 5.0]), 0.25),
        (torch.tensor(2.0), torch.tensor(2.0), None),
        (torch.tensor([0.0]), torch.tensor([-0.0]), 0.0),
        (torch.tensor([0.0]), torch.tensor([1e-30]), torch.inf),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, -torch.nan]), None),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0]), torch.inf),
        (torch.tensor([1.0, torch.inf]), torch.tensor([1.0, torch.inf]), None),
        (torch.tensor([1.0, torch.inf]), torch.tensor([1.5, torch.inf]), 0.5),
        (torch.tensor([1.0, torch.inf]), torch.tensor([1.0, -torch.inf]), torch.inf),
        (torch.tensor([2.0], dtype=torch.bfloat16), torch.tensor([3.0], dtype=torch.bfloat16), 0.5),
        (torch.tensor([2 + 0j]), torch.tensor([2 + 1j]), 0.5),
        (torch.tensor([3]), torch.tensor([4]), torch.inf),
        (torch.tensor([True]), torch.tensor([True]), None),
        (torch.ones(2), torch.ones(3), torch.inf),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), torch.inf),
        (torch.ones(0), torch.ones(0), None),
        (None, None, None),
        (None, torch.ones(1), torch.inf),
        (torch.eye(3).to_sparse(), torch.eye(3).to_sparse(), None),
        (torch.eye(3), torch.eye(3).t(), None),
        (huge_complex(1), huge_complex(2), 1.0),
        (torch.tensor([1j, 0], dtype=torch.complex128)[::2], torch.tensor([2j], dtype=torch.complex128), 1.0),
    ],
)
def test_difference(plain: Tensor | None, lean_value: Tensor | None, expected: float | None) -> None:
    assert difference(plain, lean_value) == expected


@pytest.mark.parametrize("seed", range(20))
def test_difference_of_a_large_tensor_is_that_of_its_elements(seed: int) -> None:
    """NaN, infinities, zeros of both signs and equal elements, in some of the parts that are compared one by one."""
    generator = torch.Generator().manual_seed(seed)
    dtype = (torch.float32, torch.bfloat16, torch.float64, torch.complex64)[seed % 4]
    plain = torch.randn(3 * 2**16 + 5, generator=generator).to(dtype)
    lean_value = plain.clone()
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 7.0]).to(dtype)
    for _ in range(seed // 4):
        at, which, whose = (int(torch.randint(n, (), generator=generator)) for n in (len(plain), len(special), 3))
        for tensor in ((plain,), (lean_value,), (plain, lean_value))[whose]:
            tensor[at] = special[which]
    pairs = [(complex(a), complex(b)) for a, b in zip(plain.tolist(), lean_value.tolist(), strict=True) if a != b]
    apart = [abs(a - b) for a, b in pairs if a == a or b == b]
    sizes = [abs(a) for a in plain.tolist() if abs(a) < math.inf]
    expected = None if not apart else max(math.inf if d != d else d for d in apart) / max(sizes)
    found = difference(plain, lean_value)
    if expected is None:
        assert not found  # 0.0 where zeros have other signs
    else:
        assert found == pytest.approx(expected)


def test_memory_writes_only_what_changed() -> None:
    model = mlp()
    memory = Memory(model)
    versions = [parameter._version for parameter in model.parameters()]
    memory.restore()
    assert [parameter._version for parameter in model.parameters()] == versions
    model[0].weight.data = torch.zeros(1)
    value = model[2].weight.detach().clone()
    model[2].weight.data.add_(1)  # no version counter sees this
    memory.restore()
    assert model[0].weight.shape == (8, 4)
    assert same_bits(model[2].weight, value)


@pytest.mark.parametrize(("make", "shape"), [(conv_net, (2, 3, 4, 4)), (mlp, (3, 4))])
def test_the_real_lean_is_equal(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    assert verify(make(), torch.randn(shape)).equal


def test_a_lean_model_runs_plain_first_and_stays_lean() -> None:
    front = importlib.import_module("leangrad.lean")
    seen: list[bool] = []

    class Model(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(type(getattr(current, "region", None)) is Region)
            return super().forward(x)

    model = front.lean(Model(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
    assert verify(model, torch.randn(3, 4)).equal
    assert seen == [False] * 3 + [True] * 3
    assert front.is_lean(model)


@pytest.mark.gpu
def test_cuda_random_state_and_gradients(lean: Lean) -> None:
    model, x = conv_net().cuda(), torch.randn(2, 3, 4, 4, device="cuda")
    random_state = torch.cuda.get_rng_state()
    result = verify(model, x)
    assert isinstance(result, Verification)
    assert result.plain.device == "cuda:0"
    assert result.within_noise
    assert same_bits(random_state, torch.cuda.get_rng_state())
    lean(scaled(1.001, only=Tensor.is_floating_point))  # not the mask of a dropout
    assert not verify(model, x).within_noise


# Random states, noise, and other references


class Drawing(nn.Module):
    """Masks its input by numbers of NumPy's and Python's, as wav2vec2 does."""

    def __init__(self, generator: Any = None) -> None:
        super().__init__()
        self.linear, self.generator = nn.Linear(4, 4), generator

    def forward(self, x: Tensor) -> Tensor:
        draw = np.random.random_sample if self.generator is None else self.generator.random
        return self.linear(x * draw() * random.random())


@pytest.mark.parametrize(
    "make",
    [lambda: None, lambda: np.random.default_rng(0), lambda: np.random.RandomState(0), lambda: random.Random(0)],
    ids=["global", "Generator", "RandomState", "Random"],
)
def test_generators_of_numpy_and_python_are_put_back(make: Callable[[], Any]) -> None:
    model = Drawing(make())
    before = pickle.dumps((np.random.get_state(), random.getstate()))
    x = torch.randn(3, 4)
    result = verify(model, x)
    assert result.equal
    assert result.noise == 0
    assert result.conclusive
    assert pickle.dumps((np.random.get_state(), random.getstate())) == before
    assert verify(model, x).equal


def test_other_draws_from_numpy_are_a_difference(lean: Lean) -> None:
    def draws(model: nn.Module) -> Any:
        np.random.random_sample()
        return contextlib.nullcontext()

    lean(draws)
    result = verify(nn.Linear(4, 2), torch.randn(3, 4))
    assert [(entry.kind, entry.name) for entry in result.differences] == [("random state", "numpy")]


def test_large_noise_is_said_in_words_and_proves_nothing() -> None:
    outside = np.random.default_rng()

    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float(outside.random())

    result = verify(Noisy(4, 2), torch.randn(3, 4))
    assert result.noise > 0.01
    assert not result.conclusive
    assert not result.passed
    assert "plain is that far from itself by more than rounding, so this shows nothing" in str(result)


class Slightly(torch.autograd.Function):
    """Identity whose gradient is off by some rounding that differs from call to call."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Slightly.calls += 1
        return grad * (1 + 1e-6 * (Slightly.calls % 3))


def test_noise_of_rounding_is_conclusive() -> None:
    model = nn.Linear(4, 2)
    model.register_forward_hook(lambda m, a, out: Slightly.apply(out))
    result = verify(model, torch.randn(3, 4))
    assert 0 < result.noise < 1e-4
    assert result.conclusive
    assert "shows nothing" not in str(result)


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))


def test_against_offload_compares_with_plain_numbers(request: pytest.FixtureRequest) -> None:
    class Expanded(nn.Module):
        """Saves an expanded tensor, a transposed one, a conjugate and an empty one."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 1))

        def forward(self, x: Tensor) -> Tensor:
            y = (self.weight.expand(4, 5) * x).t().exp() @ x[:, :0].exp().sum(1, keepdim=True)
            z = torch.complex(self.weight, self.weight).conj() * 2j
            return y.sum() + (z * z).abs().sum()

    for model, x in ((block(), torch.randn(128, 64)), (Expanded(), torch.randn(4, 5))):
        result = verify(model, x, against="offload")
        assert result.equal
        assert result.passed
        assert result.plain is not None
        assert "offloaded" in str(result).splitlines()[0]
        assert "lean / plain" not in str(result)
    request.getfixturevalue("lean")(scaled(1.001))
    wrong = verify(mlp(), torch.randn(3, 4), against="offload")
    assert not wrong.passed
    assert "MORE than plain differs from itself" in str(wrong)


def test_against_itself_runs_no_plain_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, regions = block(), []
    entered = verify_module.no_regions
    monkeypatch.setattr(verify_module, "no_regions", lambda: regions.append(1) or entered())
    result = verify(model, torch.randn(128, 64), against="itself")
    assert not regions
    assert result.plain is None
    assert result.equal
    assert result.passed
    assert result.lean.peak_bytes >= result.lean.kept_bytes > 0
    assert "lean's own runs: the same, bit for bit; not compared with plain" in str(result)
    assert str(result).splitlines()[0].split() == ["lean"]


def test_against_itself_gradients_are_finite() -> None:
    result = verify(nn.Linear(2, 1), torch.ones(3, 2), lambda out: (out * 0).sqrt().sum(), against="itself")
    assert set(result.not_finite) == {"weight", "bias"}
    assert not result.passed
    assert "not finite in lean's gradients: weight, bias" in str(result)


def test_against_itself_sees_runs_that_differ(lean: Lean) -> None:
    factors = iter((1.0, 1.001, 1.0))
    lean(lambda model: scaled(next(factors))(model))
    result = verify(mlp(), torch.randn(3, 4), against="itself")
    assert not result.equal
    assert "lean's own runs: apart by up to" in str(result)


def test_against_is_checked() -> None:
    with pytest.raises(ValueError, match=r"expected against to be one of \('plain', 'offload', 'itself'\), got 'cpu'"):
        verify(nn.Linear(2, 2), torch.ones(1, 2), against="cpu")


@pytest.mark.gpu
def test_against_offload_takes_less_of_a_gpu_than_plain() -> None:
    model, x = nn.Sequential(*(block() for _ in range(4))).cuda(), torch.randn(4096, 64, device="cuda")
    plain, offload = verify(model, x), verify(model, x, against="offload")
    assert plain.equal
    assert offload.equal
    assert offload.plain.kept_bytes < 0.3 * plain.plain.kept_bytes
    assert offload.plain.peak_bytes < 0.5 * plain.plain.peak_bytes
