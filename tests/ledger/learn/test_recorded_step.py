"""What later steps do, by the data of the recorded one: what they keep."""

import torch

import leangrad


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
