"""How each op replays: one line per op in one table.

``rule`` says what a line means; the lines stand by family in ``pointwise``, ``shapes``, ``reductions`` and ``windows``.
Those in ``products`` serve only where a ledger was told to run products again.

[Note: the same bits]
A rule calls the function that made the tensor, on tensors with the same bits and strides, on the same device, in the
same process: then the result has the same bits, whatever torch release is installed. So a rule exists only for ops that
give the same bits twice:

- Recurrent layers have no rule: they are never computed twice. Neither are matrix products, convolutions and attention,
  unless the ledger was told so: [Note: the strides that a product read] says what their bits hang on.
- Random ops have none, except dropout, alone or inside attention: its generator state was noted before it ran.
- What CUDA adds with atomics (index_add, scatter_add, and scans, which may split differently) replays on CPU only.
- Fourier transforms replay on CPU only: a plan on CUDA may depend on where its input lies.
- What lets the last of several writers win (scatter, index_copy) replays on CPU only, where the order is fixed.
- What only chooses elements (max, sort, topk) is gathered by the indices that autograd keeps, not chosen a second time:
  a tie could go the other way.

Sums on a CPU are split by the number of threads: ``torch.set_num_threads`` between forward and backward changes last
bits, in plain PyTorch's backward too.

Names of nodes carry a number (``ClampBackward1`` is clamp with scalars) that a torch release could shift. A rule then
finds constants missing and the tensor is kept; the tests run every rule, so a shift does not go unnoticed.
"""

from leangrad.ledger.origins.rules import (  # noqa: F401  (they fill the tables)
    pointwise,
    products,
    reductions,
    shapes,
    windows,
)
from leangrad.ledger.origins.rules.rule import PRODUCTS, RULES, Rule, rule

__all__ = ["PRODUCTS", "RULES", "Rule", "rule"]
