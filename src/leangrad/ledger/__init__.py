"""The ledger: for every tensor that autograd wants to keep, keep it, share it, or store a recipe.

Read in this order: ``value`` (what backward may ask for, with ``memos``), ``rules`` (how each op replays),
``origins`` (where tensors come from, with ``functions``, our own nodes), ``notes`` (what nodes forget, with
``calls``, ``draws`` and ``changes``), ``region`` (the decision, with ``hooks``, ``cast``, ``seen``, ``waiting``,
``opened`` and ``rest``), ``shape_only`` (what backward reads only the shape of), ``plan`` (where to cut a residual
chain), ``record`` and ``course`` (what one step shows, and how later ones follow it), ``gradients`` and
``scratch`` (what backward holds beside the tensors that were saved), ``checkpoint`` (segments that backward runs
again), ``ledger`` (what is learned from step to step), ``summary``. How a chain is replayed as one kernel: ``fused``,
``pattern``, ``chain``, ``assembly``, ``builder``, ``lowering``, ``exact``.
"""

from leangrad.ledger.ledger import MIN_BYTES, Ledger
from leangrad.ledger.opened import no_regions
from leangrad.ledger.region import Region

__all__ = ["MIN_BYTES", "Ledger", "Region", "no_regions"]
