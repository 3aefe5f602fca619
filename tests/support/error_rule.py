"""The error rule, for results that are not plain's bit for bit.

Over at least 8 seeds the relative RMS error of each result against float64 is at most 1.1 times plain's in half
precision and twice plain's in float32; and no single tensor's is above three times that of plain's over the seeds, if
it has enough elements not to be off by luck. A result is never asked to be nearer to float64 than one rounding to its
dtype, which is the one that plain gives it: sums of few bits may be exact by luck.

One draw of "our error is at most plain's" is a coin flip: it fails on the next processor, which adds in another order.
"""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

SEEDS = 8
TIMES = {torch.float16: 1.1, torch.bfloat16: 1.1, torch.float32: 2.0}
TIMES_OF_ONE, ELEMENTS_OF_ONE = 3.0, 16
# The relative RMS of one rounding, in units of eps. It is uniform within half an ulp, which is eps/m of a number with
# mantissa m; and mantissas are spread over 1 to 2 as 1/m is.
ROUNDING = math.sqrt(3 / (8 * math.log(2)) / 12)

Triple = tuple[Tensor, Tensor, Tensor]  # ours, plain's, and the truth in float64


def assert_error_rule(
    draw: Callable[[], Iterable[tuple[str, Triple]]], *, times: float | None = None, seeds: int = SEEDS
) -> None:
    """Check the named results of `draw`, which is called once under each seed; `times` stands for the rule's own."""
    ours: dict[str, list[float]] = {}
    plain: dict[str, list[float]] = {}
    dtypes: dict[str, torch.dtype] = {}
    sizes: dict[str, int] = {}
    for seed in range(seeds):
        torch.manual_seed(seed)
        for name, (mine, other, truth) in draw():
            assert mine.shape == other.shape == truth.shape
            sizes[name], dtypes[name] = truth.numel(), other.dtype
            truth = truth.detach().double()
            rounding = ROUNDING * torch.finfo(other.dtype).eps
            ours.setdefault(name, []).append(relative_error(mine, truth))
            plain.setdefault(name, []).append(max(relative_error(other, truth), rounding))
    assert ours, "nothing was compared"
    for name, errors in ours.items():
        assert len(errors) == seeds
        mine, other = _rms(errors), _rms(plain[name])
        allowed = times or TIMES[dtypes[name]]
        found = f"{name}: {mine:.2e}, plain {other:.2e}, {mine / other if other else math.inf:.2f} times that"
        assert mine <= allowed * other, f"{found} over {seeds} seeds, {allowed} allowed"
        assert sizes[name] < ELEMENTS_OF_ONE or max(errors) <= TIMES_OF_ONE * other, f"{found}; one: {max(errors):.2e}"


def relative_error(found: Tensor, truth: Tensor) -> float:
    """|found − truth| / |truth| by the 2-norm; a truth of nothing but zeros must be found exactly."""
    error, size = (found.detach().double() - truth).norm().item(), truth.norm().item()
    assert math.isfinite(error), "a result is not finite"
    return error / size if size else (0.0 if error == 0.0 else math.inf)


def named(ours: Iterable[Tensor], plain: Iterable[Tensor], truth: Iterable[Tensor]) -> list[tuple[str, Triple]]:
    """What `draw` gives, for results that are known by their place."""
    return [(f"result {n}", triple) for n, triple in enumerate(zip(ours, plain, truth, strict=True))]


def _rms(errors: list[float]) -> float:
    return math.sqrt(sum(e * e for e in errors) / len(errors))
