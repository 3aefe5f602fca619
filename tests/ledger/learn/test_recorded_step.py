"""What the recorded step tells the policy: what each op of backward reads, and the gradients alive by then."""

import sys

import pytest
import torch
import torch.nn.functional as F

import leangrad


def gradients_of(ledger: leangrad.ledger.Ledger) -> list[tuple[int, int]]:
    """Of each op of backward: the bytes of what it reads, and of the gradients alive by then."""
    assert ledger._recorded is not None
    values = ledger._recorded.graph().values
    return [(sum(values[i].nbytes for i in op.inputs), op.scratch) for op in values if op.is_backward]


def test_readers_of_a_recorded_step_hold_the_gradients_of_their_own_nodes() -> None:
    """Backward comes to them from the last on; each is given the gradient of its output and writes those of its inputs.

    The gradient of ``h`` from the second waits while the first one runs.
    """
    wide = torch.randn(8, 64, requires_grad=True)
    square, *weights = (torch.randn(n, 64, requires_grad=True) for n in (64, 4, 2))
    ledger = leangrad.saving(min_bytes=0)
    with ledger:
        h = (wide @ square).sin()  # saves the product
        y = F.linear(h, weights[0]).sum() + F.linear(h, weights[1]).sum()  # each saves h and its weight
    y.backward()
    assert ledger._recorded is not None
    values = ledger._recorded.graph().values
    found = [op.scratch for op in values if op.is_backward and any(values[i].inputs for i in op.inputs)]
    h_bytes, scalar = 8 * 64 * 4, 4  # the gradient of a sum is a scalar, expanded; both products read the same one
    # Beside those of h: that of a weight.
    assert found == [scalar + h_bytes + 2 * 64 * 4, scalar + 2 * h_bytes + 4 * 64 * 4]


def test_a_gradient_that_waits_at_a_join_is_alive_all_the_while() -> None:
    x, nbytes = torch.randn(64, 64, requires_grad=True), 64 * 64 * 4
    for program, most in ((lambda h: h.sin().sin().sin(), 2), (lambda h: h + h.sin().sin().sin(), 3)):
        ledger = leangrad.saving(min_bytes=0)
        with ledger:
            y = (program(x @ x) * 2.0).sum()
        y.backward()
        assert max(g for n, g in gradients_of(ledger) if n == nbytes) // nbytes == most


def test_nodes_that_read_nothing_are_moments_of_their_own() -> None:
    """The backward of a selection writes a whole map, which is added to that of another one, and reads nothing."""
    x, nbytes = torch.randn(64, 4, requires_grad=True), 64 * 64 * 4
    ledger = leangrad.saving(min_bytes=0)
    with ledger:
        h = x.sin() @ x.t()
        y = h.select(0, 1).sin().sum() + h.select(0, 2).sin().sum()
    y.backward()
    (at,) = (at for at, (n, _) in enumerate(gradients_of(ledger)) if n == 0)
    found = [g // nbytes for _, g in gradients_of(ledger)]
    assert found[at] == 2
    assert max(found[:at] + found[at + 1 :]) == 1


def test_an_output_that_the_loss_does_not_use_has_no_gradient() -> None:
    x, nbytes = torch.randn(64, 64, requires_grad=True), 64 * 64 * 4
    ledger = leangrad.saving(min_bytes=0)
    with ledger:
        h = x @ x
        used, unused = h.sin(), h.cos()
    used.sum().backward()
    first = gradients_of(ledger)[0]
    assert first == (nbytes, 2 * nbytes)
    ledger = leangrad.saving(min_bytes=0)
    with ledger:
        h = x @ x
        used, unused = h.sin(), h.cos()
    (used + unused).sum().backward()
    assert max(g for _, g in gradients_of(ledger)) == 3 * nbytes


def test_what_autograd_has_saved_is_held_although_backward_did_not_come_to_it() -> None:
    """Its sine is then rebuilt from it, and not kept in its stead: autograd would hold both."""
    x = torch.randn(8, 8, requires_grad=True)
    ledger = leangrad.saving(min_bytes=0)

    def stop(grad: torch.Tensor) -> None:
        raise InterruptedError

    for _ in range(2):
        with ledger:
            first, second = (x @ x).sin(), (x @ x).sin()
            losses = (first @ x).sum(), (second @ x).sum()
        second.register_hook(stop)
        losses[0].backward()
        with pytest.raises(InterruptedError):
            losses[1].backward()
    sines = [decision for decision in ledger.decisions or () if decision is not None and decision.op == "SinBackward0"]
    assert [decision.keeps for decision in sines] == [False, False]


def test_what_a_tensor_is_rebuilt_from_is_looked_for_once_on_every_way() -> None:
    """Sums of a tensor and of itself, moved, of which autograd saves none: twelve of them are 4,096 ways to the first.

    Each way was gone; thirty of them would have taken hours.
    """
    x, w = torch.randn(8, 64), torch.randn(64, 64, requires_grad=True)
    ledger = leangrad.saving(min_bytes=0)
    calls = []

    def count(frame, event, _):
        if event == "call" and frame.f_code.co_name == "_sources":
            calls.append(frame)

    with ledger:
        h = x @ w
        y = h.sin()  # saves the product
        for _ in range(12):
            h = h + h.roll(1, 0)
        y = y + h.sin()
        sys.setprofile(count)
    sys.setprofile(None)
    y.sum().backward()
    assert ledger.totals().rebuilt_bytes == h.nbytes
    assert 0 < len(calls) < 10


def test_what_nothing_is_rebuilt_from_any_more_is_not_counted() -> None:
    """The product is kept for the copies of it; a budget with room for these keeps them, and not the product."""

    class Copies(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(256, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).repeat(1, 4))

    model, x = leangrad.lean(Copies(), budget="1GB"), torch.randn(512, 64)
    kept = []
    for _ in range(3):
        model(x).sum().backward()
        kept.append(leangrad.ledger_of(model).bytes_for_backward())
    copies = 4 * 512 * 256
    assert kept == [(copies, 0), (copies, copies // 4), (copies, copies)]
