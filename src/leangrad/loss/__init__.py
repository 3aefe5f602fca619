"""Losses that keep no logits.

fused         `linear_cross_entropy`: what it takes, and the autograd Function behind it
reference     the plain expression that it equals, which runs where torch's own ops have to be seen
logit_ops     which ops may stand between a projection and its loss, so that nobody needs the logits
graph_op      the fused loss as an op that a compiled graph can call
"""

from leangrad.loss.fused import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
