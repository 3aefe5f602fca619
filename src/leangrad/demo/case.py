"""What the demo needs to know of a model, and the data that two of the three share."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["Case", "chained_tokens"]


@dataclass(frozen=True)
class Case:
    """A model and its data.

    - `make_model`: a new model, drawn from torch's global generator.
    - `make_batch`: inputs and the classes to be told from them; the loss is their cross-entropy.
    """

    name: str
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]


def chained_tokens(batch: int, length: int, vocabulary: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Token ids (batch, length), and the token after each: seven further on nine times in ten, else any."""
    surprises = torch.randint(vocabulary, (batch, length + 1), generator=generator)
    surprised = torch.rand(batch, length + 1, generator=generator) < 0.1
    tokens = [surprises[:, 0]]
    for position in range(1, length + 1):
        follower = (tokens[-1] + 7) % vocabulary
        tokens.append(torch.where(surprised[:, position], surprises[:, position], follower))
    chain = torch.stack(tokens, dim=1)
    return chain[:, :-1].contiguous(), chain[:, 1:].contiguous()
