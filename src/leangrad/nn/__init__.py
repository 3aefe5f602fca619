"""Modules that keep each activation once: `MLP`, `Dense`, `InPlaceABN`, ..."""

from leangrad.nn.abn import ABN, InPlaceABN, InPlaceABNSync
from leangrad.nn.context import AttentionContext
from leangrad.nn.dense import MLP, Activate, Dense
from leangrad.nn.transformer import TransformerBlock

__all__ = ["ABN", "MLP", "Activate", "AttentionContext", "Dense", "InPlaceABN", "InPlaceABNSync", "TransformerBlock"]
