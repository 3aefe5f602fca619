"""Small models to compare ways on, for those who have none at hand: those of `leangrad demo`, shrunk."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leangrad.demo import gpt, residual_net, swiglu

__all__ = ["NAMES", "make"]

_CASES = {
    "gpt": lambda: gpt(4, 64, layers=3, width=64),
    "swiglu": lambda: swiglu(4, 64, layers=3, width=64, hidden=192),
    "residual_net": lambda: residual_net(4, 16, 32),
}
NAMES = tuple(_CASES)


class WithLoss(nn.Module):
    """A model and its cross entropy in one call, so that the batch, with its targets, can have any number of rows."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of a batch."""
        logits: Tensor = self.model(inputs)
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def make(name: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The model and a batch of one case."""
    case = _CASES[name]()
    return WithLoss(case.make_model()), case.make_batch(torch.Generator().manual_seed(0))
