"""Training on packed gradients is training on plain ones: optimizers, scalers, checkpoints, averages, the zoo."""

import copy
import io
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leangrad.packed import PackedGradients, pack_gradients
from tests.support import same_bits
from tests.support.error_rule import Triple, assert_error_rule
from tests.zoo import CASES, Case

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw amsgrad maximize": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, maximize=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 17), nn.LayerNorm(17), nn.GELU(), nn.Linear(17, 8), nn.Linear(8, 5, bias=False))


def twins() -> tuple[nn.Module, nn.Module, PackedGradients]:
    plain = network()
    mine = copy.deepcopy(plain)
    return plain, mine, pack_gradients(mine)


def loss_of(model: nn.Module, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    y = model(torch.randn(6, 8, generator=generator))
    return (y - torch.randn(6, 5, generator=generator)).square().mean()


def assert_equal_models(mine: nn.Module, plain: nn.Module) -> None:
    for (name, a), (_, b) in zip(mine.named_parameters(), plain.named_parameters(), strict=True):
        assert same_bits(a, b), name


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_trajectory_is_bitwise_plain(name: str, set_to_none: bool) -> None:
    plain, mine, packed = twins()
    start = [p.detach().clone() for p in plain.parameters()]
    for model in (plain, mine):
        optimizer = OPTIMIZERS[name](model.parameters())
        for step in range(4):
            # One micro-batch, and zeros that are added to are exact too: 0 + x is x.
            optimizer.zero_grad(set_to_none=set_to_none)
            loss_of(model, step).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    assert_equal_models(mine, plain)
    assert all(not same_bits(a, b) for a, b in zip(mine.parameters(), start, strict=True))
    assert len(packed.flats()) == 1


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_accumulation_follows_plain_and_is_as_near_to_float64(micro_batches: int) -> None:
    def gradient_of(model: nn.Module) -> Tensor:
        start = torch.initial_seed()
        for index in range(micro_batches):
            generator = torch.Generator().manual_seed(10 * start + index)
            x, t = torch.randn(6, 8, generator=generator), torch.randn(6, 5, generator=generator)
            dtype = next(model.parameters()).dtype
            (model(x.to(dtype)) - t.to(dtype)).square().mean().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    def draw() -> Iterator[tuple[str, Triple]]:
        plain, mine, packed = twins()
        exact = copy.deepcopy(plain).double()
        yield "gradient", (gradient_of(mine), gradient_of(plain), gradient_of(exact))
        assert packed.report()["0.weight"].counts == {"written": micro_batches}

    assert_error_rule(draw)


def test_lbfgs_runs_backward_as_often_as_it_likes() -> None:
    plain, mine, _ = twins()
    for model in (plain, mine):
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

        def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, 0)
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
    assert_equal_models(mine, plain)


def test_grad_scaler_with_an_overflow() -> None:
    plain, mine, packed = twins()
    scales = []
    for model in (plain, mine):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=2)
        for step in range(8):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, step)
            scaler.scale(loss.float() * 1e4).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert scales[0] == scales[1] < 2.0**120
    assert_equal_models(mine, plain)
    assert packed.report()["0.weight"].how == "written"


def test_averages_and_swaps_of_weights() -> None:
    plain, mine, packed = twins()
    averages = []
    for model in (plain, mine):
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(3):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
        model.load_state_dict(average.module.state_dict())
        loss_of(model, 9).backward()
        averages.append(average)
    assert_equal_models(averages[1], averages[0])
    assert_equal_models(mine, plain)
    for a, b in zip(mine.parameters(), plain.parameters(), strict=True):
        assert same_bits(a.grad, b.grad)
    assert all(p.grad is None for p in averages[1].parameters())
    packed.norm()


def test_saved_and_loaded_in_the_middle_of_training() -> None:
    plain, mine, _ = twins()
    results = []
    for model in (plain, mine):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loss_of(model, 0).backward()
        optimizer.step()
        buffer = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
        buffer.seek(0)
        saved = torch.load(buffer, weights_only=True)
        later = network()
        later.load_state_dict(saved["model"])
        if model is mine:
            pack_gradients(later)
        later_optimizer = torch.optim.AdamW(later.parameters(), lr=0.01)
        later_optimizer.load_state_dict(saved["optimizer"])
        for step in range(2):
            later_optimizer.zero_grad()
            loss_of(later, step).backward()
            later_optimizer.step()
        results.append(later)
    assert_equal_models(results[1], results[0])


def test_a_model_loaded_in_place_keeps_its_packing() -> None:
    plain, mine, packed = twins()
    state = network().state_dict()
    for model in (plain, mine):
        loss_of(model, 0).backward()
        model.load_state_dict(state)
        loss_of(model, 1).backward()
    for a, b in zip(mine.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert len(packed.flats()) == 1


# -- the zoo ----------------------------------------------------------------------------------------------------


def cut(batch: Any) -> Any:
    """The first two samples: gradients need no more, and the zoo's batches are made for memory."""
    if isinstance(batch, Tensor):
        return batch[:2]
    if isinstance(batch, dict):
        return {key: cut(value) for key, value in batch.items()}
    return type(batch)(cut(item) for item in batch) if isinstance(batch, tuple | list) else batch


def used_more_than_once(model: nn.Module, run: Callable[[], object]) -> set[str]:
    """Parameters whose gradient is a sum over several uses, which a product adds to in another order."""
    calls: Counter[nn.Module] = Counter()
    handles = [m.register_forward_hook(lambda m, i, o: calls.update([m])) for m in model.modules()]
    run()
    for handle in handles:
        handle.remove()
    owners = Counter(p for m in model.modules() for p in m.parameters(recurse=False))
    often = {p for m in model.modules() if calls[m] > 1 for p in m.parameters(recurse=False)}
    return {name for name, p in model.named_parameters() if p in often or owners[p] > 1}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.sampled(4)
def test_zoo(case: Case) -> None:
    torch.manual_seed(0)
    plain = case.make()
    mine = copy.deepcopy(plain)
    packed = pack_gradients(mine)
    batch = cut(case.batch())

    def step(model: nn.Module, seed: int) -> None:
        torch.manual_seed(seed)
        case.step(model, batch).backward()

    several = used_more_than_once(plain, lambda: step(plain, 1))
    step(mine, 1)
    for (name, a), (_, b) in zip(mine.named_parameters(), plain.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None and name not in several:
            assert same_bits(a.grad, b.grad), name
    step(plain, 2)
    step(mine, 2)
    for (name, a), (_, b) in zip(mine.named_parameters(), plain.named_parameters(), strict=True):
        if a.grad is not None:
            scale = b.grad.abs().max().item()
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5 * scale + 1e-8, msg=name)
    rows = packed.report().rows
    assert all(row.how in {"written", "added", "none"} for row in rows)
    matrices = {f"{n}.weight" for n, m in mine.named_modules() if type(m) in (nn.Linear, nn.Embedding)}
    written = {row.name for row in rows if row.how == "written"}
    called = {row.name for row in rows if row.how != "none"}
    assert (matrices & called) <= written | USED_BY_OTHERS.get(case.name, set())


#: Weights of Linear and Embedding modules that the model hands to another op, and never to the module itself.
USED_BY_OTHERS: dict[str, set[str]] = {
    "bert": {"places.weight"},
    "hf_mamba": {f"model.backbone.layers.{index}.mixer.dt_proj.weight" for index in range(2)},
}
