"""What the policy is told of products that recipes run again."""

import torch
import torch.nn.functional as F

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
