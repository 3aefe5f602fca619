"""Attention with dropout that a recipe runs again: its mask is drawn from the same random state, bit for bit.

On a CPU a stand-in takes the place of the fused kernels (``tests/support/fused_attention.py``).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import leangrad
from leangrad.errors import BudgetError, LeangradError
from leangrad.ledger import Ledger
from leangrad.ledger.observe import active_region, rng
from leangrad.ledger.origins import rule_builder
from leangrad.ledger.tune import budget_search
from leangrad.ledger.values.node_metadata import NOTE
from tests.support import assert_same_bits
from tests.support.fused_attention import Philox, efficient_attention_on_cpu
from tests.support.ledger_programs import assert_same, backward, leaf

NODE = "ScaledDotProductEfficientAttentionBackward0"
BLOCKS, STEPS = 2, 4
WIDTH, HEADS = 128, 2
P = 0.1
Runs = list[tuple[Any, Tensor]]
efficient: Any = torch.ops.aten._scaled_dot_product_efficient_attention.default


@pytest.fixture
def philox(monkeypatch: pytest.MonkeyPatch) -> Iterator[Philox]:
    with efficient_attention_on_cpu(monkeypatch) as found:
        yield found


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """The attention that ran again: from which state, and a copy of what it gave, on the CPU."""
    found: Runs = []
    run_again = rng.run_again

    def noting(state: Any, *rest: Any) -> Any:
        made = run_again(state, *rest)
        if len(made) > 2:  # else it is a dropout by itself
            found.append((state, made[0].cpu()))
        return made

    monkeypatch.setattr(rng, "run_again", noting)
    return found


def with_products(products: int = 8) -> Ledger:
    return Ledger(residual_depth=0, min_bytes=0, products=products)


# --------------------------------------------------------------------------------------------------------------- models


class Attention(nn.Module):
    """Masked by ``mask``: causal, a constant bias, one that is learned, or not at all."""

    def __init__(self, mask: str, dropout: float, length: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mask, self.dropout = mask, dropout
        self.bias = nn.Parameter(torch.randn(length, length), requires_grad=mask == "learned")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).split(WIDTH, -1))
        bias = self.bias.to(q.dtype) if self.mask in ("constant", "learned") else None
        y = F.scaled_dot_product_attention(q, k, v, bias, dropout_p=P, is_causal=self.mask == "causal")
        return x + F.dropout(self.out(y.transpose(1, 2).flatten(-2)), self.dropout)


class MultiHead(nn.Module):
    """torch's own layer, which calls one function for all that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, HEADS, P, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.attention(h, h.sin(), h, need_weights=False)[0]


class Stack(nn.Module):
    """Blocks of attention and a wide layer; ``checkpoints``: of every second block, reentrant or not."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        dropout: float,
        checkpoints: Callable[..., Any] | None = None,
        blocks: int = BLOCKS,
    ) -> None:
        super().__init__()
        self.first, self.checkpoints = nn.Linear(WIDTH, WIDTH), checkpoints
        self.mixers = nn.ModuleList(make() for _ in range(blocks))
        wide = (nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * WIDTH, WIDTH))
        self.wides = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), *copy.deepcopy(wide)) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for n, (mixer, wide) in enumerate(zip(self.mixers, self.wides, strict=True)):
            x = self.checkpoints(mixer, x) if self.checkpoints is not None and n % 2 else mixer(x)
            x = x + wide(x)
        return x


def stack(
    mask: str = "causal",
    dropout: float = 0.0,
    length: int = 16,
    checkpoints: Callable[..., Any] | None = None,
    blocks: int = BLOCKS,
) -> nn.Module:
    return Stack(lambda: Attention(mask, dropout, length), dropout, checkpoints, blocks)


def saves_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is efficient else CheckpointPolicy.PREFER_RECOMPUTE


selective = partial(
    checkpoint,
    use_reentrant=False,
    context_fn=partial(create_selective_checkpoint_contexts, saves_attention),
)
CHECKPOINT = partial(checkpoint, use_reentrant=False)
REENTRANT = partial(checkpoint, use_reentrant=True)
MODELS: dict[str, Callable[[int], nn.Module]] = {
    "causal": lambda n: stack("causal", 0.0, n),
    "causal, other dropouts": lambda n: stack("causal", P, n),
    "constant": lambda n: stack("constant", 0.0, n),
    "learned": lambda n: stack("learned", P, n),
    "multi-head": lambda n: Stack(MultiHead, 0.0),
    "checkpoint": lambda n: stack("causal", P, n, CHECKPOINT),
    "reentrant checkpoint": lambda n: stack("none", P, n, REENTRANT),
}

Step = Callable[[nn.Module, Any, Tensor], None]


def usual(model: nn.Module, region: Any, x: Tensor) -> None:
    with region:
        y = model(x)
    give(y)


def twice(model: nn.Module, region: Any, x: Tensor) -> None:
    with region:
        y = model(x)
    give(y, retain_graph=True)
    give(y)


def two_batches(model: nn.Module, region: Any, x: Tensor) -> None:
    other = x.sin()
    with region:
        y = model(x)
    with region:
        z = model(other)
    give(y)
    give(z)


def forked(model: nn.Module, region: Any, x: Tensor) -> None:
    """The random state of forward is not that around it."""
    with torch.random.fork_rng(), region:
        torch.manual_seed(77)
        y = model(x)
    give(y)


def give(y: Tensor, **options: Any) -> None:
    """Backward with a random gradient that draws from no generator of the step."""
    draw = torch.Generator().manual_seed(7)
    y.backward(torch.randn(y.shape, generator=draw).to(y.device, y.dtype), **options)


def train(
    make: Callable[[], nn.Module],
    region: Any,
    step: Step,
    x: Tensor,
    seed: Callable[[int], Any],
    state: Callable[[], Any],
) -> list[tuple[list[Tensor | None], Any]]:
    """Several steps: of each, the gradients and the random state after it."""
    torch.manual_seed(0)
    model = make().to(x.device)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    found = []
    for n in range(STEPS):
        seed(n)
        step(model, region, x)
        found.append(([None if p.grad is None else p.grad.clone() for p in model.parameters()], state()))
        optimizer.step()
        optimizer.zero_grad()
        torch.clear_autocast_cache()  # as at the end of an autocast: else the next step has these weights
    return found


def tokens(length: int = 16, rows: int = 3) -> Tensor:
    return torch.randn(rows, length, WIDTH, generator=torch.Generator().manual_seed(5))


def rebuilt(ledger: Ledger) -> int:
    return sum(entry.outcome == "rebuilt" and "Attention" in entry.op for entry in ledger.entries())


# ------------------------------------------------------------------------------------------ on a CPU, with the stand-in


def train_on_cpu(make: Callable[[], nn.Module], region: Any, step: Step, philox: Philox) -> Any:
    def seed(n: int) -> None:
        torch.manual_seed(n)
        philox.manual_seed(n + 100)

    return train(make, region, step, tokens(), seed, lambda: philox.state)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("step", [usual, twice, two_batches])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.sampled(5)
def test_models_train_as_plain_ones(name: str, step: Step, autocast: bool, philox: Philox, runs: Runs) -> None:
    """A recorded step, then steps along its trace; the generator ends where plain's does."""
    ledger = with_products()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain = train_on_cpu(lambda: MODELS[name](16), nullcontext(), step, philox)
        assert not runs
        lean = train_on_cpu(lambda: MODELS[name](16), ledger, step, philox)
    for n, ((a, after), (b, after_plain)) in enumerate(zip(lean, plain, strict=True)):
        assert_same(a, b, n)
        assert after == after_plain
    assert ledger.differences == 0
    assert rebuilt(ledger) >= 1
    if name == "multi-head" and autocast:  # the plan keeps what its attention gives, as it does without dropout
        assert len(runs) >= BLOCKS
        return
    # Each attention runs again once in each backward, from a state of its own.
    assert len(runs) == STEPS * BLOCKS * (1 if step is usual else 2)
    if step is not twice or "checkpoint" not in name:  # which does not bring the stand-in's state back
        assert len({state for state, _ in runs}) == len(runs) // (2 if step is twice else 1)


def check_bits(x: Tensor, runs: Runs, state: Callable[[], Any]) -> None:
    """What backward makes of each attention is what forward made, and the generator stands where it stood."""
    torch.manual_seed(0)
    model: Any = stack("causal", P, x.shape[1]).to(x.device)
    ledger, made = with_products(), list[Tensor]()
    for mixer in model.mixers:
        mixer.out.register_forward_pre_hook(lambda m, args: made.append(args[0].detach().clone()))
    for n in range(STEPS):
        runs.clear()
        made.clear()
        with ledger:
            y = model(x)
        after = state()
        assert not runs
        give(y)
        assert str(state()) == str(after)
        assert len(runs) == BLOCKS
        for (_, again), before in zip(reversed(runs), made, strict=True):
            assert_same_bits(again.transpose(1, 2).flatten(-2), before.cpu(), n)
    assert ledger.differences == 0


def test_attention_gives_the_same_bits_again(philox: Philox, runs: Runs) -> None:
    check_bits(tokens(), runs, lambda: philox.state)


def test_a_transformer_keeps_its_residual_sums_alone(philox: Philox) -> None:
    """As it does without dropout: the output of the attention is no more among what is kept."""
    kept = {}
    for products in (0, 8):
        ledger = with_products(products)
        train_on_cpu(lambda: stack(), ledger, usual, philox)
        kept[products] = ledger.totals().kept_bytes
    sums = (2 * BLOCKS - 1) * tokens().nbytes
    assert kept[8] == sums
    assert kept[0] >= sums + BLOCKS * tokens().nbytes  # what attention gives, and more


def test_a_budget_below_the_floor(philox: Philox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_search, "CLEARLY_FASTER", 0.0)  # models as small as these take as long with any plan
    monkeypatch.setattr(torch, "manual_seed", partial(_seed_both, torch.manual_seed, philox))
    # Enough rows that gradients of weights are not the peak, and enough blocks that what all of them keep is.
    x, plain = tokens(rows=96), stack(blocks=6)

    def one(model: nn.Module, seed: int = 0) -> None:
        model.zero_grad()
        torch.manual_seed(seed)
        give(model(x))

    def peak(model: nn.Module) -> int:
        return leangrad.measure(lambda: one(model), timed_runs=0).peak_bytes

    def least() -> int:
        return smallest(leangrad.lean(copy.deepcopy(plain), budget=x.nbytes, min_bytes=0), peak)

    with monkeypatch.context() as patch:
        patch.setattr(rng.Draw, "note", lambda draw, node: False)
        without = least()
    budget = (least() + without) // 2
    assert budget < without  # what attention gives is kept no more
    floor = leangrad.lean(copy.deepcopy(plain), min_bytes=0)
    assert without < many(4, lambda: peak(floor))[-1]
    lean = leangrad.lean(copy.deepcopy(plain), budget=budget, min_bytes=0)
    for seed in range(28):
        one(plain, seed)
        one(lean, seed)
        assert_same([p.grad for p in lean.parameters()], [p.grad for p in plain.parameters()], seed)
    assert many(5, lambda: peak(lean))[-1] <= budget
    before = philox.draws
    one(lean)
    assert philox.draws > before + 4  # in forward, and again


def smallest(model: nn.Module, step: Callable[[nn.Module], Any]) -> int:
    """What the error names of a model whose budget cannot be met."""
    with pytest.raises(BudgetError) as raised:
        many(12, lambda: step(model))
    return raised.value.smallest


def many(times: int, step: Callable[[], Any]) -> list[Any]:
    return [step() for _ in range(times)]


def _seed_both(seed_torch: Callable[[int], Any], philox: Philox, seed: int) -> None:
    seed_torch(seed)
    philox.manual_seed(seed)


def test_what_a_selective_checkpoint_kept_was_not_drawn(philox: Philox, runs: Runs) -> None:
    """When its segment runs again the attention is handed out, no kernel runs, and there is no state to run it from."""
    make, ledger = partial(stack, checkpoints=selective), with_products()
    plain = train_on_cpu(make, nullcontext(), usual, philox)
    lean = train_on_cpu(make, ledger, usual, philox)
    for n, ((a, after), (b, after_plain)) in enumerate(zip(lean, plain, strict=True)):
        assert_same(a, b, n)
        assert after == after_plain
    assert len(runs) == STEPS * (BLOCKS - BLOCKS // 2)


def attended(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    return F.scaled_dot_product_attention(h, h.sin(), h.cos(), dropout_p=P).sin()


def test_where_the_state_is_not_known_it_is_kept(philox: Philox, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a CUDA graph is captured."""
    ledger = with_products()
    monkeypatch.setattr(rng, "state_of", lambda device: None)
    with ledger:
        y = attended(leaf(2, 2, 8, 4), leaf(4, 4, seed=1))
    assert [entry.op for entry in ledger.entries() if entry.outcome == "kept"] == [NODE]
    backward(y)


def test_another_draw_in_between_is_an_error(philox: Philox) -> None:
    """Of another thread, while the call runs."""
    draw = philox.draw

    def two(count: int) -> tuple[int, int]:
        draw(4)
        return draw(count)

    philox.draw = two  # type: ignore[method-assign]
    with with_products():
        y = attended(leaf(2, 2, 8, 4), leaf(4, 4, seed=1))
    philox.draw = draw  # type: ignore[method-assign]
    state = philox.state
    with pytest.raises(LeangradError, match="another thread drew"):
        backward(y)
    assert philox.state == state


@pytest.mark.parametrize("hooked", [False, True])
def test_attention_that_no_handler_saw_is_kept(hooked: bool, philox: Philox, runs: Runs) -> None:
    """Nor does it take the state of the next one, which reads what it gave, and is the first that is seen to save it.

    hooked: hooks of others are set when it saves its output.
    """
    others = partial(torch.autograd.graph.saved_tensors_hooks, lambda t: t, lambda t: t) if hooked else nullcontext

    def program(region: Any) -> list[Tensor | None]:
        philox.manual_seed(1)
        x, w = leaf(2, 2, 8, 4), leaf(4, 4, seed=1)
        with region:
            with others():
                h = efficient(x @ w, x, x, None, True, P)[0]
            y = F.scaled_dot_product_attention(h, h, h, dropout_p=P).sin()
        backward(y)
        return [x.grad, w.grad]

    plain = program(nullcontext())
    ledger = with_products()
    for n in range(3):
        assert_same(program(ledger), plain, n)
    kept = [entry.op for entry in ledger.entries() if entry.outcome == "kept"]
    assert kept == [NODE]
    assert len(runs) == 3  # the second one


def test_a_call_that_fails_leaves_no_state(philox: Philox) -> None:
    """The next op that draws is another's."""
    x, w = leaf(2, 2, 8, 4), leaf(4, 4, seed=1)
    with with_products():
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(x @ w, x[..., :3], x, dropout_p=P)
        assert active_region.current.region.draw is None
        h = efficient(x @ w, x, x, None, True, P)[0]
        node: Any = h.grad_fn
        assert NOTE not in node.metadata
        assert rule_builder.product_of(node, 0) is None


def test_the_state_is_read_only_where_products_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator: it takes the host's time."""
    asked: list[torch.device] = []
    monkeypatch.setattr(rng, "state_of", asked.append)
    q = torch.empty(2, 2, 8, 4, device="meta", requires_grad=True)
    for products, expected in ((0, 0), (8, 2)):
        with with_products(products):
            F.scaled_dot_product_attention(q, q, q, dropout_p=P)
            F.scaled_dot_product_attention(query=q, key=q, value=q, dropout_p=P)
            F.scaled_dot_product_attention(q, q, q)
            with torch.no_grad():
                F.scaled_dot_product_attention(q, q, q, dropout_p=P)
        assert len(asked) == expected


# ------------------------------------------------------------------------------------------------------------ on a GPU

# Of one block of keys: in backward several are added with atomics, and plain is not equal to itself.
SHORT = 64
ON_GPU = {
    SDPBackend.FLASH_ATTENTION: (
        "causal",
        "causal, other dropouts",
        "multi-head",
        "checkpoint",
        "reentrant checkpoint",
    ),
    SDPBackend.EFFICIENT_ATTENTION: tuple(MODELS),
    SDPBackend.CUDNN_ATTENTION: ("causal", "causal, other dropouts", "checkpoint"),
}
HALVES = (torch.bfloat16, torch.float16)
KERNELS = [(b, d) for b in ON_GPU for d in HALVES] + [(SDPBackend.EFFICIENT_ATTENTION, torch.float32)]


def train_on_gpu(name: str, region: Any, step: Step, length: int = SHORT) -> Any:
    x = tokens(length).cuda()
    return train(lambda: MODELS[name](length), region, step, x, torch.manual_seed, torch.cuda.get_rng_state)


@pytest.fixture
def kernel(request: pytest.FixtureRequest) -> Iterator[SDPBackend]:
    """One kernel of attention alone, in one dtype."""
    backend, dtype = request.param
    with ExitStack() as contexts:
        contexts.enter_context(sdpa_kernel(backend))
        contexts.enter_context(torch.autocast("cuda", dtype, enabled=dtype in HALVES))
        q = torch.randn(1, HEADS, SHORT, WIDTH // HEADS, device="cuda", dtype=dtype)
        try:
            with warnings.catch_warnings(action="ignore"):  # they say why
                F.scaled_dot_product_attention(q, q, q, dropout_p=P, is_causal=True)
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            pytest.skip(f"{backend}: {error}")
        yield backend


on_kernels = pytest.mark.parametrize("kernel", KERNELS, indirect=True, ids=lambda k: f"{k[0].name}-{k[1]}".lower())


@pytest.mark.gpu
@on_kernels
@pytest.mark.parametrize("step", [usual, twice, two_batches, forked])
def test_models_train_as_plain_ones_on_cuda(kernel: SDPBackend, step: Step, runs: Runs) -> None:
    for name in ON_GPU[kernel] if step is usual else ON_GPU[kernel][1:2]:
        plain, again = (train_on_gpu(name, nullcontext(), step) for _ in range(2))
        runs.clear()
        ledger = with_products()
        lean = train_on_gpu(name, ledger, step)
        for n, ((a, after), (b, after_plain), (c, _)) in enumerate(zip(lean, plain, again, strict=True)):
            assert_same(b, c, (name, n, "plain is not equal to itself"))
            assert_same(a, b, (name, n))
            assert_same_bits(after, after_plain, (name, n))
        assert ledger.differences == 0
        assert rebuilt(ledger) >= 1, name
        assert len(runs) > BLOCKS * (1 if step in (usual, forked) else 2) or name == "multi-head", name


@pytest.mark.gpu
@on_kernels
def test_attention_gives_the_same_bits_again_on_cuda(kernel: SDPBackend, runs: Runs) -> None:
    """At lengths of several blocks, too; cuDNN takes whole blocks only."""
    for length in (SHORT, 320) if kernel is SDPBackend.CUDNN_ATTENTION else (SHORT, 320, 333):
        check_bits(tokens(length).cuda(), runs, torch.cuda.get_rng_state)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [(SDPBackend.FLASH_ATTENTION, torch.bfloat16)], indirect=True, ids=["flash"])
def test_a_budget_below_the_floor_on_cuda(kernel: SDPBackend, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly all of the way from the floor to the least is gone by running attention again."""
    monkeypatch.setattr(budget_search, "CLEARLY_FASTER", 0.0)
    torch.manual_seed(0)
    net, x = stack("causal", P, SHORT, blocks=4).cuda(), tokens(SHORT, rows=512).cuda()

    def one(model: nn.Module, seed: int) -> int:
        model.zero_grad()
        torch.manual_seed(seed)
        torch.cuda.reset_peak_memory_stats()
        give(model(x))
        return torch.cuda.max_memory_allocated()

    floor = max(many(6, partial(one, leangrad.lean(copy.deepcopy(net)), 0)))
    hopeless = torch.cuda.memory_allocated() + (1 << 20)
    least = smallest(leangrad.lean(copy.deepcopy(net), budget=hopeless), lambda model: one(model, 0))
    assert least < floor
    budget = int(0.1 * floor + 0.9 * least)
    plain, lean = copy.deepcopy(net), leangrad.lean(copy.deepcopy(net), budget=budget)
    for n in range(32):
        peak = one(lean, n)
        state = torch.cuda.get_rng_state()
        one(plain, n)
        assert_same_bits(torch.cuda.get_rng_state(), state, n)
        assert_same([p.grad for p in lean.parameters()], [p.grad for p in plain.parameters()], n)
    assert peak <= 1.01 * budget
    runs.clear()
    one(lean, 0)
    assert runs
