"""A projection to a vocabulary and its cross entropy in a compiled graph: one op, and logits for who reads them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import leangrad
from leangrad._torch import compiler
from leangrad.compiled import backend, compile_lean, summary
from leangrad.compiled.partitioner import Partitioner, Settings, chosen
from leangrad.errors import ChangedError, LeangradError
from leangrad.loss.graph_op import LOSS_OP
from leangrad.loss.lazy import heads
from leangrad.loss.lazy.logits import LazyLogits
from tests.support import assert_same_bits
from tests.support.compiling import DYNAMOS_OWN
from tests.support.error_rule import assert_error_rule
from tests.support.language_losses import as_transformers, shifted, wide
from tests.support.processes import in_a_process

pytestmark = [pytest.mark.usefixtures("fresh_choice"), *DYNAMOS_OWN]
WORDS, WIDTH = 512, 16
PLAIN = {"leangrad.fused_loss": False}
SEEDS = 32  # gradients of the body have 16 elements: 8 draws of these tell errors apart by luck
Loss = Callable[[Tensor, Tensor], Any]


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each graph that is compiled from now on: how many fused losses it has."""
    found: list[int] = []

    def count(gm: Any) -> Any:
        lazy = fuse(gm)
        found.append(len(gm.graph.find_nodes(op="call_function", target=LOSS_OP)))
        return lazy

    fuse = backend.fuse_losses
    monkeypatch.setattr(backend, "fuse_losses", count)
    return found


@pytest.fixture
def op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is as with Inductor, but what it would compile is run with eager's kernels, which takes no seconds."""

    def compile_op_by_op(gm: Any, inputs: Any, patches: Any, of_backward: Any = None, watch: Any = None) -> Any:
        return compiler.compile_op_by_op(gm, inputs, patches["custom_partitioner_fn"])

    monkeypatch.setattr(compiler, "compile_by_inductor", compile_op_by_op)


class Language(nn.Module):
    """A language model whose loss is said by a function of its logits."""

    def __init__(self, loss: Loss, *, bias: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.linear = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=bias)
        self.added = nn.Parameter(torch.randn(WORDS))  # a bias outside of the head
        self.loss = loss
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Any:
        logits = self.head(self.norm(F.gelu(self.linear(self.embed(ids)))))
        return self.loss(logits, self.added, ids) if self.loss is with_bias else self.loss(logits, ids)  # type: ignore[call-arg]


def flat(logits: Tensor, ids: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(wide(logits.view(-1, WORDS)), ids.view(-1), **options)


def capped(logits: Tensor, ids: Tensor) -> Tensor:
    return flat(5.0 * torch.tanh(logits / 5.0), ids)


def scaled(logits: Tensor, ids: Tensor) -> Tensor:
    return flat(logits * 0.3, ids)


def of_batch_and_time(logits: Tensor, ids: Tensor) -> Tensor:
    batch, time, words = logits.shape
    return F.cross_entropy(wide(logits.reshape(batch * time, words)), ids.flatten(), label_smoothing=0.1)


def with_bias(logits: Tensor, bias: Tensor, ids: Tensor) -> Tensor:
    return flat(logits + bias, ids)


def transposed(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(wide(logits).transpose(1, 2), ids)


def weighted(logits: Tensor, ids: Tensor) -> Tensor:
    return flat(logits, ids, weight=torch.linspace(0.5, 1.5, WORDS, dtype=wide(logits).dtype))


def by_a_module(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.CrossEntropyLoss(ignore_index=3)(wide(logits).flatten(0, 1), ids.flatten())  # type: ignore[no-any-return]


def by_its_parts(logits: Tensor, ids: Tensor) -> Tensor:
    return F.nll_loss(torch.log_softmax(wide(logits).view(-1, WORDS), -1), ids.view(-1), ignore_index=3)


LOSSES = [
    shifted, as_transformers, capped, scaled, of_batch_and_time, with_bias, transposed, weighted, by_a_module,
    by_its_parts,
]  # fmt: skip


def words(*shape: int) -> Tensor:
    return torch.randint(WORDS, shape or (2, 24))


def results(model: nn.Module, run: Any, ids: Tensor) -> dict[str, Tensor]:
    """The loss and the gradients of all parameters."""
    model.zero_grad()
    loss = run(ids)
    (0.7 * loss).backward()
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Of float32, which is rounded in another order."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


# Loss and gradients


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.sampled(6)
def test_the_error_rule(loss: Loss, dtype: torch.dtype, fused: list[int]) -> None:
    model = Language(loss, bias=loss is not with_bias).to(dtype)
    run = torch.compile(model, backend=compile_lean)
    others = [copy.deepcopy(model), copy.deepcopy(model).double()]

    def draw() -> Iterator[tuple[str, Any]]:
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
        for other in others:
            other.load_state_dict(model.state_dict())
        ids = words()
        found = [results(model, run, ids), *(results(other, other, ids) for other in others)]
        for name in found[1]:
            yield name, tuple(one[name] for one in found)

    assert_error_rule(draw, seeds=SEEDS)
    assert fused == [1]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.sampled(4)
def test_with_inductors_own_code(tied: bool, autocast: bool, fused: list[int]) -> None:
    model = Language(shifted, bias=True, tied=tied)
    plain, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    run = torch.compile(model, backend=compile_lean)

    def cast(one: Any) -> Any:
        def call(ids: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return one(ids)  # type: ignore[no-any-return]

        return call

    def draw() -> Iterator[tuple[str, Any]]:
        ids = words()
        found = [results(model, cast(run), ids), results(plain, cast(plain), ids), results(exact, exact, ids)]
        assert all(one.dtype == torch.float32 for one in found[0].values())
        for name in found[1]:
            yield name, tuple(one[name] for one in found)

    assert_error_rule(draw, times=1.1 if autocast else 2.0)
    assert fused == [1]


@pytest.mark.usefixtures("op_by_op")
def test_autocast_inside_of_the_graph(fused: list[int]) -> None:
    """The projection is in half precision and the loss is not, as they were captured."""
    model = Language(shifted)

    def body(ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model.head(model.norm(model.embed(ids)))
        return shifted(logits, ids)

    ids = words()
    expected, found = results(model, body, ids), results(model, torch.compile(body, backend=compile_lean), ids)
    assert fused == [1]
    for name, value in expected.items():
        assert (found[name] - value).norm() <= 0.02 * value.norm(), name


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize("frozen", [("head.weight",), ("embed", "linear", "norm"), ("embed", "linear", "norm", "head")])
def test_only_gradients_that_are_needed_are_computed(frozen: tuple[str, ...], fused: list[int]) -> None:
    model = Language(with_bias)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    ids = words()
    expected = results(model, model, ids)
    assert_near(results(model, torch.compile(model, backend=compile_lean), ids), expected)
    assert fused == [1]
    assert set(expected) > {"loss"}


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ignored", [5, 1])
def test_ignored_tokens(ignored: int, reduction: str, fused: list[int]) -> None:
    """And nothing but these: the mean is NaN then, the sum is 0, and gradients are those of plain."""
    model = Language(lambda logits, ids: flat(logits, labels, reduction=reduction))
    ids = words()
    labels = ids.clone().view(-1)
    labels[::ignored] = -100
    expected = results(model, model, ids)
    found = results(model, torch.compile(model, backend=compile_lean), ids)
    assert fused == [1]
    torch.testing.assert_close(found.pop("loss"), expected.pop("loss"), equal_nan=True)
    assert_near(found, expected)


@pytest.mark.usefixtures("op_by_op")
def test_a_target_that_is_no_class_is_an_error() -> None:
    model = Language(lambda logits, ids: flat(logits, ids + WORDS))
    with pytest.raises(IndexError, match="out of bounds"):
        torch.compile(model, backend=compile_lean)(words())


@pytest.mark.usefixtures("op_by_op")
def test_gradients_accumulate(fused: list[int]) -> None:
    model = Language(shifted)
    run, batches = torch.compile(model, backend=compile_lean), [words() for _ in range(3)]
    grads = []
    for one in (model, run):
        model.zero_grad()
        for ids in batches:
            (one(ids) / 3).backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert_near(*grads)
    assert fused == [1]


@pytest.mark.usefixtures("op_by_op")
def test_packed_gradients() -> None:
    model = Language(shifted, tied=True)
    expected = results(model, model, ids := words())
    packed = leangrad.pack_gradients(model)
    assert_near(results(model, torch.compile(model, backend=compile_lean), ids), expected)
    assert packed.report().standing_bytes > 0


@pytest.mark.usefixtures("op_by_op")
def test_lengths_change_without_compiling_each_time(fused: list[int]) -> None:
    for loss in (shifted, of_batch_and_time, as_transformers):
        torch._dynamo.reset()
        fused.clear()
        model = Language(loss)
        run = torch.compile(model, backend=compile_lean)
        for shape in [(2, 24), (2, 31), (2, 17), (3, 40), (4, 18), (5, 33)]:
            ids = words(*shape)
            assert_near(results(model, run, ids), results(model, model, ids))
        assert 2 <= len(fused) <= 3  # as captured, then for any length, then for any batch
        assert set(fused) == {1}


@pytest.mark.usefixtures("op_by_op")
def test_the_function_itself_in_a_compiled_one(fused: list[int]) -> None:
    """It runs plain while it is traced, and is found like any other loss."""
    model = Language(shifted, bias=True)

    def step(ids: Tensor) -> Tensor:
        x = model.norm(model.embed(ids))
        return leangrad.linear_cross_entropy(x, model.head.weight, ids, linear_bias=model.head.bias, softcap=5.0)

    ids = words()
    assert_near(results(model, torch.compile(step, backend=compile_lean), ids), results(model, step, ids))
    assert fused == [1]


PROJECTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x @ W.T": lambda x, weight: x @ weight.T,
    "x.matmul(W.t())": lambda x, weight: x.matmul(weight.t()),
    "matmul(x, W.transpose(0, 1))": lambda x, weight: torch.matmul(x, weight.transpose(0, 1)),
    "a function": F.linear,
}


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize("project", PROJECTIONS)
def test_projections_without_a_module(project: str, fused: list[int]) -> None:
    """A tied weight that is multiplied by hand."""
    model = Language(returned)

    def step(ids: Tensor) -> tuple[Tensor, Tensor]:
        return returned(PROJECTIONS[project](model.norm(model.embed(ids)), model.embed.weight), ids)

    compiled, ids = torch.compile(step, backend=compile_lean), words()
    for use in USES.values():
        found = results(model, lambda ids, use=use: use(*compiled(ids)), ids)
        assert_near(found, results(model, lambda ids, use=use: use(*step(ids)), ids))
    assert fused == [1]


@pytest.mark.usefixtures("op_by_op")
def test_a_product_with_another_matrix(fused: list[int]) -> None:
    square = nn.Parameter(torch.randn(WORDS, WORDS))
    step = torch.compile(lambda x: F.cross_entropy(x @ square, ids.view(-1)), backend=compile_lean)
    ids = words()
    torch.testing.assert_close(
        step(torch.ones(48, WORDS)), F.cross_entropy(torch.ones(48, WORDS) @ square, ids.view(-1))
    )
    assert fused == [0]


@pytest.mark.usefixtures("op_by_op")
def test_two_heads_are_two_losses(fused: list[int]) -> None:
    model, other = Language(shifted), Language(capped)

    def both(ids: Tensor) -> Tensor:
        return model(ids) + 0.3 * other(ids)  # type: ignore[no-any-return]

    ids = words()
    modules = nn.ModuleList([model, other])
    assert_near(results(modules, torch.compile(both, backend=compile_lean), ids), results(modules, both, ids))
    assert fused == [2]


@torch._functorch.config.patch(donated_buffer=False)  # else torch itself refuses to retain the graph
def test_a_second_derivative_is_refused() -> None:
    run = torch.compile(model := Language(shifted), backend=compile_lean)
    (gradient,) = torch.autograd.grad(run(words()), model.head.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.sum().backward()


@pytest.mark.usefixtures("op_by_op")
@torch._functorch.config.patch(donated_buffer=False)  # else torch itself refuses to retain the graph
def test_a_graph_that_is_retained() -> None:
    model = Language(shifted)
    loss = torch.compile(model, backend=compile_lean)(words())
    first = torch.autograd.grad(loss, [model.head.weight, model.embed.weight], retain_graph=True)
    second = torch.autograd.grad(3 * loss, [model.head.weight, model.embed.weight])
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(3 * a, b)


# What is left plain


def small_vocabulary(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(logits, logits.new_ones(WIDTH, WORDS)).view(-1, WIDTH), ids.view(-1) % WIDTH)


def read_twice(log_probabilities: Tensor, ids: Tensor) -> Tensor:
    return F.nll_loss(log_probabilities, ids.view(-1)) + 0.1 * log_probabilities.exp().square().mean()


LEFT: dict[str, Loss] = {
    "a metric": lambda z, ids: flat(z, ids) + 0 * (z.argmax(-1) == ids).float().mean(),
    "another loss": lambda z, ids: flat(z, ids) + 0.1 * z.logsumexp(-1).square().mean(),
    "two losses": lambda z, ids: flat(z, ids) + 0.3 * shifted(z, ids),
    "no reduction": lambda z, ids: flat(z, ids, reduction="none").square().mean(),
    "probabilities": lambda z, ids: F.cross_entropy(z.view(-1, WORDS), F.one_hot(ids.view(-1), WORDS).float()),
    "some words": lambda z, ids: F.cross_entropy(z[..., :-1].reshape(-1, WORDS - 1), ids.view(-1) % (WORDS - 1)),
    "a log-softmax that is read": lambda z, ids: read_twice(z.view(-1, WORDS).log_softmax(-1), ids),
    "a log-softmax over rows": lambda z, ids: F.nll_loss(z.view(-1, WORDS).log_softmax(0), ids.view(-1)),
    "a softmax": lambda z, ids: F.nll_loss(z.view(-1, WORDS).softmax(-1), ids.view(-1)),
    "a tensor's scale": lambda z, ids: flat(z * z.detach().abs().max(), ids),
    "an inverse": lambda z, ids: flat(2.0 / (z + 30.0), ids),
    "in place": lambda z, ids: flat(z.mul_(0.5), ids),
    "a relu": lambda z, ids: flat(z.relu(), ids),
    "a small vocabulary": small_vocabulary,
    "a view returned": lambda z, ids: (flat(z, ids), z.view(-1)),
    "values returned": lambda z, ids: (flat(z, ids), z.exp()),
}


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize("name", LEFT)
@pytest.mark.sampled(3)
def test_what_is_left_as_it_is(name: str, fused: list[int]) -> None:
    def loss(logits: Tensor, ids: Tensor) -> Tensor:
        found = LEFT[name](logits, ids)
        return found[0] + 1e-3 * found[1].mean() if "returned" in name else found  # type: ignore[no-any-return]

    model = Language(loss)
    ids = words()
    assert_near(results(model, torch.compile(model, backend=compile_lean), ids), results(model, model, ids))
    assert fused == [0]


class Head(nn.Module):
    """A head and its loss, with something between."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.embed, self.head, self.between = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS), between
        self.added = nn.Parameter(torch.zeros(WORDS))
        self.head.weight.requires_grad_("written" not in between)  # its gradient would need what is written to

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids).sin()
        if self.between == "gradients are off":
            with torch.no_grad():
                logits = self.head(x)
            return flat(logits + self.added, ids)
        logits = self.head(x)
        if self.between == "its input is written to":
            x.mul_(0.5)
        if self.between == "a view of its input is written to":
            x.view(-1)[3:] = 0.1
        loss = flat(logits, ids)
        if self.between == "its input is written to later":
            x.mul_(0.5)
            return loss + x.mean(), logits
        return loss + x.mean()


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize(
    "between",
    [
        "gradients are off",
        "its input is written to",
        "a view of its input is written to",
        "its input is written to later",
    ],
)
def test_what_happens_between_projection_and_loss(between: str, fused: list[int]) -> None:
    torch.manual_seed(0)
    model, ids = Head(between), words()

    def run(one: Any) -> Any:
        def step(ids: Tensor) -> Tensor:
            found = one(ids)
            return found[0] + found[1].square().mean() if isinstance(found, tuple) else found

        return step

    class Copied(nn.Module):
        """What it computes, without a write: eager's backward refuses those."""

        def forward(self, ids: Tensor) -> Any:
            x = model.embed(ids).sin()
            if between == "gradients are off":
                return flat(model.head(x).detach() + model.added, ids)
            logits = model.head(x)
            y = (
                torch.cat([x.reshape(-1)[:3], torch.full_like(x.reshape(-1)[3:], 0.1)])
                if "view" in between
                else x * 0.5
            )
            return (flat(logits, ids) + y.mean(), logits) if "later" in between else flat(logits, ids) + y.mean()

    assert_near(
        results(model, run(torch.compile(model, backend=compile_lean)), ids), results(model, run(Copied()), ids)
    )
    assert fused == [0]


@pytest.mark.usefixtures("op_by_op")
def test_the_option_and_the_environment_turn_it_off(fused: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = Language(shifted), words()
    expected = results(model, model, ids)
    assert_near(results(model, torch.compile(model, backend=compile_lean, options=PLAIN), ids), expected)
    torch._dynamo.reset()
    monkeypatch.setenv("LEANGRAD_DISABLE", "1")
    assert_near(results(model, torch.compile(model, backend=compile_lean), ids), expected)
    assert fused == []


def test_exact_graphs_have_the_bits_of_eager(fused: list[int]) -> None:
    model, ids = Language(shifted, tied=True), words()
    run = torch.compile(model, backend=compile_lean, options={"leangrad.exact": True})
    found, expected = results(model, run, ids), results(model, model, ids)
    for name, value in expected.items():
        assert_same_bits(found[name], value, name)
    assert fused == []


def test_an_option_that_is_no_truth_value_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"leangrad\.fused_loss: expected True or False, got 1"):
        backend.read_options({"leangrad.fused_loss": 1})


# Logits


def returned(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return as_transformers(logits, ids), logits


def capped_and_returned(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    logits = 5.0 * torch.tanh(logits / 5.0)
    return as_transformers(logits, ids), logits


def both_returned(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = wide(logits)
    return as_transformers(logits * 0.5, ids), logits, logits


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "the loss": lambda loss, logits: loss,
    "logits": lambda loss, logits: logits.square().mean(),
    "both": lambda loss, logits: loss + logits.sin().mean(),
    "a loss of its own": lambda loss, logits: loss + F.cross_entropy(logits.view(-1, WORDS), words(48) * 0 + 3),
}


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("loss", [returned, capped_and_returned, both_returned])
@pytest.mark.parametrize("use", USES)
@pytest.mark.sampled(4)
def test_logits_that_are_returned(use: str, loss: Loss, bias: bool, fused: list[int]) -> None:
    model, ids = Language(loss, bias=bias), words()

    def run(one: Any) -> Any:
        return lambda ids: USES[use](*one(ids)[:2])

    compiled = torch.compile(model, backend=compile_lean)
    for _ in range(2):
        assert_near(results(model, run(compiled), ids), results(model, run(model), ids))
    found, expected = compiled(ids)[1], model(ids)[1]
    assert isinstance(found, LazyLogits)
    assert found.requires_grad
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    torch.testing.assert_close(found + 0, expected)
    assert fused == [1]


@pytest.mark.usefixtures("op_by_op")
def test_logits_that_are_returned_twice_are_one_memory(fused: list[int]) -> None:
    def loss(logits: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        rows = logits.view(-1, WORDS)
        return F.cross_entropy(rows, ids.view(-1)), rows, logits, rows

    model, ids = Language(loss), words()
    _, rows, logits, again = torch.compile(model, backend=compile_lean)(ids)
    assert fused == [1]
    assert rows is again
    with torch.no_grad():
        rows.zero_()
    with pytest.raises(LeangradError, match="written to"):
        logits.sum()


def test_logits_beside_side_outputs(fused: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The hidden states are a side output: a gradient that comes to them by way of logits runs the graph once more."""
    from leangrad.compiled import side_outputs

    monkeypatch.setattr(side_outputs, "LARGE", 0)
    model, ids = Language(returned, bias=True), words()
    compiled = torch.compile(model, backend=compile_lean)
    for use in ("the loss", "both", "logits", "the loss"):
        found = results(model, lambda ids, use=use: USES[use](*compiled(ids)), ids)
        assert_near(found, results(model, lambda ids, use=use: USES[use](*model(ids)), ids))
    assert set(fused) == {1}


@pytest.mark.usefixtures("op_by_op")
def test_when_logits_are_read() -> None:
    """After backward they are right, after a step they are an error: the weight is another."""
    model, ids = Language(returned), words()
    expected = model(ids)[1].detach().clone()
    compiled = torch.compile(model, backend=compile_lean)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss, logits = compiled(ids)
    loss.backward()
    torch.testing.assert_close(logits.detach() + 0, expected)
    assert_same_bits(logits.argmax(-1), expected.argmax(-1))
    loss, logits = compiled(ids)
    loss.backward()
    optimizer.step()
    with pytest.raises(ChangedError, match="fused_loss"):
        logits.argmax(-1)


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation(mode: Any, fused: list[int]) -> None:
    model, ids = Language(returned, bias=True).eval(), words()
    compiled = torch.compile(model, backend=compile_lean)
    with mode():
        loss, logits = compiled(ids)
        expected = model(ids)
        torch.testing.assert_close(loss, expected[0])
        torch.testing.assert_close(logits + 0, expected[1])
    assert not loss.requires_grad
    assert not logits.requires_grad
    assert fused == [1]


@pytest.mark.usefixtures("op_by_op")
def test_logits_under_autocast(fused: list[int]) -> None:
    model, ids = Language(returned), words()
    compiled = torch.compile(model, backend=compile_lean)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = model(ids)[1], compiled(ids)[1]
    assert found.dtype == torch.bfloat16
    assert_same_bits(found + 0, expected + 0)  # read outside of autocast
    assert fused == [1]


@pytest.mark.usefixtures("op_by_op")
def test_another_compiled_function_takes_the_logits() -> None:
    model, ids = Language(returned), words()
    compiled = torch.compile(model, backend=compile_lean)
    entropy = torch.compile(lambda z: (z.softmax(-1) * z.log_softmax(-1)).sum(-1).mean(), backend="eager")

    def run(one: Any) -> Any:
        def step(ids: Tensor) -> Tensor:
            loss, logits = one(ids)
            return loss + entropy(logits)  # type: ignore[no-any-return]

        return step

    assert_near(results(model, run(compiled), ids), results(model, run(model), ids))


@pytest.mark.usefixtures("op_by_op")
def test_a_graph_break_after_the_loss() -> None:
    """What follows is traced with the logits for an input."""

    def loss(logits: Tensor, ids: Tensor) -> Tensor:
        found = as_transformers(logits, ids)
        torch._dynamo.graph_break()
        return found + logits.square().mean()

    model, ids = Language(loss), words()
    assert_near(results(model, torch.compile(model, backend=compile_lean), ids), results(model, model, ids))


class Broken(Language):
    """Dynamo breaks its graph between the head and the loss."""

    def forward(self, ids: Tensor) -> Any:
        logits = self.head(self.norm(F.gelu(self.linear(self.embed(ids)))))
        torch._dynamo.graph_break()
        return self.loss(logits, ids)


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize("loss", [shifted, as_transformers, capped])
@pytest.mark.sampled(3)
def test_a_graph_break_before_the_loss(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits are lazy, and their loss is eager's."""
    asked: list[bool] = []
    monkeypatch.setattr(heads.Head, "asked", lambda self, for_loss: asked.append(for_loss))
    model, ids = Broken(loss, bias=True), words()
    run = torch.compile(model, backend=compile_lean)
    for _ in range(3):
        assert_near(results(model, run, ids), results(model, model, ids))
    assert asked == [True] * 3
    with torch.no_grad():
        torch.testing.assert_close(run(ids), model(ids))


@pytest.mark.usefixtures("op_by_op")
def test_a_graph_break_before_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits that no loss is computed of are computed at once after some steps."""
    calls: list[type] = []

    def note(logits: Tensor, ids: Tensor) -> Tensor:
        calls.append(type(logits))
        return logits.logsumexp(-1).mean() - logits.gather(-1, ids.unsqueeze(-1)).mean()

    model, ids = Broken(torch.compiler.disable(note)), words()
    run = torch.compile(model, backend=compile_lean)
    for _ in range(4):
        assert_near(results(model, run, ids), results(model, model, ids))
    assert calls == [LazyLogits, Tensor, LazyLogits, Tensor, Tensor, Tensor, Tensor, Tensor]


@pytest.mark.usefixtures("op_by_op")
def test_inside_of_a_checkpoint() -> None:
    for loss in (shifted, returned):
        model, ids = Language(loss), words()
        run = torch.compile(model, backend=compile_lean)

        def step(ids: Tensor, run: Any = run) -> Tensor:
            found = checkpoint(run, ids, use_reentrant=False)
            return found[0] + found[1].square().mean() if isinstance(found, tuple | list) else found

        def plain(ids: Tensor, model: nn.Module = model) -> Tensor:
            found = model(ids)
            return found[0] + found[1].square().mean() if isinstance(found, tuple) else found

        for _ in range(3):
            assert_near(results(model, step, ids), results(model, plain, ids))


@pytest.mark.usefixtures("op_by_op")
def test_a_weight_that_may_be_freed_is_read_at_once(monkeypatch: pytest.MonkeyPatch, fused: list[int]) -> None:
    from leangrad.compiled import lazy_outputs

    monkeypatch.setattr(lazy_outputs, "is_gathered", lambda parameter: True)
    model, ids = Language(returned), words()
    compiled = torch.compile(model, backend=compile_lean)
    assert type(compiled(ids)[1]) is Tensor
    for use in USES.values():
        found = results(model, lambda ids, use=use: use(*compiled(ids)), ids)
        assert_near(found, results(model, lambda ids, use=use: use(*model(ids)), ids))
    assert fused == [1]


@pytest.mark.usefixtures("op_by_op")
def test_a_head_alone(fused: list[int]) -> None:
    """The hidden states are an input of the graph, and have a gradient."""
    head, ids = nn.Linear(WIDTH, WORDS), words()
    grads = []
    for backend_ in ("eager", compile_lean):
        run = torch.compile(lambda x: returned(head(x), ids), backend=backend_)
        x = torch.ones(2, 24, WIDTH, requires_grad=True)
        loss, logits = run(x)
        grads.append(torch.autograd.grad(loss + logits.sin().mean(), [x, *head.parameters()]))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)
    assert fused == [1]


# Several processes


@pytest.mark.usefixtures("one_rank", "op_by_op")
def test_ddp_with_its_graph_splitting(monkeypatch: pytest.MonkeyPatch, fused: list[int]) -> None:
    monkeypatch.setattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 1024)  # else one bucket holds all
    ours, ids = Language(returned), words()
    plain = copy.deepcopy(ours)
    parallel = DistributedDataParallel(ours, bucket_cap_mb=0.01, find_unused_parameters=True)
    run = torch.compile(parallel, backend=compile_lean)
    for use in ("the loss", "both", "the loss"):
        found = results(ours, lambda ids, use=use: USES[use](*run(ids)), ids)
        assert_near(found, results(plain, lambda ids, use=use: USES[use](*plain(ids)), ids))
    assert len(fused) > 1  # it was split
    assert sum(fused) == 1


@pytest.mark.usefixtures("one_rank", "op_by_op")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # of a view that a linear layer returns
@pytest.mark.parametrize("is_apart", [False, True])
def test_fsdp2(is_apart: bool) -> None:
    mesh = init_device_mesh("cpu", (1,))
    ours, ids = Language(returned, bias=True), words()
    ours.added = None
    plain = copy.deepcopy(ours)
    if is_apart:
        fully_shard(ours.head, mesh=mesh, reshard_after_forward=True)
    fully_shard(ours, mesh=mesh)
    run = torch.compile(ours, backend=compile_lean)
    for use in ("the loss", "both", "the loss"):
        ours.zero_grad()
        loss, logits = run(ids)
        assert type(logits) is Tensor
        assert torch.isfinite(logits.detach()).all()  # its weight is gone by now, if it is apart
        (0.7 * USES[use](loss, logits)).backward()
        expected = results(plain, lambda ids, use=use: USES[use](*plain(ids)), ids)
        torch.testing.assert_close(USES[use](loss, logits).detach(), expected.pop("loss"), rtol=1e-4, atol=1e-6)
        assert_near({name: p.grad.full_tensor() for name, p in ours.named_parameters()}, expected)


@pytest.mark.usefixtures("one_rank", "op_by_op")
def test_another_model_of_the_process_is_sharded() -> None:
    """Its parameters are freed; those of this model are not, and its logits are put off as ever."""
    other = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)))
    other(torch.ones(1, 4)).sum().backward()
    model = Language(returned, bias=True)
    assert isinstance(torch.compile(model, backend=compile_lean)(words())[1], LazyLogits)


# Transformers


def tiny(name: str, **more: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "intermediate_size": 32, "head_dim": 8, "max_position_embeddings": 64,
        "n_embd": WIDTH, "n_layer": 1, "n_head": 2, "n_positions": 64, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "attn_implementation": "eager", "use_cache": False, "sliding_window": 8,
    }  # fmt: skip
    kind = getattr(transformers, name)
    config = kind.config_class(**sizes | more)
    torch.manual_seed(0)
    return kind(config).eval()  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize(
    "name",
    [
        "GPT2LMHeadModel",
        "LlamaForCausalLM",
        "BertForMaskedLM",
        "Gemma2ForCausalLM",
        "CohereForCausalLM",
        "Qwen3ForCausalLM",
    ],
)
@pytest.mark.sampled(3)
def test_models_of_transformers(name: str, fused: list[int]) -> None:
    more = {"final_logit_softcapping": 5.0} if name.startswith("Gemma2") else {}
    model = tiny(name, **more)
    ids = words()
    labels = ids.clone()
    labels[:, ::5] = -100
    if name == "GPT2LMHeadModel":
        model.loss_type = "ForCausalLM"  # else transformers logs a warning, at which Dynamo breaks the graph
    compiled = torch.compile(model, backend=compile_lean)
    for count in (None, 17):
        more = {} if count is None or "Bert" in name else {"num_items_in_batch": torch.tensor(count)}

        def loss(one: Any, ids: Tensor, more: dict[str, Any] = more) -> Tensor:
            return one(input_ids=ids, labels=labels, **more).loss  # type: ignore[no-any-return]

        found = results(model, lambda ids: loss(compiled, ids), ids)
        assert_near(found, results(model, lambda ids: loss(model, ids), ids))
    assert fused
    assert set(fused) == {1}
    one, other = compiled(input_ids=ids, labels=labels), model(input_ids=ids, labels=labels)
    one.loss.backward()
    assert isinstance(one.logits, LazyLogits)
    torch.testing.assert_close(one.logits + 0, other.logits, rtol=1e-4, atol=1e-5)
    (grad,) = torch.autograd.grad(
        compiled(input_ids=ids, labels=labels).logits.square().mean(), [model.get_input_embeddings().weight]
    )
    (expected,) = torch.autograd.grad(other.logits.square().mean(), [model.get_input_embeddings().weight])
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("op_by_op")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_gpt2_of_transformers_as_it_is(monkeypatch: pytest.MonkeyPatch, fused: list[int]) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(heads.Head, "asked", lambda self, for_loss: asked.append(for_loss))
    model, ids = tiny("GPT2LMHeadModel"), words()
    compiled = torch.compile(model, backend=compile_lean)
    for _ in range(2):
        found = results(model, lambda ids: compiled(input_ids=ids, labels=ids).loss, ids)
        assert_near(found, results(model, lambda ids: model(input_ids=ids, labels=ids).loss, ids))
    assert asked == [True] * 2
    torch.testing.assert_close(compiled(input_ids=ids, labels=ids).logits + 0, model(input_ids=ids).logits)


# Memory


class Wide(nn.Module):
    """Of a vocabulary so large that its logits are most of the memory."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, WIDTH), nn.Linear(WIDTH, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(F.gelu(self.embed(ids)))
        return F.cross_entropy(logits.view(-1, logits.size(-1)).float(), ids.view(-1)), logits


@pytest.mark.slow
@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.sampled(2)
def test_memory_does_not_grow_with_tokens_times_vocabulary(is_trained: bool) -> None:
    peaks: dict[tuple[int, int], int] = {}
    for tokens, vocabulary in [(1024, 2048), (4096, 2048), (1024, 8192), (4096, 8192)]:
        torch._dynamo.reset()
        model, ids = Wide(vocabulary), torch.randint(vocabulary, (2, tokens // 2))
        compiled = torch.compile(model, backend=compile_lean)

        def step(model: nn.Module = model, compiled: Any = compiled, ids: Tensor = ids) -> None:
            model.zero_grad()
            with torch.set_grad_enabled(is_trained):
                loss, _ = compiled(ids)
            if is_trained:
                loss.backward()

        step()
        peaks[tokens, vocabulary] = leangrad.measure(step, timed_runs=0).peak_bytes
    # What has to do with both: logits of all tokens would be 4 bytes of each.
    both = peaks[4096, 8192] - peaks[1024, 8192] - (peaks[4096, 2048] - peaks[1024, 2048])
    assert both <= 0.02 * 4 * (4096 - 1024) * (8192 - 2048)
    assert peaks[4096, 8192] < 4 * 4096 * 8192 / 4


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # Inductor's own: it makes one to begin with
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("autocast", [False, True])
def test_no_logits_are_allocated_on_a_gpu(autocast: bool, mode: str | None) -> None:
    vocabulary, tokens = 50304, 8192
    model = Wide(vocabulary).cuda()
    plain, ids = copy.deepcopy(model), torch.randint(vocabulary, (8, tokens // 8), device="cuda")
    compiled = torch.compile(model, backend=compile_lean, mode=mode)

    def run(one: Any, module: nn.Module) -> Tensor:
        module.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = one(ids)[0]
        loss.backward()
        return loss.detach().clone()

    expected = run(plain, plain)
    for _ in range(4):
        found = run(compiled, model)
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=0)
    (ours,), (other,) = (list(one.parameters()) for one in (model, plain))
    assert (ours.grad - other.grad).norm() <= 0.02 * other.grad.norm()
    torch.cuda.synchronize()
    if mode is None:  # else it is in the pool of the CUDA graph already
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(compiled, model)
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before < 4 * tokens * vocabulary / 8


# The caches


def test_the_setting_is_part_of_the_key() -> None:
    assert Partitioner(Settings(fused_loss=False)).uuid() != Partitioner(Settings()).uuid()


CACHED = """
import sys, torch, torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from leangrad.compiled import compile_lean
from leangrad.compiled.partitioner import chosen
torch.manual_seed(0)
embed, head = nn.Embedding(512, 16), nn.Linear(16, 512)
def step(ids):
    logits = head(embed(ids))
    return F.cross_entropy(logits.view(-1, 512).float(), ids.view(-1)), logits
ids = torch.arange(48).view(2, 24)
options = {"leangrad.fused_loss": sys.argv[1] == "True"}
loss, logits = torch.compile(step, backend=compile_lean, options=options)(ids)
loss.backward()
print("hits", counters["aot_autograd"]["autograd_cache_hit"], "chosen", len(chosen), type(logits).__name__)
print(f"{loss:.5f} {head.weight.grad.norm():.5f} {logits.sum():.3f}")
"""


@pytest.mark.slow
@pytest.mark.extended
def test_a_second_process_starts_warm_and_the_other_setting_misses(tmp_path: Path) -> None:
    told = [
        in_a_process(CACHED, one, TORCHINDUCTOR_CACHE_DIR=str(tmp_path)).split("\n")
        for one in ("True", "True", "False")
    ]
    assert [one[0] for one in told] == [
        "hits 0 chosen 1 LazyLogits",
        "hits 1 chosen 0 LazyLogits",
        "hits 0 chosen 1 Tensor",
    ]
    assert told[0][1] == told[1][1]


# Threads


@pytest.mark.usefixtures("op_by_op")
def test_another_thread_reads_the_logits() -> None:
    model, ids = Language(returned), words()
    _, logits = torch.compile(model, backend=compile_lean)(ids)
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(logits.detach() + 0))
    thread.start()
    thread.join()
    torch.testing.assert_close(found[0], model(ids)[1].detach())


@pytest.mark.usefixtures("op_by_op")
def test_what_the_policy_expects_has_the_chunk_and_no_logits() -> None:
    model = Language(shifted)
    torch.compile(model, backend=compile_lean)(words(4, 256)).backward()
    logits = 4 * 255 * WORDS * 4
    (one,) = chosen
    assert "the loss is computed without logits" in summary()
    assert one.choice.outcome.kept_bytes < logits / 4
    assert 256 * WORDS * 4 < one.choice.outcome.peak_bytes < logits
