"""The largest number that fits, in few trials, where what is needed grows nearly like a line."""

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Trial", "largest_fit"]

_FINE = 128  # up to so many rows the answer is exact, above it to one part in so many
_GUESSES = 6  # after so many trials every second one halves what is left
_GROWTH = 4  # no guess goes further than this beyond what is known to fit


@dataclass(frozen=True)
class Trial:
    """What a trial with so many rows has shown: whether they fit, and the bytes they need, if that is known.

    - `peak_bytes`: what its steps took, if they ran.
    """

    rows: int
    fits: bool
    needs: int | None
    peak_bytes: int | None = None


def largest_fit(attempt: Callable[[int], Trial], memory: int, start: int, most: int) -> int:
    """The largest number of rows up to `most` that fits into `memory`; 0 if not even one does.

    The first trial is `start`, the second twice or half of it. From then on two trials make a line, which says where
    the next one should be; where there is no line, or it has been wrong several times, the numbers are doubled or
    halved. What is returned has been tried.

    >>> largest_fit(lambda rows: Trial(rows, 7 * rows + 30 <= 1000, 7 * rows + 30), 1000, start=8, most=10_000)
    138
    """
    trials: list[Trial] = []
    fits, fails = 0, most + 1
    while fails - fits > max(1, fits // _FINE):
        trial = attempt(_next(trials, memory, start, fits, fails, most))
        trials.append(trial)
        if trial.fits:
            fits = trial.rows
        else:
            fails = trial.rows
    return fits


def _next(trials: list[Trial], memory: int, start: int, fits: int, fails: int, most: int) -> int:
    if not trials:
        return start
    guess = _by_line(trials, memory)
    if fails > most:  # all have fitted
        straight = min(len(trials) - 2, 20)
        rows = 2 * fits if guess is None else max(guess, fits + 2**straight if straight > 0 else 0)
        return max(fits + 1, min(rows, _GROWTH * fits, most))
    if guess is None or (len(trials) >= _GUESSES and len(trials) % 2):
        guess = (fits + fails) // 2
    return max(fits + 1, min(guess, fails - 1))


def _by_line(trials: list[Trial], memory: int) -> int | None:
    """Where the line through the two trials next to `memory` reaches it; None if there is no line.

    They are on both sides of it if possible: a peak is the highest of several lines, such as that of the gradients and
    that of the activations, so trials that are further off may lie on another line.
    """
    known = sorted((trial.rows, trial.needs) for trial in trials if trial.needs is not None)
    below = [point for point in known if point[1] <= memory]
    above = [point for point in known if point[1] > memory]
    near = [*below[-1:], *above[:1]] if below and above else (below[-2:] or above[:2])
    if len(near) < 2:
        return None
    (low, low_needs), (high, high_needs) = near
    slope = (high_needs - low_needs) / (high - low)
    return None if slope <= 0 else int(low + (memory - low_needs) / slope)
