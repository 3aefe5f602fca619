"""Losses that keep no logits.

fused         `linear_cross_entropy`: what it takes, and the autograd Function behind it
reference     the plain expression that it equals, which runs where torch's own ops have to be seen
"""

from leangrad.loss.fused import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
