"""Cross entropy of logits, some rows at a time: torch's own kernels and bits, without tensors of the logits' size.

`F.cross_entropy` keeps the log-probabilities of all rows, and its backward allocates two more tensors of that size: the
gradient of the log-probabilities, which is zero but for one element in each row, and the gradient of the logits. A row
of each depends only on that row of the logits and its target. So here they are computed for some rows at a time, and
only the gradient of the logits exists as a whole. The cost is that the log-probabilities are computed twice.

[Note: the bits of a row] Every op is the one that torch runs, on the same values, and the result of a row does not
depend on the other rows: the softmax kernels assign a row to a block, a warp or a vector loop. On a GPU they choose by
the length of a row, and by whether it begins at a multiple of 16 bytes. So a part begins at a multiple of 16 rows,
where its rows are aligned as in the whole tensor. An element is written after the sums of its row are known, by the
thread that reads it, so a result may be written over its input. Only the loss is summed over rows. torch's own kernel
does that, from the one log-probability of each row that it would have read.

[Note: dtypes] Under autocast half-precision logits are widened on the way: on a CPU before the softmax; on a GPU their
log-probabilities are widened, and the gradient of these is rounded back. The caller passes both dtypes in `Terms`.

[Note: the rows of a part] A GPU processes a row on one of its multiprocessors. With fewer than a few rows for each,
most of them are idle, however large a row is.

Nothing here uses autograd.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["DEVICES", "MEAN", "SUM", "Terms", "backward", "forward", "is_large"]

MEAN, SUM = 1, 2  # torch's numbers for reductions
DEVICES = ("cpu", "cuda")
PART_BYTES = 1 << 20  # of a part's logits, on a CPU: results of one op should be in cache when the next reads them
LARGE_BYTES = 32 << 20  # of the logits, on a GPU: smaller logits are not worth the launches
ROWS = 16  # see [Note: the bits of a row]
FEWEST, MOST = 2, 4  # rows of a part for each multiprocessor of a GPU
PARTS = 8  # number of parts of logits with few rows, on a GPU
IGNORED = -100
aten = torch.ops.aten


def is_large(x: Tensor) -> bool:
    """Whether the logits have so many parts that processing them one after another saves memory."""
    if x.is_cpu:
        return x.shape[0] >= 4 * _rows(x)
    return x.nbytes >= LARGE_BYTES and x.shape[0] >= 2 * _rows(x)


class Terms(NamedTuple):
    """How a loss is computed."""

    softmax: torch.dtype  # that of the log-probabilities: see [Note: dtypes]
    loss: torch.dtype  # that of the loss
    reduction: int = MEAN
    ignore_index: int = IGNORED


def forward(x: Tensor, target: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """Returns the loss of logits, and the number of rows that count.

    x: (rows, classes); target: the class of each row, or ``terms.ignore_index``.
    """
    counts = target != terms.ignore_index
    read = torch.where(counts, target, 0)
    found = torch.empty(x.shape[0], 1, dtype=terms.softmax, device=x.device)
    for part in _parts(x):
        probabilities = aten._log_softmax.default(x[part].to(terms.softmax), 1, False)
        torch.gather(probabilities, 1, read[part, None], out=found[part])
    place = torch.where(counts, 0, IGNORED)
    loss, total = aten.nll_loss_forward.default(found.to(terms.loss), place, None, terms.reduction, IGNORED)
    return loss, total


def backward(grad: Tensor, x: Tensor, target: Tensor, total: Tensor, terms: Terms, into: Tensor) -> Tensor:
    """Write the gradient of the logits into ``into``, which may be ``x`` itself; ``grad`` is that of the loss."""
    softmax, loss, reduction, ignore_index = terms
    for part in _parts(x):
        place = into[part]
        if x.dtype == softmax:  # log-probabilities go into `into`, and the gradient is written over them
            found = aten._log_softmax.out(x[part], 1, False, out=place)
        else:
            found = aten._log_softmax.default(x[part].to(softmax), 1, False)
        chosen = aten.nll_loss_backward.default(
            grad, found.to(loss), target[part], None, reduction, ignore_index, total
        ).to(softmax)
        if x.dtype == softmax:
            aten._log_softmax_backward_data.out(chosen, found, 1, softmax, out=place)
        else:
            place.copy_(aten._log_softmax_backward_data.default(chosen, found, 1, softmax))
    return into


def _rows(x: Tensor) -> int:
    """Returns the number of rows of a part: see [Note: the rows of a part]."""
    if x.is_cpu:
        rows = PART_BYTES // max(1, x.shape[1] * x.itemsize)
    else:
        processors = torch.cuda.get_device_properties(x.device).multi_processor_count
        rows = max(FEWEST * processors, min(MOST * processors, x.shape[0] // PARTS))
    return max(ROWS, rows // ROWS * ROWS)


def _parts(x: Tensor) -> Iterator[slice]:
    rows = _rows(x)
    return (slice(first, first + rows) for first in range(0, x.shape[0], rows))
