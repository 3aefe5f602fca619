"""Lazy logits: the output of a projection to a vocabulary, computed only when its values are read.

gradient      the gradient of lazy logits, stored as the gradients of the projection's arguments
source        the deferred call of the projection, and the detection of in-place changes since then
logits        the tensor class `LazyLogits`, its place in the autograd graph, and its values
ops           the ops on lazy logits that need no values: above all the loss
heads         the modules of a model that return lazy logits
"""

from leangrad.loss.lazy.heads import describe, heads_of, make_eager, make_lazy, note_sharding

__all__ = ["describe", "heads_of", "make_eager", "make_lazy", "note_sharding"]
