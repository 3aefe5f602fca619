"""Cross-entropy losses that keep no logits for backward, or only the logits.

fused         `linear_cross_entropy`: the checks of its arguments, and its autograd Function
reference     the expression in torch's own ops that it equals; runs where these ops must be visible, as in a trace
logit_ops     which ops may stand between a projection and its loss without needing the values of the logits
in_parts      `F.cross_entropy` of a lean model, which keeps only the logits
lazy          projections to a vocabulary that are computed only if their values are read: `lean(model, exact=False)`
graph_op      the fused loss as a custom op that a compiled graph can call
"""

from leangrad.loss import in_parts  # noqa: F401  (ledgers call it from now on)
from leangrad.loss.fused import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
