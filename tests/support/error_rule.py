"""The error rule, for results that are not plain's bit for bit.

Over at least 8 seeds the relative RMS error of each result against float64 is at most 1.1 times plain's in half
precision and twice plain's in float32; and no single tensor's is above three times that of plain's over the seeds.
A result is never asked to be nearer to float64 than float64 rounded to its dtype.

One draw of "our error is at most plain's" is a coin flip: it fails on the next processor, which adds in another order.
"""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

SEEDS = 8
TIMES = {torch.float16: 1.1, torch.bfloat16: 1.1, torch.float32: 2.0}
TIMES_OF_ONE = 3.0

Triple = tuple[Tensor, Tensor, Tensor]  # ours, plain's, and the truth in float64


def assert_error_rule(
    draw: Callable[[], Iterable[tuple[str, Triple]]], *, times: float | None = None, seeds: int = SEEDS
) -> None:
    """Check the named results of `draw`, which is called once under each seed; `times` stands for the rule's own."""
    ours: dict[str, list[float]] = {}
    plain: dict[str, list[float]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for seed in range(seeds):
        torch.manual_seed(seed)
        for name, (mine, other, truth) in draw():
            assert mine.dtype == other.dtype
            dtypes[name] = mine.dtype
            truth = truth.detach()
            rounded = relative_error(truth.to(mine.dtype), truth)
            ours.setdefault(name, []).append(relative_error(mine, truth))
            plain.setdefault(name, []).append(max(relative_error(other, truth), rounded))
    assert ours, "nothing was compared"
    for name, errors in ours.items():
        assert len(errors) == seeds
        mine, other = _rms(errors), _rms(plain[name])
        allowed = times or TIMES[dtypes[name]]
        found = f"{name}: {mine:.2e}, plain {other:.2e}, {mine / other if other else math.inf:.2f} times that"
        assert mine <= allowed * other, f"{found} over {seeds} seeds, {allowed} allowed"
        assert max(errors) <= max(TIMES_OF_ONE, allowed) * other, f"{found}; one is at {max(errors):.2e}"


def relative_error(found: Tensor, truth: Tensor) -> float:
    """|found − truth| / |truth| by the 2-norm; a truth of nothing but zeros must be found exactly."""
    error, size = (found.detach().double() - truth).norm().item(), truth.norm().item()
    assert math.isfinite(error), "a result is not finite"
    return error / size if size else (0.0 if error == 0.0 else math.inf)


def _rms(errors: list[float]) -> float:
    return math.sqrt(sum(e * e for e in errors) / len(errors))
