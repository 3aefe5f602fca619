"""What a case of the zoo is, and the losses that the cases share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Every tag that a case may carry, and what it promises.
TAGS = {
    "conv": "convolutions",
    "attention": "softmax attention, fused or written out",
    "recurrent": "a loop over time, in C++ or in Python",
    "batchnorm": "running statistics that every forward changes",
    "inplace": "in-place ops on activations",
    "views": "in-place ops on views of activations",
    "dropout": "random numbers in forward",
    "scalar": "a Python scalar that is another one at each forward",
    "routing": "shapes that depend on the data",
    "tied": "one parameter in two places",
    "shared": "one module called more than once",
    "frozen": "parameters that need no gradient",
    "custom": "an autograd Function of the user's own",
    "hf": "a model of `transformers`",
}


@dataclass(frozen=True)
class Case:
    """A model that somebody trains, with a batch and a loss.

    `make` and `batch` draw from torch's global generator and from nothing else: `torch.manual_seed` decides them.
    `loss` draws nothing: its targets follow from the shape of the output.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Any, ...]]
    loss: Callable[[Any], Tensor]
    tags: frozenset[str]

    def step(self, model: nn.Module, batch: tuple[Any, ...]) -> Tensor:
        """The loss of one forward pass."""
        return self.loss(model(*batch))


def images(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    """A batch of one float tensor."""
    return lambda: (torch.randn(shape),)


def tokens(rows: int, length: int, vocabulary: int) -> Callable[[], tuple[Tensor, ...]]:
    """A batch of token ids."""
    return lambda: (torch.randint(vocabulary, (rows, length)),)


def targets(logits: Tensor) -> Tensor:
    """One class for each row of (rows, classes) logits."""
    rows, classes = logits.shape
    return (torch.arange(rows, device=logits.device) * 7 + 3) % classes


def cross_entropy(logits: Tensor) -> Tensor:
    """Cross-entropy of (..., classes) logits against fixed classes."""
    rows = logits.reshape(-1, logits.shape[-1])
    return F.cross_entropy(rows, targets(rows))


def masked_cross_entropy(logits: Tensor) -> Tensor:
    """The same where only every fourth row has a target, as in masked language models."""
    rows = logits.reshape(-1, logits.shape[-1])
    labels = targets(rows)
    hidden = torch.arange(len(labels), device=labels.device) % 4 != 0
    return F.cross_entropy(rows, labels.masked_fill(hidden, -100))


def mean_square(output: Tensor) -> Tensor:
    """Squared error against a fixed wave of the output's shape."""
    wave = torch.arange(output.numel(), device=output.device, dtype=torch.float32).sin()
    return F.mse_loss(output, wave.view(output.shape).to(output.dtype))
