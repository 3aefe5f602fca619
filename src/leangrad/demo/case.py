"""`Case`, a model of the demo with its data, and the token data that two of the three models share."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["Case", "chained_tokens"]


@dataclass(frozen=True)
class Case:
    """A model and its data.

    - `make_model`: makes a new model, with weights drawn from torch's global generator.
    - `make_batch`: draws inputs and their target classes from a generator; the loss is the cross-entropy.
    """

    name: str
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]


def chained_tokens(batch: int, length: int, vocabulary: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return token ids (batch, length), and the id that follows each of them.

    Nine times in ten the next id is 7 larger, modulo `vocabulary`; else it is drawn at random.
    """
    surprises = torch.randint(vocabulary, (batch, length + 1), generator=generator)
    surprised = torch.rand(batch, length + 1, generator=generator) < 0.1
    tokens = [surprises[:, 0]]
    for position in range(1, length + 1):
        follower = (tokens[-1] + 7) % vocabulary
        tokens.append(torch.where(surprised[:, position], surprises[:, position], follower))
    chain = torch.stack(tokens, dim=1)
    return chain[:, :-1].contiguous(), chain[:, 1:].contiguous()
