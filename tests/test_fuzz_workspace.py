"""Random borrows, releases, holds and clears, against a model of the rules that has no memory in it."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leangrad.errors import StaleError
from leangrad.workspace import Workspace
from tests.support.fuzz import fuzz_settings

NAN = float("nan")


class Model:
    """The rules, once more, with no memory in it: buffers are dicts."""

    def __init__(self):
        self.buffers = {}
        self.allocations = self.high_water = 0

    @property
    def bytes(self):
        return sum(8 * torch.Size(b["capacity"]).numel() for row in self.buffers.values() for b in row)

    def borrow(self, name, shape):
        row = self.buffers.setdefault((name, len(shape)), [])
        free = [b for b in row if not b["lent"]]
        power = tuple(next(1 << k for k in range(9) if 1 << k >= size) for size in shape)
        if not free:
            row.append({"capacity": power, "lent": True, "holds": [], "fresh": True})
            return self._allocated(row[-1])
        buffer = free[0]
        buffer["lent"] = True
        exceeds = any(p > c for p, c in zip(power, buffer["capacity"], strict=True))
        falls = all(size * 4 <= c for size, c in zip(shape, buffer["capacity"], strict=True))
        if falls and power != buffer["capacity"]:
            buffer["capacity"] = power
        elif exceeds:
            buffer["capacity"] = tuple(max(p, c) for p, c in zip(power, buffer["capacity"], strict=True))
        elif not any(hold["alive"] for hold in buffer["holds"]):
            return buffer
        return self._allocated(buffer)

    def _allocated(self, buffer):
        buffer["holds"] = []
        self.allocations += 1
        self.high_water = max(self.high_water, self.bytes)
        return buffer

    def clear(self):
        self.buffers = {}


def graph(t):
    return torch.ones_like(t, requires_grad=True) * t


HOLDS = [  # how something is held, and how its value is read later
    (lambda t: t, lambda held: held),
    (lambda t: t.view(-1)[:1], lambda held: held),
    (lambda t: t.detach(), lambda held: held),
    (lambda t: t.numpy(), torch.from_numpy),
    (lambda t: graph(t).sum(), lambda held: held.grad_fn.next_functions[0][0]._saved_other),
]

sizes = st.integers(1, 70)
actions = st.one_of(
    st.tuples(st.just("borrow"), st.sampled_from("ab"), st.lists(sizes, min_size=1, max_size=2).map(tuple)),
    st.tuples(st.just("release"), st.integers(0, 9), st.just(None)),
    st.tuples(st.just("hold"), st.integers(0, 9), st.sampled_from(range(len(HOLDS)))),
    st.tuples(st.just("drop"), st.integers(0, 9), st.just(None)),
    st.tuples(st.just("clear"), st.just(0), st.just(None)),
)


def ranges(borrows):
    """The bytes that each live borrow covers."""
    return sorted((t.data_ptr(), t.data_ptr() + t.numel() * 8) for t in (b.tensor for b in borrows))


@pytest.mark.fuzz
@fuzz_settings(150, 5000)
@given(st.lists(actions, min_size=5, max_size=40))
def test_random_sequences_follow_the_model(sequence):
    """No two live borrows overlap, what is held keeps its value, no NaN leaks, and every allocation is foreseen."""
    workspace, model = Workspace(), Model()
    live, held, number = [], [], 0
    for action, which, what in sequence:
        if action == "borrow":
            number += 1
            borrowed = workspace.borrow(which, what, dtype=torch.float64)
            # A product that must not read what it writes over.
            column = torch.full((borrowed.tensor.numel(), 1), float(number), dtype=torch.float64)
            torch.mm(column, torch.ones(1, 1, dtype=torch.float64), out=borrowed.tensor.view(-1, 1))
            live.append((borrowed, model.borrow(which, what), number))
        elif action == "release" and live:
            borrowed, buffer, _ = live.pop(which % len(live))
            if not any(hold["alive"] for hold in buffer["holds"]):
                borrowed.tensor.fill_(NAN)
            borrowed.release()
            buffer["lent"] = False
            with pytest.raises(StaleError):
                _ = borrowed.tensor
        elif action == "hold" and live:
            borrowed, buffer, value = live[which % len(live)]
            hold = {"alive": True}
            buffer["holds"].append(hold)
            make, read = HOLDS[what]
            held.append((make(borrowed.tensor), read, hold, value))
        elif action == "drop" and held:
            held.pop(which % len(held))[2]["alive"] = False
        elif action == "clear":
            workspace.clear()
            model.clear()
        covered = ranges([borrowed for borrowed, _, _ in live])
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(covered))
        assert all(borrowed.tensor.eq(value).all() for borrowed, _, value in live)
        assert all(read(h).eq(value).all() for h, read, _, value in held)
        found = (workspace.allocations, workspace.bytes, workspace.high_water)
        assert found == (model.allocations, model.bytes, model.high_water)
