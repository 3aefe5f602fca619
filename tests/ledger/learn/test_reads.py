"""What the recorded step tells the policy: what each op of backward reads, and the gradients alive by then."""

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
