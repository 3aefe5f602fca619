"""Small models for a comparison without a model of the user's own: those of `leangrad demo`, in smaller sizes."""

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
    """A model that returns its cross entropy: the targets are in the batch, so it can have any number of rows."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a batch."""
        logits: Tensor = self.model(inputs)
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def make(name: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return the model and a batch of the case ``name``, one of `NAMES`."""
    case = _CASES[name]()
    return WithLoss(case.make_model()), case.make_batch(torch.Generator().manual_seed(0))
