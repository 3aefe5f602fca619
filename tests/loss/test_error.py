"""How exact `linear_cross_entropy` is: by the error rule, in every dtype, with every option and every pair of them."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import leangrad
from leangrad.ops import linear_cross_entropy as ops
from tests.support.error_rule import assert_error_rule
from tests.support.loss import OPTIONS, Case, triples

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EXCLUSIVE = [{"scale", "learned scale"}, {"sum", "none"}]
PAIRS = [pair for pair in itertools.combinations(OPTIONS, 2) if set(pair) not in EXCLUSIVE]


def merged(names: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for name in names for key, value in OPTIONS[name].items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(name: str, dtype: torch.dtype) -> None:
    assert_error_rule(lambda: triples(Case(dtype=dtype, options=OPTIONS[name])))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_every_pair_of_options(pair: tuple[str, str], dtype: torch.dtype) -> None:
    assert_error_rule(lambda: triples(Case(tokens=24, hidden=8, dtype=dtype, options=merged(pair))))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_chunks(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight gradient that is the sum of a dozen chunks is as exact as that of one."""
    monkeypatch.setattr(ops, "CHUNK_LOGITS", {"cpu": 40 * 16})
    monkeypatch.setattr(ops, "BLOCK", 16 * 7)
    assert ops.chunk_rows(200, 16, 40, "cpu") == 16
    assert_error_rule(lambda: triples(Case(tokens=200, dtype=dtype, options=OPTIONS["bias"])))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "hidden", "classes"),
    [(1, 8, 40), (33, 8, 1), (33, 8, 2), (31, 7, 13), (8, 1, 40), (12, 2, 50257), (6, 8, 128256)],
    ids=str,
)
@pytest.mark.sampled(3)
def test_odd_sizes(tokens: int, hidden: int, classes: int, dtype: torch.dtype) -> None:
    assert_error_rule(lambda: triples(Case(tokens, hidden, classes, dtype)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scaled_losses(dtype: torch.dtype) -> None:
    """By GradScaler's factor, which lifts plain's gradients of logits to where float16 is exact."""
    assert_error_rule(lambda: triples(Case(dtype=dtype, loss_scale=4096.0)))


@pytest.fixture
def wider_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products as CUDA has them: of half precision, summed and given in float32."""

    def write_wider(left: Tensor, right: Tensor, into: Tensor, add: bool) -> None:
        assert left.dtype == right.dtype != into.dtype
        product = left.float() @ right.float()
        into.copy_(into + product if add else product)

    monkeypatch.setattr(ops, "writes_wider", lambda *_: True)
    monkeypatch.setattr(ops, "write_wider", write_wider)
    monkeypatch.setattr(ops, "CHUNK_LOGITS", {"cpu": 40 * 16})


@pytest.mark.usefixtures("wider_products")
@pytest.mark.parametrize("loss_scale", [1.0, 65536.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [*OPTIONS, "large"])
def test_every_option_with_the_products_of_a_gpu(name: str, dtype: torch.dtype, loss_scale: float) -> None:
    """There the gradient of the logits is rounded, as plain's is. Some class weights and z-losses are large."""
    options = OPTIONS.get(name, {"weight": 1e4 * (torch.rand(40) + 0.5), "z_loss": 3.0})
    if dtype == torch.float16 and loss_scale > 1 and name in ("sum", "none", "large"):
        loss_scale = 16.0  # where plain does not overflow either
    assert_error_rule(lambda: triples(Case(dtype=dtype, options=options, loss_scale=loss_scale)))


@pytest.mark.usefixtures("wider_products")
@pytest.mark.parametrize("classes", [5, 63, 64, 65, 203, 208])
def test_vocabularies_that_tensor_cores_take_in_two_parts(classes: int) -> None:
    assert_error_rule(lambda: triples(Case(classes=classes, dtype=torch.bfloat16)))


@pytest.mark.usefixtures("wider_products")
def test_float16_resolves_a_flat_distribution() -> None:
    """Probabilities of 1/50257 are among float16's subnormal numbers, if they are not multiplied."""

    def draw() -> Any:
        case = Case(tokens=3, hidden=4, classes=50257, dtype=torch.float16, spread=0.01, loss_scale=4096.0)
        of_weight = dict(triples(case))["weight"]
        of_no_target = of_weight[2].abs().amax(1) < 0.01 * of_weight[2].abs().max()
        return [("rows of no target", tuple(gradient[of_no_target] for gradient in of_weight))]

    assert_error_rule(draw)


def test_gradients_that_are_rounded_again_and_again_do_not_pass() -> None:
    def rounded(x: Tensor, *args: Any, **options: Any) -> Tensor:
        x = x.view_as(x)
        for factor in (1.1, 1 / 1.1, 1.3, 1 / 1.3):
            x.register_hook(lambda g, factor=factor: g * factor)
        return leangrad.linear_cross_entropy(x, *args, **options)

    with pytest.raises(AssertionError, match=r"input: .* times that"):
        assert_error_rule(lambda: triples(Case(dtype=torch.bfloat16), rounded))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [*((name,) for name in OPTIONS), *PAIRS], ids=" and ".join)
def test_every_pair_of_options_on_a_gpu(options: tuple[str, ...], dtype: torch.dtype) -> None:
    case = Case(tokens=300, hidden=64, classes=1000, dtype=dtype, device="cuda", options=merged(options))
    assert_error_rule(lambda: triples(case))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "hidden", "classes"),
    [(1, 64, 1000), (33, 8, 1), (33, 8, 2), (31, 7, 13), (4096, 64, 50257), (4096, 256, 128256)],
    ids=str,
)
def test_sizes_on_a_gpu(tokens: int, hidden: int, classes: int, dtype: torch.dtype) -> None:
    assert_error_rule(lambda: triples(Case(tokens, hidden, classes, dtype, "cuda")))
