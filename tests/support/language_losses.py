"""Losses of logits, as language models compute them."""

import torch
import torch.nn.functional as F
from torch import Tensor


def wide(logits: Tensor) -> Tensor:
    """As models cast them; the truth stays what it is."""
    return logits if logits.dtype == torch.float64 else logits.float()


def shifted(logits: Tensor, ids: Tensor) -> Tensor:
    """The loss of hand-written GPTs: each token is told by those before it."""
    rows = logits[..., :-1, :].contiguous()
    return F.cross_entropy(wide(rows.view(-1, logits.size(-1))), ids[..., 1:].reshape(-1))


def as_transformers(logits: Tensor, ids: Tensor) -> Tensor:
    """Labels are padded, and the sum is divided by a number that the trainer knows."""
    labels = F.pad(ids, (0, 1), value=-100)[..., 1:].contiguous()
    logits = wide(logits).view(-1, logits.size(-1))
    return F.cross_entropy(logits, labels.view(-1).to(logits.device), ignore_index=-100, reduction="sum") / 57
