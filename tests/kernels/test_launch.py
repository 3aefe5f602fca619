"""How a compiled kernel is started without Triton's dispatch: what is called in the end, with which arguments."""

from typing import Any

import pytest

pytest.importorskip("triton")

from leangrad.kernels.launch import _last_call

MIDDLE = ("function", "metadata", None, None, None)


class Flat:
    """A launcher that passes the kernel's arguments on one by one, with some of its own before them."""

    global_scratch_size = profile_scratch_size = 0

    def __init__(self) -> None:
        self.started: list[tuple[Any, ...]] = []
        self.launch = lambda *arguments: self.started.append(arguments)

    def __call__(self, x: int, y: int, z: int, stream: int, function: str, *rest: Any) -> None:
        self.launch(x, y, z, stream, function, False, None, *rest)


class Wrapped(Flat):
    """One that hands them on as one tuple."""

    def __call__(self, x: int, y: int, z: int, stream: int, function: str, *rest: Any) -> None:
        self.launch(x, y, z, stream, function, rest)


class Hungry(Flat):
    """One whose kernel needs memory from the host at every launch."""

    global_scratch_size = 16


class Mute:
    """One that does not say how it launches."""

    def __call__(self, *arguments: Any) -> None:
        raise AssertionError("started without being asked to")


def test_the_last_call_gets_what_the_launcher_would_pass_on() -> None:
    run = Flat()
    start, middle = _last_call(run, MIDDLE)
    assert not run.started, "a kernel was started"
    start(7, 1, 1, 5, *middle, 64, 0.5)
    run(7, 1, 1, 5, *MIDDLE, 64, 0.5)
    direct, through = run.started
    assert direct == through
    assert direct[-2:] == (64, 0.5)


@pytest.mark.parametrize("kind", [Wrapped, Hungry, Mute])
def test_any_other_launcher_is_called_itself(kind: type) -> None:
    run = kind()
    assert _last_call(run, MIDDLE) == (run, MIDDLE)
