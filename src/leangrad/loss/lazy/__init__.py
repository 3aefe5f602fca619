"""Logits that are computed only when somebody needs their values.

gradient      the gradient of logits, in the form of those of the projection's arguments
source        the call that was put off, and who has written to what since
logits        the tensor, its place in the autograd graph, and its values
ops           what is done to it without its values: the loss above all
heads         the modules of a model that return it
"""

from leangrad.loss.lazy.heads import describe, heads_of, make_eager, make_lazy, note_sharding

__all__ = ["describe", "heads_of", "make_eager", "make_lazy", "note_sharding"]
