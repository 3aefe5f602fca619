"""Modules that keep each activation once: `MLP`, `Dense`, `InPlaceABN`, ..."""

from leangrad.nn.abn import ABN, InPlaceABN, InPlaceABNSync
from leangrad.nn.dense import MLP, Activate, Dense

__all__ = ["ABN", "MLP", "Activate", "Dense", "InPlaceABN", "InPlaceABNSync"]
