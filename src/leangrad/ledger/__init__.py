"""The ledger: for every tensor that autograd wants to keep, keep it, share it, or store a recipe.

Rooms, from the bottom up; each imports only those above it in this list:

values      what backward may ask for: kept tensors, recipes, views, shapes
origins     where tensors come from: rules of ops, the walk along the graph
observe     what nodes forget: calls, changes in place, random numbers; hooks and checkpoints
decision    keep, share or rebuild: for one saved tensor
learn       what a recorded step shows, the plan, the trace that later steps follow
region      one forward: hooks, function mode and decision together; ``gc_pause`` while it runs
fuse        a chain of recipes as one kernel
ledger      what is learned from step to step; ``summary`` tells it
"""

from leangrad.ledger.ledger import MIN_BYTES, Ledger
from leangrad.ledger.observe.active_region import no_regions
from leangrad.ledger.region import Region

__all__ = ["MIN_BYTES", "Ledger", "Region", "no_regions"]
