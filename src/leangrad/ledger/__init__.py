"""The ledger: for every tensor that autograd wants to keep, keep it, share it, or store a recipe.

Read in this order: ``value`` (what backward may ask for), ``rules`` (how each op replays), ``origins`` (where tensors
come from), ``notes`` (what nodes forget, with ``calls``, ``draws`` and ``changes``), ``region`` (the decision),
``plan`` (where to cut a residual chain), ``ledger`` (what is learned from step to step).
"""

from leangrad.ledger.ledger import MIN_BYTES, Ledger
from leangrad.ledger.region import Region, no_regions

__all__ = ["MIN_BYTES", "Ledger", "Region", "no_regions"]
