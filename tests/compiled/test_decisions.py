"""What backward must not do otherwise than forward: random masks, decisions, and what the user's checkpoints say."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from leangrad.compiled import compile_lean
from leangrad.compiled.joint_graph import op_name
from leangrad.compiled.partitioner import Settings
from leangrad.policy.ops import is_source
from tests.support import same_bits
from tests.support.partitions import Partitions


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def partitions(function: Callable[..., Tensor], *inputs: Tensor, **options: object) -> tuple[Partitions, Tensor]:
    """Compile and run one step, with work to spare. The same bits as with torch's own cut; no heavy op twice."""
    found = Partitions(Settings(slowdown=10.0), dict(options))
    result = torch.compile(function, backend=found.backend, fullgraph=True)(*inputs)
    result.sum().backward()
    assert [words for part in found.found for words in part.differences] == []
    assert sum(part.compared for part in found.found) > 1
    return found, result


@pytest.mark.parametrize("fallback_random", [False, True])
@pytest.mark.parametrize("sites", [1, 4, 13])
@pytest.mark.sampled(3)
def test_backward_uses_the_masks_of_forward(sites: int, fallback_random: bool) -> None:
    """Site k multiplies by 2 ** k: the sum of all tells which masks were drawn, and so does its gradient."""

    def step(x: Tensor) -> Tensor:
        return sum(F.dropout((x * 2.0**k).tanh().atanh(), 0.5) for k in range(sites))

    x = torch.full((64, 33), 1e-6, requires_grad=True)
    found, result = partitions(step, x, fallback_random=fallback_random)
    assert same_bits((x.grad / 2).round(), (result.detach() / 2e-6).round())
    assert len(set(x.grad.flatten().tolist())) > min(sites, 4)
    (part,) = found.found
    assert [name for name in part.run_twice() if is_source(name) and name != "inductor_random"] == []
    if not fallback_random:
        assert part.kept_bytes <= 8 * sites  # seeds, and no mask
        assert part.run_twice().count("inductor_random") == sites


def routed(x: Tensor, w: Tensor) -> Tensor:
    return torch.where(F.gelu(x @ w) > 0.1, x @ w, -x).sin()


def rounded(x: Tensor, w: Tensor) -> Tensor:
    scale = F.gelu(x @ w)
    return ((scale * 7).round() * x).sin()


def truncated(x: Tensor, w: Tensor) -> Tensor:
    return (F.gelu(x @ w).mul(5).to(torch.int32) * x).sin()


def gathered(x: Tensor, w: Tensor) -> Tensor:
    best = F.gelu(x @ w).argmax(-1, keepdim=True)
    return x.sin().gather(1, best).exp()


def of_experts(x: Tensor, w: Tensor) -> Tensor:
    weights, best = (x @ w).softmax(-1).topk(2, -1)
    return (x.sin().gather(1, best) * weights).exp()


@pytest.mark.parametrize(
    ("function", "decision"),
    [
        (routed, "gt"),
        (rounded, "round"),
        (truncated, "convert_element_type"),
        (gathered, "argmax"),
        (of_experts, "topk"),
    ],
)
@pytest.mark.sampled(2)
def test_a_decision_of_forward_is_kept(function: Callable[..., Tensor], decision: str) -> None:
    """The product is kept for its sine: to make the decision again from it would cost no bytes."""

    def step(x: Tensor, w: Tensor) -> Tensor:
        return function(x, w).sum() + (x @ w).sin().sum()

    found, _ = partitions(step, torch.randn(32, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True))
    (part,) = found.found
    assert decision in found.fixed
    assert decision not in part.run_twice()
    made = {node.name for node in part.backward.graph.nodes if node.op == "call_function"}
    assert not any(name.startswith(decision) for name in made)


def test_a_decision_on_known_bits_is_made_again() -> None:
    """A product is never made again: what is compared are its own bits."""

    def step(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        return torch.where(y > 0.1, y.sin(), y.cos())

    found, _ = partitions(step, torch.randn(32, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True))
    assert "gt" in found.found[0].run_twice()


@pytest.mark.parametrize("reduce", [lambda y: y.amax(-1), lambda y: y.amin(-1), torch.max, torch.min])
def test_the_mask_of_a_maximum_is_made_in_forward(reduce: Callable[[Tensor], Tensor]) -> None:
    """Backward would look for a maximum that, rounded otherwise, is not among what it has made again: 0 / 0."""
    found, _ = partitions(
        lambda x, w: reduce(F.gelu(x @ w)), torch.randn(32, 16, requires_grad=True), torch.randn(16, 16)
    )
    (part,) = found.found
    made, again = (
        {op_name(node) for node in half.graph.nodes if node.op == "call_function"}
        for half in (part.forward, part.backward)
    )
    assert "eq" in made
    assert "eq" not in again


def test_a_maximum_over_indices_is_found_again() -> None:
    """Backward asks which elements the maxima are equal to, by a gather: made again they may be equal to none."""

    def step(x: Tensor, w: Tensor, index: Tensor) -> Tensor:
        return torch.zeros(4, 16).scatter_reduce(0, index, F.gelu(x @ w), "amax")

    index = torch.randint(4, (32, 16))
    found, _ = partitions(step, torch.randn(32, 16, requires_grad=True), torch.randn(16, 16), index)
    (part,) = found.found
    compared = [
        node for node in part.backward.graph.nodes if node.op == "call_function" and op_name(node) == "eq"
        and node.meta["val"].shape == (32, 16)
    ]  # fmt: skip
    assert compared == []


def chosen_by_a_cast(x: Tensor, w: Tensor) -> Tensor:
    half = x.bfloat16()
    return torch.where(half > 0.1, half @ w, w @ half).float().sin() * x


def chosen_by_a_statistic(x: Tensor, w: Tensor) -> Tensor:
    return torch.where(x.bfloat16().exp().mean(-1, keepdim=True) > 1, x.sin(), x.cos())


def chosen_by_a_product(x: Tensor, w: Tensor) -> Tensor:
    y = x.bfloat16() @ w
    return torch.where(y > 0.1, y.sin(), y.cos())


@pytest.mark.parametrize("function", [chosen_by_a_cast, chosen_by_a_statistic, chosen_by_a_product])
def test_half_precision_has_no_known_bits(function: Callable[..., Tensor]) -> None:
    """Forward's kernel may have compared what was not yet rounded; what is kept is rounded."""
    x, w = torch.randn(16, 16, requires_grad=True), torch.randn(16, 16).bfloat16()
    found, _ = partitions(function, x, w)
    assert "gt" in found.fixed
    assert "gt" not in found.found[0].run_twice()


@pytest.mark.gpu
def test_gradients_are_of_the_branch_that_forward_took() -> None:
    """With Inductor's own kernels: the mean is kept in half precision, and forward compares it before it is rounded."""

    def step(x: Tensor) -> Tensor:
        return torch.where(x.bfloat16().exp().mean(-1, keepdim=True) > 1, 2 * x.sin(), 5 * x.sin())

    x = torch.randn(4096, 16, device="cuda") * 0.02
    x = (x - x.mean(-1, keepdim=True) - 2e-4).requires_grad_()  # half the variance: means of exp(x) lie around 1
    result = torch.compile(step, backend=compile_lean)(x)
    result.sum().backward()
    taken = (result.detach() / x.detach().sin()).round()
    assert same_bits((x.grad / x.detach().cos()).round(), taken)
    assert set(taken.unique().tolist()) == {2.0, 5.0}


def test_of_dropout_in_half_precision_only_seeds_are_kept() -> None:
    """The random number is rounded before it is compared, but only there: it is never written."""

    def step(x: Tensor) -> Tensor:
        return F.dropout(F.dropout(x.sin(), 0.3).sin(), 0.3)

    found, _ = partitions(step, torch.randn(64, 64).bfloat16().requires_grad_())
    (part,) = found.found
    assert part.kept_bytes <= 16
    assert part.run_twice().count("inductor_random") == 2


@torch.library.custom_op("leangrad_tests::select", mutates_args=())
def _select(x: Tensor) -> Tensor:
    return x * 2


_select.register_fake(torch.empty_like)
_select.register_autograd(lambda ctx, grad: grad * 2)


def test_an_op_of_a_library_is_no_view_whatever_its_name() -> None:
    """It may draw, count, or take long: it is run once."""
    found, _ = partitions(lambda x: _select(x.exp()).sin(), torch.randn(4, 4, requires_grad=True))
    assert found.found[0].run_twice() == ["exp"] or found.found[0].run_twice() == []
    assert "select" in found.fixed


def policy(
    choice: dict[object, CheckpointPolicy], _: object, op: object, *args: object, **kwargs: object
) -> CheckpointPolicy:
    return choice.get(op, CheckpointPolicy.PREFER_RECOMPUTE)


def block(x: Tensor, w: Tensor, choice: dict[object, CheckpointPolicy]) -> Tensor:
    context = partial(create_selective_checkpoint_contexts, partial(policy, choice))
    return checkpoint(lambda x, w: (x @ w).sin() @ w, x, w, use_reentrant=False, context_fn=context).cos()


MM = torch.ops.aten.mm.default
SIN = torch.ops.aten.sin.default


@pytest.mark.parametrize(
    ("choice", "is_run_twice"),
    [
        ({}, {"mm", "sin"}),
        ({MM: CheckpointPolicy.MUST_SAVE}, {"sin"}),
        ({MM: CheckpointPolicy.MUST_SAVE, SIN: CheckpointPolicy.MUST_SAVE}, set()),
        ({MM: CheckpointPolicy.PREFER_SAVE, SIN: CheckpointPolicy.PREFER_SAVE}, set()),
        ({MM: CheckpointPolicy.MUST_RECOMPUTE, SIN: CheckpointPolicy.MUST_SAVE}, {"mm"}),
    ],
)
@pytest.mark.sampled(2)
def test_checkpoint_policies_of_the_user_are_respected(
    choice: dict[object, CheckpointPolicy], is_run_twice: set[str]
) -> None:
    x, w = torch.randn(16, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
    found, _ = partitions(partial(block, choice=choice), x, w)
    (part,) = found.found
    assert {name for name in part.run_twice() if name in ("mm", "sin")} == is_run_twice
