"""Batch norm and its activation as one layer that keeps one map for backward.

Read in this order: ``layers`` (the modules for users), ``autograd`` (what a layer keeps, and which buffers its backward
overwrites), ``invertibility`` (which channels cannot be inverted and keep their input), ``recipe`` (how the output is
rebuilt for other ops outside a region of the ledger), ``rule`` (the same inside a region), ``pool`` (max pooling after
such a layer).
"""

from leangrad.nn.abn.layers import ABN, InPlaceABN, InPlaceABNSync

__all__ = ["ABN", "InPlaceABN", "InPlaceABNSync"]
