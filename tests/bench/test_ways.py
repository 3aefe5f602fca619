"""Each way on a small model: it trains it, it is what it says, and it says so where it is none for the model."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from leangrad.bench import peers
from leangrad.bench.peers import NotForThisError
from leangrad.bench.ways import WAYS, Given, find
from leangrad.frontier.copies import Copies
from leangrad.frontier.meter import meter_for
from leangrad.frontier.training import Setup, Training
from leangrad.lean import is_lean
from leangrad.verify.comparison import Outcome, differences, largest
from leangrad.verify.memory import Memory
from leangrad.verify.subject import Subject
from tests.support.small_models import stack

CPU = torch.device("cpu")


class Images(nn.Module):
    """Two blocks of a convolution, batch norm and an activation."""

    def __init__(self, activation: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(self.block(activation) for _ in range(2)))

    @staticmethod
    def block(activation: type[nn.Module]) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), activation())

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class Words(nn.Module):
    """A language model with a head that is alone of its kind."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = stack(2, 16), nn.Linear(16, 2048)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.body(x)), targets)


def given(model: nn.Module, **named: Any) -> Given:
    return Given(model, CPU, **named)


def at_work(name: str, model: nn.Module, batch: Any, **named: Any) -> tuple[Training, tuple[Outcome, Outcome]]:
    """A way on a copy of the model, settled and read; and the outcomes of its first and its last step."""
    subject = Subject.of(model, batch, None, None, caller="bench")
    setup = Setup(subject, Copies(model, own_values=False), None, meter_for(model, batch))
    training = Training(WAYS[name].way(given(model, **named)), setup)
    torch.manual_seed(1)
    outcomes = training.warm_up(Memory(training.subject.model, batch), lambda: None)
    training.read()
    return training, outcomes


def apart(plain: Outcome, other: Outcome) -> float:
    return largest(one for one in differences(plain, other) if "gradient" in one.kind or one.kind == "loss")


def test_names_are_unique_and_plain_is_first() -> None:
    assert next(iter(WAYS)) == "plain"
    assert all(choice.name == name and choice.line for name, choice in WAYS.items())
    assert [choice.name for choice in find(["lean", "plain", "lean"])] == ["plain", "lean"]
    with pytest.raises(ValueError, match="no way called 'leen'; there are plain, checkpoint"):
        find(["plain", "leen"])


@pytest.mark.parametrize("name", ["checkpoint", "selective", "lean", "lean_budget", "packed"])
def test_gradients_are_plains_and_the_peak_is_as_it_should_be(name: str) -> None:
    model, batch = stack(4, 32), torch.randn(64, 32)
    plain, (expected, _) = at_work("plain", model, batch)
    assert plain.reading is not None
    budget = plain.reading.peak_bytes * 8 // 10
    training, outcomes = at_work(name, model, batch, budget=budget, told=budget)
    assert training.reading is not None
    assert [apart(expected, one) for one in outcomes] == [0.0, 0.0]
    assert not [one for one in differences(expected, outcomes[1]) if "gradient" in one.kind]
    if name == "packed":
        assert training.reading.kept_bytes == plain.reading.kept_bytes
    else:
        assert training.reading.kept_bytes < plain.reading.kept_bytes
        assert training.reading.peak_bytes < plain.reading.peak_bytes
    if name == "lean_budget":
        assert training.reading.peak_bytes <= budget
    assert is_lean(training.subject.model) == name.startswith("lean")


def test_a_selective_checkpoint_keeps_more_than_a_whole_one() -> None:
    """Products are kept, so that they are not run again."""
    model, batch = stack(4, 32), torch.randn(64, 32)
    kept = [at_work(name, model, batch)[0].reading for name in ("checkpoint", "selective", "plain")]
    assert kept[0].kept_bytes < kept[1].kept_bytes < kept[2].kept_bytes  # type: ignore[union-attr]


def test_converted_norms_keep_less() -> None:
    model, batch = Images(), torch.randn(2, 4, 16, 16)
    plain, (expected, _) = at_work("plain", model, batch)
    training, outcomes = at_work("convert_abn", model, batch)
    assert training.reading.kept_bytes < plain.reading.kept_bytes  # type: ignore[union-attr]
    assert all(apart(expected, one) < 1e-4 for one in outcomes)


def test_without_logits_less_is_kept() -> None:
    model, batch = Words(), (torch.randn(64, 16), torch.arange(64))
    lean, _ = at_work("lean", model, batch)
    training, outcomes = at_work("no_logits", model, batch)
    _, (expected, _) = at_work("plain", model, batch)
    assert training.reading.kept_bytes < lean.reading.kept_bytes - 4 * 32 * 2048  # type: ignore[union-attr]
    assert all(apart(expected, one) < 1e-4 for one in outcomes)


@pytest.mark.parametrize(
    ("name", "model", "why"),
    [
        ("checkpoint", nn.Linear(2, 2), "found no repeated modules to put it around"),
        ("selective", nn.Linear(2, 2), "found no repeated modules"),
        ("save_on_cpu", nn.Linear(2, 2), "lies in the host's memory already"),
        ("lean_budget", nn.Linear(2, 2), "no budget was given"),
        ("no_logits", nn.Linear(2, 2), "no projection to a vocabulary"),
        ("convert_abn", nn.Linear(2, 2), "no batch norm with an activation"),
    ],
)
def test_a_way_that_is_not_for_this_model_says_why(name: str, model: nn.Module, why: str) -> None:
    def apply() -> None:
        made = WAYS[name].way(given(model))
        assert made.prepare is not None
        made.prepare(model)

    with pytest.raises(NotForThisError, match=why):
        apply()


@pytest.mark.parametrize("name", ["liger", "cce", "inplace_abn"])
def test_packages_of_others_are_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = WAYS[name].package
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(NotForThisError, match=f"{package} is not installed"):
        WAYS[name].way(given(nn.Linear(2, 2)))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(NotForThisError, match="need a GPU"):
        WAYS[name].way(given(nn.Linear(2, 2)))
    known = type("Model", (nn.Linear,), {"__module__": "transformers.models.any"})(2, 2)
    assert WAYS[name].way(Given(nn.Sequential(known), torch.device("cuda"))).prepare is not None
    if name != "inplace_abn":
        with pytest.raises(NotForThisError, match=f"{package} knows models of transformers only"):
            WAYS[name].way(Given(nn.Linear(2, 2), torch.device("cuda")))


# What other packages do, by stand-ins for them


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    for package in (name.partition(".")[0], name):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    for key, value in content.items():
        setattr(sys.modules[name], key, value)


class HfModel(nn.Linear):
    """What counts as a model of transformers."""


HfModel.__module__ = "transformers.models.llama.modeling_llama"


def test_language_models_are_found_inside_of_others_and_refusals_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[nn.Module] = []

    def patch(model: nn.Module) -> None:
        seen.append(model)
        model.forward = lambda x: x

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    stand_in(monkeypatch, "cut_cross_entropy.transformers", cce_patch=patch)
    stand_in(monkeypatch, "liger_kernel.transformers", _apply_liger_kernel_to_instance=lambda model: None)
    inner = HfModel(2, 2)
    with pytest.raises(NotForThisError, match="liger_kernel has changed nothing in HfModel"):
        peers.apply_liger(nn.Sequential(inner))
    peers.apply_cce(nn.Sequential(inner))
    assert seen == [inner]
    with pytest.raises(NotForThisError, match="cut_cross_entropy knows models of transformers only"):
        peers.apply_cce(nn.Sequential(nn.Linear(2, 2)))

    def refuse(model: nn.Module) -> None:
        raise RuntimeError("Unsupported model type")

    stand_in(monkeypatch, "cut_cross_entropy.transformers", cce_patch=refuse)
    with pytest.raises(NotForThisError, match="refuses HfModel: Unsupported model type"):
        peers.apply_cce(inner)


def test_cut_cross_entropy_without_a_patch_of_its_own_is_called_for_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in that computes the loss from logits: the same loss and gradients as the model's own."""

    def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, *, shift: bool) -> Tensor:
        assert shift
        return F.cross_entropy((hidden @ weight.T)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # of cut_cross_entropy.transformers
    stand_in(monkeypatch, "cut_cross_entropy", linear_cross_entropy=linear_cross_entropy)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    model = LlamaForCausalLM(config)
    words = torch.randint(64, (2, 8))
    model(input_ids=words, labels=words).loss.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    peers.apply_cce(nn.Sequential(model))
    model(input_ids=words, labels=words).loss.backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    other = HfModel(2, 2)
    other.get_output_embeddings = lambda: None
    with pytest.raises(NotForThisError, match="refuses HfModel: it is no causal language model"):
        peers.apply_cce(other)


def test_inplace_abn_takes_the_place_of_a_norm_and_its_leaky_relu(monkeypatch: pytest.MonkeyPatch) -> None:
    class InPlaceABN(nn.BatchNorm2d):
        def __init__(self, features: int, activation: str, activation_param: float, **named: Any) -> None:
            super().__init__(features, **named)
            self.slope = activation_param
            assert activation == "leaky_relu"

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.leaky_relu(super().forward(x), self.slope)

    stand_in(monkeypatch, "inplace_abn", InPlaceABN=InPlaceABN)
    with pytest.raises(NotForThisError, match="no batch norm here has one after it in a Sequential"):
        peers.apply_inplace_abn(Images(nn.ReLU))
    model, x = Images(nn.LeakyReLU), torch.randn(2, 4, 8, 8)
    names, expected = list(model.state_dict()), model(x)
    peers.apply_inplace_abn(model)
    assert sum(isinstance(one, InPlaceABN) for one in model.modules()) == 2
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model(x), expected)


def test_saving_on_the_host_goes_around_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU memory cannot be pinned: what is saved is seen here as it passes."""
    packed: list[torch.Size] = []
    real = torch.autograd.graph.saved_tensors_hooks
    monkeypatch.setattr(
        torch.autograd.graph,
        "save_on_cpu",
        lambda pin_memory: real(lambda x: (packed.append(x.shape), x)[1], lambda x: x) if pin_memory else None,
    )
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    peers.save_on_host(model)
    out = model(torch.randn(2, 4))
    assert packed
    out.sum().backward()
    assert model[0].weight.grad is not None


# Compiled


@pytest.mark.parametrize("name", ["compile", "compile_budget", "compile_leangrad"])
def test_compiled_ways_compile_the_model_with_their_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they ask torch for; that it compiles is what `tests/compiled` shows, and takes a minute."""
    from torch._functorch import config

    from leangrad.compiled import compile_lean

    seen: list[tuple[Any, ...]] = []

    def compile(self: nn.Module, *, backend: Any, dynamic: bool, options: Any) -> None:
        seen.append((backend, dynamic, options, config.activation_memory_budget))

    monkeypatch.setattr(nn.Module, "compile", compile)
    model = nn.Linear(2, 2)
    for draws_as_eager in (False, True):
        with WAYS[name].around():
            way = WAYS[name].way(given(model, draws_as_eager=draws_as_eager))
            assert way.prepare is not None
            way.prepare(model)
    backend = compile_lean if name == "compile_leangrad" else "inductor"
    budget = 0.5 if name == "compile_budget" else 1.0
    assert seen == [(backend, False, None, budget), (backend, False, {"fallback_random": True}, budget)]
    assert config.activation_memory_budget == 1.0
