"""Norm, clip, scale, finite check; and gradients accumulated in a wider dtype than their parameters'."""

import copy
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from leangrad import _torch
from leangrad.packed import PackedGradients, pack_gradients, ranges
from tests.support import same_bits
from tests.support.error_rule import Triple, assert_error_rule


def odd() -> nn.Module:
    """Sizes that leave gaps between the gradients."""
    return nn.Sequential(nn.Linear(7, 13), nn.LayerNorm(13), nn.Linear(13, 3), nn.Conv1d(3, 3, 1))


def filled(model: nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    h = model[2](model[1](model[0](torch.randn(9, 7, generator=generator).to(dtype))))
    y = model[3](h.t().unsqueeze(0))
    y.backward(torch.randn(y.shape, generator=generator).to(dtype))


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("range_bytes", [512, None])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clip_is_torchs_own(range_bytes: int | None, max_norm: float) -> None:
    plain = odd()
    mine = copy.deepcopy(plain)
    packed = pack_gradients(mine, range_bytes=range_bytes)
    filled(plain)
    filled(mine)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
    torch.testing.assert_close(packed.clip_norm_(max_norm), expected)
    for a, b in zip(gradients(mine), gradients(plain), strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(packed.norm(), torch.nn.utils.get_total_norm(gradients(plain)))


def test_error_rule_of_the_norm() -> None:
    def draw() -> Iterator[tuple[str, Triple]]:
        model = nn.Linear(512, 512, bias=False)
        packed = pack_gradients(model)
        model.weight.grad = torch.randn(512, 512)
        truth = model.weight.grad.double().norm()
        yield "norm", (packed.norm(), torch.nn.utils.get_total_norm([model.weight.grad]), truth)

    assert_error_rule(draw, seeds=32)


def test_the_norm_of_bfloat16_gradients_is_float32() -> None:
    model = odd().bfloat16()
    packed = pack_gradients(model)
    filled(model)
    expected = torch.cat([g.double().flatten() for g in gradients(model)]).norm()
    assert packed.norm().dtype == torch.float32
    torch.testing.assert_close(packed.norm().double(), expected, rtol=1e-6, atol=0)


def test_complex_gradients_are_pairs_of_numbers() -> None:
    model = nn.Linear(5, 3, dtype=torch.complex64)
    packed = pack_gradients(model)
    x = torch.randn(4, 5, dtype=torch.complex64)
    model(x).abs().square().sum().backward()
    before = [g.clone() for g in gradients(model)]
    expected = torch.nn.utils.get_total_norm(before)
    torch.testing.assert_close(packed.clip_norm_(0.5), expected.real)
    for a, b in zip(gradients(model), before, strict=True):
        torch.testing.assert_close(a, b * (0.5 / expected))
    assert packed.all_finite()
    model.weight.grad[0, 0] = complex(0, float("inf"))
    assert not packed.all_finite()


@pytest.mark.parametrize("as_tensor", [True, False])
def test_scale(as_tensor: bool) -> None:
    model = odd()
    packed = pack_gradients(model)
    filled(model)
    before = [g.clone() for g in gradients(model)]
    packed.scale_(torch.tensor(0.25) if as_tensor else 0.25)
    for a, b in zip(gradients(model), before, strict=True):
        assert same_bits(a, b * 0.25)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_all_finite(value: float, dtype: torch.dtype) -> None:
    model = odd().to(dtype)
    packed = pack_gradients(model, range_bytes=256)
    assert packed.all_finite()
    filled(model)
    assert packed.all_finite()
    model[2].weight.grad[1, 2] = value
    assert not packed.all_finite()
    model[2].weight.grad[1, 2] = torch.finfo(dtype).max  # its square is not finite, it is
    assert packed.all_finite()


def test_no_gradients_at_all() -> None:
    packed = pack_gradients(odd())
    assert packed.norm() == 0
    assert packed.clip_norm_(1.0) == 0
    assert packed.all_finite()
    assert packed.flats() == []


@pytest.mark.parametrize("has_foreach", [True, False])
def test_many_vectors_in_one_call_or_one_by_one(has_foreach: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_foreach:
        monkeypatch.delattr(torch, "_foreach_norm")
        monkeypatch.delattr(torch, "_foreach_mul_")
    vectors = [torch.randn(n).bfloat16() for n in (5, 64)]
    for order in (2.0, float("inf")):
        expected = [torch.linalg.vector_norm(v.float(), order) for v in vectors]
        torch.testing.assert_close(_torch.norms(vectors, order, torch.float32), expected)
    expected = [v * 0.5 for v in vectors]
    _torch.scale_(vectors, torch.tensor(0.5).bfloat16())
    assert all(same_bits(a, b) for a, b in zip(vectors, expected, strict=True))


def test_another_threads_backward_is_seen() -> None:
    seen: list[bool] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, g: Tensor) -> Tensor:
            inside.set()
            assert go_on.wait(10)
            return g

    def look_and_forget() -> weakref.ref[Tensor]:
        """What the caller holds must not outlive it: looking at frames makes cycles easily."""
        held = torch.ones(3)
        _torch.backward_elsewhere()
        return weakref.ref(held)

    inside, go_on = threading.Event(), threading.Event()
    x = torch.ones(2, requires_grad=True)
    thread = threading.Thread(target=lambda: Look.apply(x).sum().backward())
    seen.append(_torch.backward_elsewhere())
    thread.start()
    assert inside.wait(10)
    seen.append(_torch.backward_elsewhere())
    assert look_and_forget()() is None
    go_on.set()
    thread.join()
    seen.append(_torch.backward_elsewhere())
    assert seen == [False, True, False]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_an_infinite_step_leaves_no_trace(set_to_none: bool) -> None:
    # Clipping an infinite norm makes NaN of everything, also of the gaps; the next step must not see it.
    model = odd()
    packed = pack_gradients(model)
    filled(model)
    model[0].weight.grad[0, 0] = float("inf")
    assert not torch.isfinite(packed.clip_norm_(1.0))
    model.zero_grad(set_to_none=set_to_none)
    filled(model, 1)
    torch.testing.assert_close(packed.norm(), torch.nn.utils.get_total_norm(gradients(model)))


# -- a wider dtype ----------------------------------------------------------------------------------------------


@pytest.fixture(params=["grad_dtype", "without grad_dtype"])
def _grad_dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways: with `Tensor.grad_dtype`, and as on a torch that has none."""
    if request.param == "without grad_dtype":
        monkeypatch.setattr(ranges, "HAS_GRAD_DTYPE", False)
    elif not ranges.HAS_GRAD_DTYPE:
        pytest.skip("this torch has no Tensor.grad_dtype")


def wide_twins(make: Callable[[], nn.Module] = odd) -> tuple[nn.Module, nn.Module, PackedGradients]:
    plain = make().bfloat16()
    mine = copy.deepcopy(plain)
    return plain, mine, pack_gradients(mine, torch.float32)


@pytest.mark.usefixtures("_grad_dtype")
@pytest.mark.parametrize("set_to_none", [True, False])
def test_bfloat16_parameters_accumulate_in_float32(set_to_none: bool) -> None:
    plain, mine, packed = wide_twins()
    for _ in range(2):
        sums = [torch.zeros(p.shape) for p in plain.parameters()]
        for seed in range(4):
            filled(mine, seed)
            plain.zero_grad()
            filled(plain, seed)
            for total, grad in zip(sums, gradients(plain), strict=True):
                total += grad  # each product rounds to bfloat16, the sum over micro-batches to float32
        for total, grad in zip(sums, gradients(mine), strict=True):
            assert grad.dtype == torch.float32
            torch.testing.assert_close(grad, total, rtol=1e-6, atol=1e-6)
        assert {flat.dtype for flat in packed.flats()} == {torch.float32}
        assert len({g.untyped_storage().data_ptr() for g in gradients(mine)}) == 1
        mine.zero_grad(set_to_none=set_to_none)


@pytest.mark.usefixtures("_grad_dtype")
def test_cast_then_any_optimizer_then_on() -> None:
    plain, mine, packed = wide_twins()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (plain, mine)]
    for step in range(3):
        filled(plain, step)
        filled(mine, step)
        assert all(g.dtype == torch.float32 for g in gradients(mine))
        packed.cast_()
        for a, b in zip(gradients(mine), gradients(plain), strict=True):
            assert a.dtype == torch.bfloat16
            assert same_bits(a, b)
        assert packed.report().standing_bytes == 0
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(mine.parameters(), plain.parameters(), strict=True):
        assert same_bits(a, b)


@pytest.mark.usefixtures("_grad_dtype")
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clip_and_cast_in_one_pass(max_norm: float) -> None:
    one, two = wide_twins()[1:], wide_twins()[1:]
    two[0].load_state_dict(one[0].state_dict())
    for seed in range(3):
        filled(one[0], seed)
        filled(two[0], seed)
    norm = one[1].clip_norm_(max_norm)
    clipped = [g.bfloat16() for g in gradients(one[0])]
    assert same_bits(two[1].clip_norm_(max_norm, cast=True), norm)
    for a, b in zip(gradients(two[0]), clipped, strict=True):
        assert a.dtype == torch.bfloat16
        assert same_bits(a, b)
    assert two[1].report().standing_bytes == 0


def test_clip_and_cast_scales_what_needs_no_cast() -> None:
    model = nn.Sequential(nn.Linear(6, 6).bfloat16(), nn.Linear(6, 6))
    packed = pack_gradients(model, torch.float32)
    model[1](model[0](torch.randn(4, 6).bfloat16()).float()).square().sum().backward()
    norm = packed.clip_norm_(0.1, cast=True)
    assert [g.dtype for g in gradients(model)] == [torch.bfloat16] * 2 + [torch.float32] * 2
    assert norm > 0.1
    torch.testing.assert_close(packed.norm(), torch.tensor(0.1), rtol=1e-3, atol=0)


@pytest.mark.usefixtures("_grad_dtype")
def test_a_backward_after_cast_without_zero_grad_goes_on_in_float32() -> None:
    _, mine, packed = wide_twins()
    filled(mine)
    packed.cast_()
    first = [g.float() for g in gradients(mine)]
    filled(mine, 1)
    filled(mine, 1)
    packed.norm()
    reference, other, _ = wide_twins()
    other.load_state_dict(mine.state_dict())
    filled(other, 1)
    for a, b, c in zip(gradients(mine), first, gradients(other), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b + 2 * c, rtol=2e-2, atol=2e-2)
    del reference


@pytest.mark.usefixtures("_grad_dtype")
@pytest.mark.parametrize("all_go", [True, False])
def test_a_wide_gradient_that_is_kept_stays_as_it_is(all_go: bool) -> None:
    _, mine, packed = wide_twins()
    filled(mine)
    kept = [g.detach() for g in gradients(mine)] if all_go else [mine[0].weight.grad.detach()]
    expected = [k.clone() for k in kept]
    for parameter in mine.parameters() if all_go else [mine[0].weight]:
        parameter.grad = None
    filled(mine, 1)
    for a, b in zip(kept, expected, strict=True):
        assert same_bits(a, b)
    assert packed.report()["0.weight"].how == ("written" if all_go else "plain")
    del kept
    mine.zero_grad()
    filled(mine, 2)
    mine[0].weight.grad = None
    filled(mine, 3)
    packed.norm()
    assert len(packed.flats()) == 1


@pytest.mark.usefixtures("_grad_dtype")
def test_float32_masters_step_on_the_wide_gradients() -> None:
    _, mine, packed = wide_twins()
    masters = [p.detach().float().requires_grad_() for p in mine.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=0.1)
    before = [p.detach().clone() for p in mine.parameters()]
    filled(mine)
    packed.clip_norm_(1.0)
    for master, parameter in zip(masters, mine.parameters(), strict=True):
        master.grad = parameter.grad.detach()
    optimizer.step()
    with torch.no_grad():
        for master, parameter in zip(masters, mine.parameters(), strict=True):
            parameter.copy_(master)
    assert all(not same_bits(a, b) for a, b in zip(mine.parameters(), before, strict=True))


@pytest.mark.usefixtures("_grad_dtype")
def test_unpack_returns_to_the_parameters_dtype() -> None:
    _, mine, packed = wide_twins()
    filled(mine)
    packed.unpack()
    assert all(g.dtype == torch.bfloat16 for g in gradients(mine))
    filled(mine, 1)
    torch.optim.AdamW(mine.parameters()).step()


def test_wide_gradients_of_mixed_parameters() -> None:
    model = nn.Sequential(nn.Linear(6, 6).bfloat16(), nn.Linear(6, 6))
    packed = pack_gradients(model, torch.float32)
    for _ in range(2):
        model[1](model[0](torch.randn(4, 6).bfloat16()).float()).square().sum().backward()
    assert {g.dtype for g in gradients(model)} == {torch.float32}
    packed.cast_()
    assert [g.dtype for g in gradients(model)] == [torch.bfloat16] * 2 + [torch.float32] * 2
