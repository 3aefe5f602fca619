"""What the policy is told of the tensors of a step: what each is rebuilt from, and which products that runs."""

import sys

import torch
import torch.nn.functional as F

import leangrad
from leangrad.ledger import Ledger
from leangrad.policy.graph import Value


def items(products: int) -> list[Value]:
    """The tensors of ``exp(relu((x @ a).sin() @ b))`` that autograd saves."""
    x, a, b = (torch.randn(8, 8, requires_grad=True) for _ in range(3))
    ledger = Ledger(residual_depth=0, min_bytes=0, products=products)
    with ledger:
        y = F.relu((x @ a).sin() @ b).exp()
    y.sum().backward()
    assert ledger._recorded is not None
    assert ledger._recorded.step is not None
    return list(ledger._recorded.step.items)


def test_products_that_are_rebuilt_are_heavy_and_not_fixed() -> None:
    product, sine, relu, exp = items(8)
    assert (product.products, product.is_fixed, product.inputs) == (1, False, ())
    assert (sine.products, sine.is_fixed, sine.inputs) == (0, False, (0,))
    # The second product is no item: it is run on the way to relu.
    assert (relu.products, relu.is_fixed, relu.inputs) == (1, False, (1,))
    assert (exp.products, exp.is_fixed, exp.inputs) == (0, False, (2,))


def test_without_products_none_is_run() -> None:
    assert [item.products for item in items(0)] == [0] * 4
    assert items(0)[0].is_fixed


def test_a_product_beyond_the_limit_is_kept() -> None:
    """The first product is within it, and what the second one makes is not."""
    assert [item.is_fixed for item in items(1)] == [False, False, True, False]


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
