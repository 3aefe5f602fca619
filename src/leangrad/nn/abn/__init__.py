"""Batch norm and its activation as one layer that keeps one map.

Read in this order: ``layers`` (what a user puts into a model), ``autograd`` (what a layer keeps, and whose buffers its
backward writes to), ``invertibility`` (which channels cannot be inverted and keep their input), ``recipe`` (how an
output is rebuilt for others outside the ledger), ``rule`` (the same inside it), ``pool`` (max pooling after
such a layer).
"""

from leangrad.nn.abn.layers import ABN, InPlaceABN, InPlaceABNSync

__all__ = ["ABN", "InPlaceABN", "InPlaceABNSync"]
