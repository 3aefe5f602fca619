"""Find the largest number of rows that fits, in few trials, if the memory grows about linearly with the rows."""

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Trial", "largest_fit"]

_FINE = 128  # up to this many rows the result is exact; above, it may be less by one part in this many
_GUESSES = 6  # after this many trials every second trial halves the remaining interval
_GROWTH = 4  # a trial has at most this many times as many rows as the largest number that is known to fit


@dataclass(frozen=True)
class Trial:
    """The result of a trial with ``rows`` rows.

    - `fits`: whether they fit into the memory.
    - `needs`: the bytes that a step with this many rows needs; None if that is not known.
    - `peak_bytes`: the highest peak of its steps; None if they ran out of memory or the budget was refused.
    """

    rows: int
    fits: bool
    needs: int | None
    peak_bytes: int | None = None


def largest_fit(attempt: Callable[[int], Trial], memory: int, start: int, most: int) -> int:
    """Return the largest number of rows up to `most` that fits into `memory`; 0 if not even one row fits.

    The first trial is `start`, the second twice or half of it. From then on the line through two trials gives the next
    number. If there is no line, the number is doubled, or the interval between a number that fits and one that does not
    is halved; growing steps and halving are also used when the line was wrong several times. The returned number was
    tried.

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
    if fails > most:  # all trials have fitted
        straight = min(len(trials) - 2, 20)
        rows = 2 * fits if guess is None else max(guess, fits + 2**straight if straight > 0 else 0)
        return max(fits + 1, min(rows, _GROWTH * fits, most))
    if guess is None or (len(trials) >= _GUESSES and len(trials) % 2):
        guess = (fits + fails) // 2
    return max(fits + 1, min(guess, fails - 1))


def _by_line(trials: list[Trial], memory: int) -> int | None:
    """Return the rows at which the line through two trials reaches `memory`; None if there is no such line.

    The two trials are those with the needs closest to `memory`, one below and one above it if possible. Trials that are
    further away may lie on another line: the peak is the maximum of several, such as that of the gradients and that of
    the activations.
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
