"""The table of rules: how each op is replayed, one line per op.

``rule`` explains a line. The lines are grouped by family in ``pointwise``, ``shapes``, ``reductions`` and ``windows``.
The rules in ``products`` are used only where a ledger may run products again.

[Note: the same bits]
A rule calls the function that made the tensor, on tensors with the same bits and strides, on the same device, in the
same process: then the result has the same bits, whatever torch release is installed. So a rule exists only for ops that
give the same bits twice:

- Recurrent layers have no rule: they are never computed twice. Neither are matrix products, convolutions and attention,
  unless the ledger may run products again: [Note: the strides that a product read] says what their bits depend on.
- Random ops have no rule, except dropout, alone or inside attention: the generator's state is recorded before it runs.
- Ops that CUDA computes with atomics (index_add, scatter_add), and scans, which CUDA may split in another way, are
  replayed on a CPU only.
- Fourier transforms are replayed on a CPU only: a plan on CUDA may depend on the address of its input.
- Ops in which the last of several writers wins (scatter, index_copy) are replayed on a CPU only, where the order is
  fixed.
- Ops that only choose elements (max, sort, topk) are replayed as a gather by the indices that autograd keeps. To choose
  a second time could break a tie the other way.

Sums on a CPU are split by the number of threads: ``torch.set_num_threads`` between forward and backward changes last
bits, in plain PyTorch's backward too.

Names of nodes carry a number (``ClampBackward1`` is clamp with scalars) that a torch release could shift. A rule then
finds constants missing and the tensor is kept. The tests run every rule, so they show such a shift.
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
