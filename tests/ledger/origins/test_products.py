"""Products that a recipe runs again: each bit for bit, and those that no recipe may run."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from leangrad._torch import failed_allocations
from leangrad.errors import LeangradError
from leangrad.ledger import Ledger
from leangrad.ledger.observe.rng import ATTENTION
from leangrad.ledger.origins import rule_builder
from leangrad.ledger.origins.rules import PRODUCTS, RULES
from leangrad.ledger.values.node_metadata import DRAW, NOTE
from tests.support import assert_same_bits
from tests.support.ledger_programs import leaf
from tests.support.rule_cases import PRODUCT_CASES, Case, check


@pytest.mark.parametrize(("case", "dtype"), [p for case in PRODUCT_CASES for p in case.parameters()])
def test_case(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


def test_every_product_has_a_case() -> None:
    assert {c.node for c in PRODUCT_CASES} == set(PRODUCTS)


# ------------------------------------------------------------------------------------------ what no recipe runs through


def ops(program: Callable[[], Tensor], outcome: str = "kept") -> list[str]:
    """The ops that made the saved tensors of ``program`` which are kept, or whatever ``outcome`` says."""
    ledger = Ledger(residual_depth="auto", min_bytes=0, products=8)
    with ledger:
        program()
    return [entry.op for entry in ledger.entries() if entry.outcome == outcome]


def test_a_product_into_a_tensor_has_no_recipe() -> None:
    """Which kernel computed it may hang on the strides of that tensor."""
    x, w = leaf(6, 6), leaf(6, 6, seed=1)
    assert ops(lambda: torch.addmm(x @ w, x, w).sin(), "rebuilt") == ["AddmmBackward0"]
    assert ops(lambda: (x @ w).addmm_(x, w).sin(), "rebuilt") == []


def test_what_a_node_forgets_has_no_recipe() -> None:
    x, w = leaf(6, 6), leaf(6, 6, seed=1)
    frozen = leaf(6, seed=2).detach()
    assert ops(lambda: torch.addmm(frozen, x, w).sin()) == ["AddmmBackward0"]
    assert ops(lambda: torch.addmm(frozen, x, w.detach()).sin()) == ["AddmmBackward0"]
    assert ops(lambda: F.linear(x, w, frozen.repeat(2)[::2]).sin()) == ["AddmmBackward0"]  # a copy has other strides
    assert ops(lambda: F.linear(x, w, frozen).sin()) == []
    with torch.autocast("cpu", torch.bfloat16):  # the product reads a cast of the bias that nobody sees
        assert "AddmmBackward0" in ops(lambda: F.linear(x, w, frozen).sin())


def test_a_product_with_a_sparse_tensor_has_no_recipe() -> None:
    """On an accelerator it may be added with atomics."""
    x, matrix = leaf(6, 6), leaf(6, 6, seed=1).detach()
    assert ops(lambda: (matrix @ x).sin()) == []
    assert ops(lambda: (matrix.to_sparse() @ x).sin()) == ["MmBackward0"]


def test_strides_that_nobody_knows() -> None:
    """An op whose replay lays its result out otherwise: a product that does not remember strides is not run again.

    One that does gets its operand in the strides of forward.
    """
    (rule,) = RULES["NegBackward0"]
    replay = rule.function
    object.__setattr__(rule, "function", lambda x: torch.stack([torch.neg(x)] * 2, -1)[..., 0])
    rule_builder.forget()
    try:
        x, frozen = leaf(37, 37), leaf(37, 37, seed=1).detach()
        with_strides, seen = _mv_and_mm(x, frozen)
        assert seen == {"mv": True, "mm": False}  # kept or not
    finally:
        object.__setattr__(rule, "function", replay)
        rule_builder.forget()
    plain = leaf(37, 37)
    y, z = frozen @ plain[0].exp().neg(), plain.t().exp().neg() @ frozen
    torch.autograd.backward([y.sin().sum(), z.sin().sum()])
    assert plain.grad is not None
    assert_same_bits(with_strides, plain.grad)


def _mv_and_mm(x: Tensor, frozen: Tensor) -> tuple[Tensor | None, dict[str, bool]]:
    ledger = Ledger(residual_depth="auto", min_bytes=0, products=8)
    with ledger:
        y = (frozen @ x[0].exp().neg()).sin()  # nobody saves what mv reads
        z = (x.t().exp().neg() @ frozen).sin()
    kept = {entry.op for entry in ledger.entries() if entry.outcome == "kept"}
    torch.autograd.backward([y.sum(), z.sum()])
    return x.grad, {"mv": "MvBackward0" in kept, "mm": "MmBackward0" in kept}


# ------------------------------------------------------------------------------- settings that products are computed by


def test_a_product_that_ran_under_other_settings_has_no_recipe() -> None:
    x, w = leaf(6, 6), leaf(6, 6, seed=1)

    def program() -> Tensor:
        with torch.backends.cudnn.flags(enabled=False):
            h = x @ w
        return (h + 1).sin() @ w.sin()

    assert "AddBackward0" in ops(program)
    assert "AddBackward0" not in ops(lambda: (x @ w + 1).sin() @ w.sin())


@pytest.mark.parametrize("step", range(3))
def test_settings_that_change_before_backward_are_an_error(step: int) -> None:
    """In the recorded step, and in those along its trace."""
    ledger = Ledger(residual_depth="auto", min_bytes=0, products=8)
    for n in range(step + 1):
        x, w = leaf(6, 6), leaf(6, 6, seed=1)
        with torch.backends.cudnn.flags(enabled=n != step), ledger:
            y = (x @ w).sin()
        if n < step:
            y.sum().backward()
    with pytest.raises(LeangradError, match=r"torch.backends.cudnn.enabled was False, is True"):
        y.sum().backward()


def test_a_failed_allocation_ends_recipes_through_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The convolution may have run without its workspace."""
    image, kernel = leaf(1, 6, 4, 4), leaf(6, 6, 3, 3, seed=1)
    failed = 0

    def program(fails: int) -> Tensor:
        nonlocal failed
        failed += fails
        return F.conv2d(image, kernel).sin() + (kernel[0, 0] @ kernel[0, 1]).cos().sum()

    monkeypatch.setattr("leangrad._torch.failed_allocations", lambda: failed)
    for fails, expected in ((0, []), (1, ["ConvolutionBackward0"])):
        assert ops(partial(program, fails)) == expected


def test_convolutions_on_an_accelerator_that_may_have_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transposed ones, and all of them where each thread chooses an algorithm by measuring."""
    image = leaf(1, 6, 4, 4)
    plain = F.conv2d(image, leaf(6, 6, 3, 3)).grad_fn
    transposed = F.conv_transpose2d(image, leaf(6, 6, 3, 3)).grad_fn
    for node in (plain, transposed):
        with torch.backends.cudnn.flags(benchmark=True):
            assert rule_builder.product_of(node, 0) is not None
    facts = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr("leangrad.ledger.origins.rules.products.output_facts", lambda node: facts)
    assert rule_builder.product_of(plain, 0) is not None
    assert rule_builder.product_of(transposed, 0) is None
    with torch.backends.cudnn.flags(benchmark=True):
        assert rule_builder.product_of(plain, 0) is None


@pytest.mark.parametrize("learned", [False, True])
def test_attention_with_dropout_has_a_recipe_only_where_its_draw_was_noted(learned: bool) -> None:
    """And none on a CPU, whose kernel takes no dropout. See tests/ledger/test_attention_dropout.py."""
    edges = ((None, 0),) * 3 + ((object() if learned else None, 0),)

    def serving(name: str, p: float, note: dict[str, object]) -> list[tuple[str, ...]]:
        node = SimpleNamespace(_saved_dropout_p=p, next_functions=edges, metadata={NOTE: note} if note else {})
        return [(*rule.operands, *rule.constants) for rule in PRODUCTS[name] if rule.when is None or rule.when(node)]

    names = [name for name in PRODUCTS if name.startswith("ScaledDotProduct")]
    assert set(names) == {*ATTENTION, "ScaledDotProductFlashAttentionForCpuBackward0"}
    for name in names:
        (plain,) = serving(name, 0.0, {})
        assert "dropout_p" not in plain
        assert serving(name, 0.1, {}) == serving(name, 0.1, {"self": 1}) == []
        expected = [(*plain, "dropout_p", "?draw")] if name in ATTENTION else []
        assert serving(name, 0.1, {DRAW: object()}) == expected


@pytest.mark.gpu
def test_an_allocation_that_fails_is_counted_on_a_gpu() -> None:
    before = failed_allocations()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    assert failed_allocations() == before + 1
