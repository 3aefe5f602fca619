"""What a graph returns beside its loss: no gradient of zeros is made for it, and one that is asked for is right."""

from __future__ import annotations

import copy
import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import leangrad
from leangrad._torch import compiler
from leangrad.compiled import compile_lean, side_outputs
from leangrad.errors import LeangradError
from tests.support import assert_same_bits

ROWS, WIDTH, WORDS = 128, 32, 4096
LOGITS_BYTES = ROWS * WORDS * 4
EXACT = {"leangrad.exact": True}
LOGITS = {"leangrad.fused_loss": False}  # are computed in the graph
Use = Callable[[Tensor, Tensor], Tensor]


class Language(nn.Module):
    """Returns its loss and its logits, as models of Hugging Face do."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.linear = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.dropout(F.gelu(self.linear(self.embed(x)))))
        return F.cross_entropy(logits, x), logits


USES: dict[str, Use] = {
    "the loss": lambda loss, logits: loss,
    "the logits": lambda loss, logits: logits.square().mean(),
    "both": lambda loss, logits: loss + logits.sin().mean(),
}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


@pytest.fixture
def words() -> Tensor:
    return torch.randint(WORDS, (ROWS,))


def step(model: nn.Module, run: Any, x: Tensor, use: Use) -> list[Tensor]:
    """The loss and the gradients of one step."""
    model.zero_grad()
    torch.manual_seed(1)
    found = use(*run(x))
    found.backward()
    return [found.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def set_apart_in(monkeypatch: pytest.MonkeyPatch) -> list[side_outputs.SideOutputs]:
    """All that is set apart from now on."""
    found: list[side_outputs.SideOutputs] = []
    init = side_outputs.SideOutputs.__init__

    def watch(self: side_outputs.SideOutputs, *args: Any) -> None:
        init(self, *args)
        found.append(self)

    monkeypatch.setattr(side_outputs.SideOutputs, "__init__", watch)
    return found


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("use", USES)
def test_gradients_are_those_of_eager(use: str, dropout: float, words: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit where one backward runs; two that are summed add in another order than one."""
    found = set_apart_in(monkeypatch)
    plain = Language(dropout)
    model = copy.deepcopy(plain)
    run = torch.compile(model, backend=compile_lean, options=EXACT)
    for n in range(3):
        for a, b in zip(step(plain, plain, words, USES[use]), step(model, run, words, USES[use]), strict=True):
            if use == "both":
                torch.testing.assert_close(a, b)
            else:
                assert_same_bits(a, b, (use, n))
        (side,) = found
        assert side.are_used == (use != "the loss")


@pytest.mark.parametrize("use", USES)
def test_with_dropout_the_second_run_has_the_masks_of_the_first(use: str, words: Tensor) -> None:
    """Under Inductor, whose random numbers are others than eager's: beside the same graph compiled as it is."""
    plain = Language(0.3)
    model = copy.deepcopy(plain)
    run = torch.compile(model, backend=compile_lean, options=LOGITS)
    first = step(model, run, words, USES[use])
    second = step(model, run, words, USES[use])
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(side_outputs, "LARGE", 1 << 40)
        expected = step(plain, torch.compile(plain, backend=compile_lean, options=LOGITS), words, USES[use])
    for got in (first, second):
        for a, b in zip(expected, got, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_no_zeros_are_made(words: Tensor) -> None:
    peaks = []
    for backend in ("inductor", compile_lean):
        torch._dynamo.reset()
        model = Language()
        run = torch.compile(model, backend=backend, options=None if backend == "inductor" else LOGITS)
        step(model, run, words, USES["the loss"])
        found = leangrad.measure(lambda m=model, r=run: step(m, r, words, USES["the loss"]), timed_runs=1)
        peaks.append(found.peak_bytes)
    assert peaks[0] - peaks[1] >= 0.9 * LOGITS_BYTES


def test_a_gradient_that_comes_later_is_right_and_from_then_on_the_graph_is_left_as_it_is(
    words: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = set_apart_in(monkeypatch)
    plain = Language()
    model = copy.deepcopy(plain)
    run = torch.compile(model, backend=compile_lean, options=LOGITS)
    for n, use in enumerate(["the loss", "the loss", "both", "the loss", "the logits"]):
        for a, b in zip(step(plain, plain, words, USES[use]), step(model, run, words, USES[use]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        assert found[0].are_used == (n >= 2)


@torch._functorch.config.patch(donated_buffer=False)  # else torch itself refuses to retain the graph
def test_several_backward_passes_of_one_forward(words: Tensor) -> None:
    plain = Language()
    model = copy.deepcopy(plain)
    for one in (plain, torch.compile(model, backend=compile_lean, options=LOGITS)):
        loss, logits = one(words)
        loss.backward(retain_graph=True)
        logits.sin().mean().backward(retain_graph=True)
        logits.square().mean().backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("use", USES)
def test_with_packed_gradients(use: str, words: Tensor) -> None:
    plain = Language()
    model = copy.deepcopy(plain)
    packed = leangrad.pack_gradients(model)
    run = torch.compile(model, backend=compile_lean, options=EXACT)
    for _ in range(3):
        for one, module in ((plain, plain), (run, model)):
            module.zero_grad()
            USES[use](*one(words)).backward()
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad)
    assert packed.report().standing_bytes > 0


def test_under_autocast(words: Tensor) -> None:
    plain = Language()
    model = copy.deepcopy(plain)
    run = torch.compile(model, backend=compile_lean, options=EXACT)
    for one, module in ((plain, plain), (run, model)):
        with torch.autocast("cpu", torch.bfloat16):
            _, logits = one(words)
            assert logits.dtype == torch.bfloat16
        logits.float().square().mean().backward()  # the second run is outside of autocast
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in module.parameters())
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert_same_bits(p.grad, q.grad)


def test_an_input_that_was_changed_is_an_error(words: Tensor) -> None:
    model = Language()
    run = torch.compile(model, backend=compile_lean, options=EXACT)
    loss, logits = run(words)
    loss.backward(retain_graph=True)
    with torch.no_grad():
        model.head.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logits.sum().backward()
    _, logits = run(words)  # from now on as captured, for which the embedding may change: its backward does not read it
    with torch.no_grad():
        model.embed.weight.add_(1)
    logits.sum().backward()


@pytest.mark.parametrize("options", [EXACT, LOGITS])
def test_a_second_run_that_is_not_compiled_is_an_error(words: Tensor, options: dict[str, Any]) -> None:
    """Eager would draw other random numbers than Inductor's code did."""
    run = torch.compile(Language(0.3), backend=compile_lean, options=options)
    _, logits = run(words)
    with torch.compiler.set_stance("force_eager"), pytest.raises(LeangradError, match="could not be run once more"):
        logits.sum().backward()


def test_a_second_run_that_draws_otherwise_is_an_error(words: Tensor) -> None:
    """Also if the side output itself is gone, so that it cannot be compared."""
    run = torch.compile(Language(0.3), backend=compile_lean, options=LOGITS)
    with torch._inductor.config.patch(fallback_random=True):
        total = run(words)[1].sum()
    with pytest.raises(LeangradError, match="could not be run once more"):
        total.backward()


def test_another_thread_may_draw_while_a_graph_runs_that_does_not(
    words: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that prepares the next batch."""
    show = side_outputs._Call.show

    def draw_and_show(*args: Any) -> Any:
        torch.rand(1)
        return show(*args)

    monkeypatch.setattr(side_outputs._Call, "show", draw_and_show)
    model = Language()
    found = step(model, torch.compile(model, backend=compile_lean, options=EXACT), words, USES["the logits"])
    for a, b in zip(step(model, model, words, USES["the logits"]), found, strict=True):
        assert_same_bits(a, b)


def test_random_numbers_after_the_step_are_those_of_eager(words: Tensor) -> None:
    plain = Language(0.3)
    model = copy.deepcopy(plain)
    drawn = []
    for one in (plain, torch.compile(model, backend=compile_lean, options=EXACT)):
        torch.manual_seed(1)
        loss, logits = one(words)
        (loss + logits.mean()).backward()
        drawn.append(torch.rand(4))
    assert_same_bits(*drawn)


def test_logits_that_are_changed_in_place_are_an_error_as_in_eager(words: Tensor) -> None:
    """The product that makes them does not read them in backward, but their log-softmax is made of them again."""
    run = torch.compile(Language(), backend=compile_lean, options=LOGITS)
    loss, logits = run(words)
    with torch.no_grad():
        logits.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_without_gradients_nothing_is_set_apart(words: Tensor) -> None:
    model = Language()
    run = torch.compile(model, backend=compile_lean, options=EXACT)
    with torch.no_grad():
        assert not run(words)[1].requires_grad
    loss, logits = run(words)
    assert logits.requires_grad
    loss.backward()
    with torch.no_grad():
        assert not run(words)[1].requires_grad


class Normed(Language):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.norm(self.embed(x)))
        return F.cross_entropy(logits, x), logits


class Viewed(Language):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        loss, logits = super().forward(x)
        return loss, logits, logits.view(-1)


class Counted(Language):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.steps += 1
        return super().forward(x)


class Routed(Language):
    """A block of a mixture of experts: what it returns beside its loss is no part of that, and is read later."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.linear(self.embed(x))
        return hidden.softmax(-1).square().mean(), self.head(F.gelu(hidden))


class Scalars(Language):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        loss, logits = super().forward(x)
        return loss, logits.square().mean()


@torch.library.custom_op("leangrad_tests::count", mutates_args=("steps",))
def count(steps: Tensor) -> None:
    steps.add_(1)


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "an overload": lambda h, steps: torch.ops.aten.add_.Tensor(steps, 1.0),
    "a custom op": lambda h, steps: torch.ops.leangrad_tests.count(steps),
    "a list": lambda h, steps: torch.ops.aten._foreach_add_.Scalar([steps], 1.0),
    "statistics": lambda h, steps: torch.native_batch_norm(h, None, None, steps, steps.exp(), True, 0.1, 1e-5),
}


class Writing(Language):
    """Its buffer is written to by an op whose name does not end in an underscore."""

    def __init__(self, write: str) -> None:
        super().__init__()
        self.write = write
        self.register_buffer("steps", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.embed(x)
        WRITES[self.write](h.detach(), self.steps)
        logits = self.head(h * self.steps)
        return F.cross_entropy(logits, x), logits


class Renormed(Language):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, max_norm=1.0)


class Weight(Language):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        loss, logits = super().forward(x)
        weight = self.head.weight.view(-1)
        return loss + weight.square().mean(), weight, logits


KINDS: dict[str, Callable[[], Language]] = {
    **{kind.__name__: kind for kind in (Normed, Viewed, Counted, Routed, Scalars, Renormed, Weight)},
    **{write: functools.partial(Writing, write) for write in WRITES},
}


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_that_are_left_as_they_are(kind: str, words: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    found = set_apart_in(monkeypatch)
    plain = KINDS[kind]()
    model = copy.deepcopy(plain)
    run = torch.compile(model, backend=compile_lean, options=EXACT)
    for _ in range(2):
        for one, module in ((plain, plain), (run, model)):
            module.zero_grad()
            loss, other, *_ = one(words)
            (loss + other.mean()).backward()
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad)
        for a, b in zip(plain.buffers(), model.buffers(), strict=True):
            assert_same_bits(a, b)
    assert not found


def test_a_changing_batch(words: Tensor) -> None:
    plain = Language()
    model = copy.deepcopy(plain)
    run = torch.compile(model, backend=compile_lean, options=EXACT, dynamic=True)
    for rows, use in ((128, "the loss"), (96, "both"), (112, "both"), (80, "the loss")):
        x = words[:rows]
        for a, b in zip(step(plain, plain, x, USES[use]), step(model, run, x, USES[use]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_nothing_is_left_to_the_collector(words: Tensor) -> None:
    model = Language()
    run = torch.compile(model, backend=compile_lean, options=EXACT)
    step(model, run, words, USES["the loss"])
    gc.collect()
    gc.disable()
    try:
        loss, logits = run(words)
        held = weakref.ref(logits), weakref.ref(logits.grad_fn)
        loss.backward()
        del loss, logits
        assert [one() for one in held] == [None, None]
    finally:
        gc.enable()


def test_a_number_that_is_another_each_time(words: Tensor) -> None:
    """Dynamo then makes a tensor of it, and the graph asks for its item, at which a second capture would break."""

    class Tempered(Language):
        def forward(self, x: Tensor, temperature: float) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            logits = super().forward(x)[1] * temperature
            return F.cross_entropy(logits, x), logits

    plain = Tempered()
    model = copy.deepcopy(plain)
    run = torch.compile(model, backend=compile_lean, options=EXACT)
    for t in (1.3, 2.3, 3.3):
        expected = step(plain, lambda x, t=t: plain(x, t), words, USES["both"])
        for a, b in zip(expected, step(model, lambda x, t=t: run(x, t), words, USES["both"]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


class Heads(nn.Module):
    """Backward of the side output reads other values than that of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x).tanh().square().mean(), self.head(self.second(x).tanh() * self.first(x).sin())


def test_in_a_checkpoint() -> None:
    """Its second run has to save what the first saved, though a gradient came to a side output between the two."""
    plain = Heads()
    model = copy.deepcopy(plain)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    run = torch.compile(model, backend=compile_lean, options=EXACT)

    def again(one: Any) -> Any:
        return lambda x: torch.utils.checkpoint.checkpoint(one, x, use_reentrant=False)

    for _ in range(2):
        expected = step(plain, plain, x, USES["both"])
        for a, b in zip(expected, step(model, again(run), x, USES["both"]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_an_input_that_counts_no_changes(words: Tensor) -> None:
    class Biased(Language):
        def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            logits = super().forward(x)[1] + bias
            return F.cross_entropy(logits, x), logits

    with torch.inference_mode():
        bias = torch.randn(WORDS)
    plain = Biased()
    model = copy.deepcopy(plain)
    run = torch.compile(model, backend=compile_lean, options=EXACT)
    expected = step(plain, lambda x: plain(x, bias.clone()), words, USES["both"])
    for a, b in zip(expected, step(model, lambda x: run(x, bias), words, USES["both"]), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["__eq__", "__init__", "__dict__", "", "no such op"])
def test_what_a_namespace_has_beside_its_ops_is_no_op(name: str) -> None:
    assert compiler.schemas_of(None, name) == []


def test_each_graph_is_compiled_once_more_and_no_more_often(words: Tensor) -> None:
    model = Language()
    run = torch.compile(model, backend=compile_lean, options=EXACT)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            step(model, run, words, USES["both"])


def test_many_graphs(words: Tensor) -> None:
    """Dynamo counts the compilations of a code object, and leaves it to eager after eight."""
    for _ in range(torch._dynamo.config.recompile_limit + 1):
        namespace: dict[str, Any] = {}
        exec("def call(model, x): return model(x)", namespace)
        run = torch.compile(namespace["call"], backend=compile_lean, options=EXACT)
        model = Language()
        step(model, lambda x, run=run, model=model: run(model, x), words, USES["both"])


def test_backward_passes_in_threads(words: Tensor) -> None:
    model = Language()
    run = torch.compile(model, backend=compile_lean, options=EXACT)
    losses = [USES["both"](*run(words)) for _ in range(6)]
    failed: list[Exception] = []

    def backward(loss: Tensor) -> None:
        try:
            loss.backward()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=backward, args=(loss,)) for loss in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores for float32")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # Inductor's own: a part with nothing to launch
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("use", USES)
def test_on_a_gpu_the_second_run_has_the_masks_of_the_first(use: str, mode: str | None) -> None:
    words = torch.randint(WORDS, (ROWS,), device="cuda")
    plain = Language(0.3).cuda()
    model = copy.deepcopy(plain)
    run = torch.compile(model, backend=compile_lean, mode=mode)
    found = [
        [t.clone() for t in step(model, run, words, USES[use])] for _ in range(4)
    ]  # a graph overwrites its outputs
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(side_outputs, "LARGE", 1 << 40)
        expected = step(plain, torch.compile(plain, backend=compile_lean, options=LOGITS), words, USES[use])
    for got in found:
        for a, b in zip(expected, got, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
