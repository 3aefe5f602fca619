"""Logits that are computed only when somebody reads them: `lean(model, exact=False)`."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import leangrad
from leangrad.errors import ChangedError, LeangradError
from leangrad.loss.lazy import heads
from leangrad.loss.lazy.logits import LazyLogits
from tests.support import assert_same_bits, same_bits
from tests.support.error_rule import assert_error_rule
from tests.support.language_losses import as_transformers, shifted, wide
from tests.zoo import CASES, Case

WORDS, WIDTH, ROWS, LENGTH = 1100, 24, 3, 20


class Model(nn.Module):
    """Words to words; ``tied``: by one table."""

    def __init__(self, *, bias: bool = True, tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.table(ids)))


def words() -> Tensor:
    return torch.randint(WORDS, (ROWS, LENGTH))


def capped(logits: Tensor, ids: Tensor) -> Tensor:
    logits = logits / 3.0
    logits = torch.tanh(logits)
    logits = logits * 3.0
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def scaled(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.CrossEntropyLoss(label_smoothing=0.1)((0.5 * logits).reshape(-1, WORDS), ids.reshape(-1))


def some_rows(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[1, 2:-3], ids[1, 2:-3])


def transposed(logits: Tensor, ids: Tensor) -> Tensor:
    """The vocabulary where `F.cross_entropy` looks for it in more than two dimensions."""
    every = F.cross_entropy(wide(logits.transpose(1, 2)), ids, reduction="none")
    return every.mean() + F.cross_entropy(logits.permute(0, 2, 1), ids)


def with_bias(logits: Tensor, ids: Tensor) -> Tensor:
    """Some models add one outside of the head."""
    return shifted(logits + torch.linspace(-1, 1, WORDS, dtype=logits.dtype), ids)


def twice(logits: Tensor, ids: Tensor) -> Tensor:
    return shifted(logits, ids) + 0.3 * scaled(logits, ids)


LOSSES = [shifted, as_transformers, capped, scaled, some_rows, with_bias, transposed, twice]
Loss = Callable[[Tensor, Tensor], Tensor]


def with_entropy(logits: Tensor, ids: Tensor) -> Tensor:
    """Reads the values of the same logits, for a gradient."""
    return shifted(logits, ids) - 0.1 * (logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()


def results(model: nn.Module, ids: Tensor, loss: Loss) -> dict[str, Tensor]:
    model.zero_grad()
    value = loss(model(ids), ids)
    value.backward()
    return {"loss": value.detach()} | {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def draws(loss: Loss, dtype: torch.dtype, **how: bool) -> Callable[[], Iterator[tuple[str, tuple[Tensor, ...]]]]:
    def draw() -> Iterator[tuple[str, tuple[Tensor, ...]]]:
        plain = Model(**how).to(dtype)
        ids = words()
        found = [
            results(model, ids, loss)
            for model in (leangrad.lean(copy.deepcopy(plain), exact=False), plain, copy.deepcopy(plain).double())
        ]
        for name in found[1]:
            yield name, tuple(one[name] for one in found)

    return draw


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss", [*LOSSES, with_entropy], ids=lambda loss: loss.__name__)
@pytest.mark.sampled(3)
def test_the_error_rule(loss: Loss, dtype: torch.dtype) -> None:
    # A norm's weight has 24 elements: eight draws of its error in bfloat16 are off by a fifth, by luck alone.
    seeds = 48 if dtype == torch.bfloat16 else 8
    assert_error_rule(draws(loss, dtype), seeds=seeds)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", [{"tied": True}, {"bias": False}], ids=str)
def test_tied_and_without_a_bias(how: dict[str, bool]) -> None:
    assert_error_rule(draws(shifted, torch.float32, **how))  # type: ignore[arg-type]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_no_values_are_computed(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = leangrad.lean(Model(), exact=False), words()
    with monkeypatch.context() as context:
        context.setattr("leangrad.loss.lazy.logits._Rows.compute", lambda _: pytest.fail("values were computed"))
        for _ in range(3):
            results(model, ids, loss)
        with torch.no_grad():
            loss(model(ids), ids)
    (head,) = (one.__dict__[heads._STATE][0] for one in model.modules() if heads._STATE in one.__dict__)
    assert (head.readings, head.why_eager) == (0, "")


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
@pytest.mark.sampled(4)
def test_bytes_do_not_grow_with_the_logits(loss: Loss) -> None:
    """Beside what each word and each token takes, in the body and in gradients."""

    def peak(rows: int, **how: bool) -> int:
        model, ids = leangrad.lean(Model(), **how), torch.randint(WORDS, (rows, 512))
        for _ in range(3):
            results(model, ids, loss)
        return leangrad.measure(lambda: results(model, ids, loss), timed_runs=0).peak_bytes

    def per_token(**how: bool) -> float:
        return (peak(16, **how) - peak(8, **how)) / (8 * 512)

    if loss is some_rows:
        pytest.skip("few of the logits have a loss")
    assert per_token(exact=True) > 4 * WORDS
    assert per_token(exact=False) < 2 * WORDS


def test_values_are_those_of_plain() -> None:
    plain, ids = Model(), words()
    model = leangrad.lean(copy.deepcopy(plain), exact=False)
    expected = plain(ids)
    for read in (
        lambda t: t.clone(),
        lambda t: t.argmax(-1),
        lambda t: t[..., 5:9],
        lambda t: t.view(-1),
        lambda t: t.transpose(0, 1),
        lambda t: t.transpose(1, 2),
        lambda t: t.transpose(1, 2)[:, 3],
        lambda t: t.transpose(1, 2).flatten(0, 1),
        lambda t: t.transpose(1, 2).transpose(1, 2),
        lambda t: t.softmax(-1),
        lambda t: t + t,
        lambda t: torch.stack([t, t]),
        lambda t: t.detach(),
        lambda t: t.data,
        lambda t: t.double(),
        lambda t: t * torch.ones(WORDS),
        lambda t: (t / 2).tanh() * 2,
        lambda t: 1 / t,
    ):
        model.head.__dict__[heads._STATE][0].readings = 0
        logits = model(ids)
        assert type(logits) is LazyLogits
        assert_same_bits(read(logits) + 0, read(expected) + 0, strides=True)
    model.head.__dict__[heads._STATE][0].losses = 1
    torch.testing.assert_close(
        model(ids)[1, -1] + 0, expected[1, -1]
    )  # of fewer rows: the product may be another kernel
    logits = model(ids)
    assert repr(logits.detach()) == repr(expected.detach())
    assert logits.tolist() == expected.tolist()
    assert (logits.detach().numpy() == expected.detach().numpy()).all()
    assert same_bits(torch.from_dlpack(model(ids).detach()), expected.detach())
    assert same_bits(pickle.loads(pickle.dumps(model(ids).detach())), expected)


def test_what_is_known_without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = leangrad.lean(Model(), exact=False), words()
    monkeypatch.setattr("leangrad.loss.lazy.logits._Rows.compute", lambda _: pytest.fail("values were computed"))
    logits = model(ids)
    assert logits.shape == logits.size() == (ROWS, LENGTH, WORDS)
    assert (logits.dtype, logits.device, logits.dim(), len(logits)) == (torch.float32, torch.device("cpu"), 3, ROWS)
    assert logits.requires_grad
    assert not logits.is_leaf
    assert not logits.detach().requires_grad
    assert logits.half().float().view(-1, WORDS)[3:].shape == (ROWS * LENGTH - 3, WORDS)
    with torch.no_grad():
        assert not model(ids).requires_grad


def test_a_prompt_is_projected_only_where_it_is_read() -> None:
    """As `generate` does: the last token's logits, of a prompt whose other logits nobody wants."""
    model, ids = leangrad.lean(Model().eval(), exact=False), torch.randint(WORDS, (2, 600))

    def last() -> Tensor:
        with torch.no_grad():
            return model(ids)[:, -1, :].to(dtype=torch.float32, copy=True)

    assert leangrad.measure(last, timed_runs=0).peak_bytes < 2 * 600 * WORDS
    torch.testing.assert_close(last(), leangrad.plain(model)(ids).detach()[:, -1])


# ---------------------------------------------------------------------------------------------------------- the graph


def test_hooks_get_the_gradient() -> None:
    plain, ids = Model(), words()
    model = leangrad.lean(copy.deepcopy(plain), exact=False)
    seen: list[Tensor] = []

    def hooked(logits: Tensor, ids: Tensor) -> Tensor:
        logits.register_hook(lambda g: seen.append(g) or 2 * g)
        cast = logits.float()
        cast.retain_grad()
        loss = shifted(cast, ids)
        retained.append(cast)
        return loss

    retained: list[Tensor] = []
    found, expected = results(model, ids, hooked), results(plain, ids, hooked)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(seen[0], seen[1])
    torch.testing.assert_close(retained[0].grad, retained[1].grad)


def test_a_hook_that_comes_too_late_says_so() -> None:
    model, ids = leangrad.lean(Model(), exact=False), words()
    logits = model(ids)
    loss = shifted(logits, ids)
    logits.register_hook(lambda g: g.sum())
    with pytest.raises(LeangradError, match="before the loss is computed"):
        loss.backward()


def test_a_bias_of_its_own_has_its_gradient() -> None:
    class Biased(Model):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.randn(WORDS))

        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) + self.own

    plain, ids = Biased(), words()
    model = leangrad.lean(copy.deepcopy(plain), exact=False)
    for loss in (shifted, with_entropy, lambda t, _: (2 * t.float()).square().mean()):
        torch.testing.assert_close(results(model, ids, loss), results(plain, ids, loss))
    logits = model(ids)
    assert type(logits) is LazyLogits
    with torch.no_grad():
        model.own.add_(1)
    with pytest.raises(ChangedError, match="bias"):
        shifted(logits, ids)


def test_a_bias_with_dimensions_of_one() -> None:
    plain, ids, bias = Model(), words(), torch.randn(1, 1, WORDS, requires_grad=True)
    model = leangrad.lean(copy.deepcopy(plain), exact=False)
    for loss in (
        lambda t, i: shifted(t + bias, i),
        lambda t, i: (t + bias).view(-1, WORDS).square().mean(),
        lambda t, i: (t + bias)[1].square().mean(),
    ):
        found = []
        for one in (model, plain):
            bias.grad = None
            found.append(results(one, ids, loss) | {"own": bias.grad})
        torch.testing.assert_close(*found)
    with torch.no_grad():
        assert (model(ids) + bias).view(-1, WORDS).clone().shape == (ROWS * LENGTH, WORDS)


def test_logits_in_a_function_of_the_users() -> None:
    class Squares(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, t: Tensor) -> Tensor:
            ctx.save_for_backward(t)
            return t.square().mean()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            (t,) = ctx.saved_tensors
            return 2 * g * t / t.numel()

    plain, ids, offset = Model(), words(), torch.randn(WORDS)
    model = leangrad.lean(copy.deepcopy(plain), exact=False)
    for loss in (
        lambda t, _: Squares.apply(t),
        lambda t, _: Squares.apply(3 * t.view(-1, WORDS)[1:].float()),
        lambda t, _: Squares.apply((t / 5).tanh()),
        lambda t, _: Squares.apply(t + offset),
    ):
        torch.testing.assert_close(results(model, ids, loss), results(plain, ids, loss))


@pytest.mark.parametrize("frozen", ["head", "body", "all but the bias"])
def test_frozen_parts(frozen: str) -> None:
    plain, ids = Model(), words()
    parts = {"head": plain.head, "body": nn.ModuleList([plain.table, plain.body]), "all but the bias": plain}
    parts[frozen].requires_grad_(False)
    plain.head.bias.requires_grad_(frozen != "head")
    model = leangrad.lean(copy.deepcopy(plain), exact=False)
    found, expected = results(model, ids, shifted), results(plain, ids, shifted)
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found, expected)


def test_writing_to_logits() -> None:
    plain, ids = Model(), words()
    model = leangrad.lean(copy.deepcopy(plain), exact=False)

    def masked(logits: Tensor, ids: Tensor) -> Tensor:
        logits[..., 7:90] = -1e4
        logits *= 2
        return shifted(logits, ids)

    torch.testing.assert_close(results(model, ids, masked), results(plain, ids, masked))
    logits = model(ids)
    rows = logits.view(-1, WORDS)
    logits.mul_(2)
    with pytest.raises(LeangradError, match="do not see what is written"):
        rows.sum()
    with pytest.raises(LeangradError, match="do not see what is written"):
        rows.mul_(2)


def test_a_second_backward() -> None:
    plain, ids = Model(), words()
    model = leangrad.lean(copy.deepcopy(plain), exact=False)

    def again(logits: Tensor, ids: Tensor) -> Tensor:
        loss = shifted(logits, ids)
        loss.backward(retain_graph=True)
        return loss

    torch.testing.assert_close(results(model, ids, again), results(plain, ids, again))
    loss = shifted(model(ids), ids)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


# ------------------------------------------------------------------------------------------------------------- changes


@pytest.mark.parametrize("which", ["weight", "bias", "input"])
def test_values_of_what_has_changed_are_refused(which: str) -> None:
    model, ids = leangrad.lean(Model(), exact=False), words()
    kept = []
    model.head.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    logits = model(ids)
    shifted(logits, ids).backward()
    with torch.no_grad():
        {"weight": model.head.weight, "bias": model.head.bias, "input": kept[0]}[which].add_(1)
    for read in (lambda: logits.argmax(-1), lambda: shifted(logits, ids), lambda: print(logits)):
        with pytest.raises(ChangedError, match=f"the {which} of their projection"):
            read()


def test_values_that_were_read_before_stay() -> None:
    model, ids = leangrad.lean(Model(), exact=False), words()
    logits = model(ids)
    best = logits.max(-1).indices
    with torch.no_grad():
        model.head.weight.neg_()
    assert same_bits(logits.argmax(-1), best)


# ------------------------------------------------------------------------------------------------------------- company


def test_under_autocast() -> None:
    plain, ids = Model(), words()
    model = leangrad.lean(copy.deepcopy(plain), exact=False)
    for inside in (True, False):

        def loss(logits: Tensor, ids: Tensor, inside: bool = inside) -> Tensor:
            assert logits.dtype == torch.bfloat16
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                value = F.cross_entropy(logits.view(-1, WORDS), ids.view(-1))
            assert value.dtype == (torch.float32 if inside else torch.bfloat16)
            return value

        def run(model: nn.Module) -> dict[str, Tensor]:
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(ids)
            loss(logits, ids).backward()
            return {name: p.grad for name, p in model.named_parameters()}

        torch.testing.assert_close(run(model), run(plain), rtol=0.1, atol=2e-3)


@pytest.mark.parametrize("first", ["pack", "lean"])
def test_beside_packed_gradients(first: str) -> None:
    plain, ids = Model(tied=True), words()
    model = copy.deepcopy(plain)
    if first == "lean":
        leangrad.lean(model, exact=False)
    leangrad.pack_gradients(model)
    if first == "pack":
        leangrad.lean(model, exact=False)
    for _ in range(3):
        for one in (model, plain):
            shifted(one(ids), ids).backward()
    for (name, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)
    assert type(model(ids)) is LazyLogits
    leangrad.plain(model)
    assert ("forward" in model.head.__dict__) == (first == "pack")
    assert type(model(ids)) is Tensor


def test_beside_a_budget_and_a_checkpoint() -> None:
    plain, ids = Model(), words()
    model = leangrad.lean(copy.deepcopy(plain), exact=False, budget=10**8, min_bytes=0)
    for _ in range(14):
        torch.testing.assert_close(results(model, ids, shifted), results(plain, ids, shifted))

    def checkpointed(model: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda ids: torch.utils.checkpoint.checkpoint(lambda i: shifted(model(i), i), ids, use_reentrant=False)

    for one in (model, plain):
        one.zero_grad()
        checkpointed(one)(ids).backward()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.usefixtures("backend_name")
def test_compiled_and_transformed_it_is_plain() -> None:
    plain, ids = Model(), words()
    model = leangrad.lean(copy.deepcopy(plain), exact=False)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="leangrad", fullgraph=True, options={"leangrad.exact": True})
    assert type(compiled(ids)) is Tensor  # run op by op: what Dynamo traces is the same, without a C++ compiler
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    found = torch.func.grad(lambda p: torch.func.functional_call(model, p, (ids,)).square().mean())(parameters)
    expected = torch.autograd.grad(plain(ids).square().mean(), list(plain.parameters()))
    for a, b in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(a, b)


# --------------------------------------------------------------------------------------------------------------- heads


def test_which_modules_are_heads() -> None:
    assert list(heads.heads_of(Model())) == ["head"]
    block = nn.TransformerEncoderLayer(64, 4, 256)
    assert not heads.heads_of(nn.TransformerEncoder(block, 2, enable_nested_tensor=False))
    assert not heads.heads_of(nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 10)))


def test_a_module_that_is_none_is_given_up() -> None:
    plain = nn.Sequential(nn.Linear(8, 512), nn.GELU(), nn.Linear(512, 8))
    model, x = leangrad.lean(copy.deepcopy(plain), exact=False), torch.randn(16, 8)
    for n in range(4):
        found = results(model, x, lambda y, _: y.square().mean())
        assert_same_bits(found["0.weight"], results(plain, x, lambda y, _: y.square().mean())["0.weight"])
        assert (type(model[0](x)) is LazyLogits) == (n < 1)


def test_plain_copies_and_pickles() -> None:
    model, ids = leangrad.lean(Model(), exact=False), words()
    keys = list(model.state_dict())
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.head.weight.zero_()
    assert type(copied(ids)) is LazyLogits
    assert copied(ids).equal(copied.head.bias.expand(ROWS, LENGTH, WORDS))
    loaded = pickle.loads(pickle.dumps(model))
    assert same_bits(loaded(ids), model(ids))
    assert list(leangrad.plain(model).state_dict()) == keys
    assert type(model(ids)) is Tensor
    assert "forward" not in model.head.__dict__
    assert not [name for name in model.head.__dict__ if "leangrad" in name]
    assert type(leangrad.lean(leangrad.lean(model, exact=False))(ids)) is Tensor


def test_the_summary_says_what_became_of_logits() -> None:
    class WithLoss(Model):
        def forward(self, ids: Tensor) -> Tensor:
            return shifted(super().forward(ids), ids)

    torch.manual_seed(0)
    for exact, sentence in (
        (True, rf"exact=False\) would make no logits, {ROWS * (LENGTH - 1) * WORDS * 4 / 1000:.2f} kB here"),
        (False, "exact=False: the logits of head are not kept"),
    ):
        model, ids = leangrad.lean(WithLoss(), exact=exact), words()
        for _ in range(2):
            model(ids).backward()
        assert re.search(sentence, leangrad.ledger_of(model).summary())


def test_nothing_is_left() -> None:
    model, ids = leangrad.lean(Model(), exact=False), words()
    alive = []
    gc.collect()
    gc.disable()
    try:
        for read in (lambda t: None, lambda t: t.argmax(-1), lambda t: t.float().view(-1)):
            logits = model(ids)
            alive.append(weakref.ref(logits))
            alive.append(weakref.ref(logits._rows.source))
            loss = with_entropy(logits, ids)
            read(logits)
            loss.backward()
            del loss, logits
        assert [one() for one in alive] == [None] * len(alive)
    finally:
        gc.enable()


# -------------------------------------------------------------------------------------------------------------- models

LANGUAGE = [case for case in CASES if {"gpt", "bert", "t5", "llama", "mamba", "moe"} & {case.name, case.name[3:]}]


@pytest.mark.parametrize("case", LANGUAGE, ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.sampled(3)
def test_language_models_of_the_zoo(case: Case) -> None:
    torch.manual_seed(0)
    plain, batch = case.make().train(), case.batch()
    model = leangrad.lean(copy.deepcopy(plain), exact=False)
    for _ in range(3):
        found = []
        for one in (plain, model):
            one.zero_grad()
            torch.manual_seed(1)
            loss = case.step(one, batch)
            loss.backward()
            found.append(loss.detach())
        torch.testing.assert_close(*found)
    largest = max(p.grad.norm() for p in plain.parameters() if p.grad is not None)
    for (name, a), b in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert (a.grad is None) == (b[1].grad is None), name
        if a.grad is not None:  # some gradients are nothing but rounding, as that of a key's bias
            assert (a.grad - b[1].grad).norm() <= 1e-5 * a.grad.norm() + 1e-6 * largest, name
    used = [one.__dict__[heads._STATE][0].losses for one in model.modules() if heads._STATE in one.__dict__]
    assert any(used)


# ------------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_error_rule_on_a_gpu(dtype: torch.dtype) -> None:
    def draw() -> Iterator[tuple[str, tuple[Tensor, ...]]]:
        plain, ids = Model().cuda().to(dtype), words().cuda()
        models = leangrad.lean(copy.deepcopy(plain), exact=False), plain, copy.deepcopy(plain).double()
        found = [results(model, ids, as_transformers) for model in models]
        for name in found[1]:
            yield name, tuple(one[name] for one in found)

    assert_error_rule(draw)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True])
def test_no_logits_are_allocated_on_a_gpu(autocast: bool) -> None:
    model = leangrad.lean(Model().cuda(), exact=False)
    ids = torch.randint(WORDS, (64, 1024), device="cuda")

    def step() -> None:
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = as_transformers(model(ids), ids)
        loss.backward()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    # One chunk, at most 256 rows of it, and the body's own; all logits would be 288 MB.
    assert torch.cuda.max_memory_allocated() - before < 100e6
