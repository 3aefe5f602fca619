"""Modules that keep each activation for backward only once: `MLP`, `Dense`, `InPlaceABN`, ..."""

from leangrad.nn.abn import ABN, InPlaceABN, InPlaceABNSync
from leangrad.nn.context import AttentionContext
from leangrad.nn.convert import convert_abn
from leangrad.nn.dense import MLP, Activate, Dense
from leangrad.nn.diffusion import DiffusionBlock
from leangrad.nn.ssm import RGLRU, MambaBlock, RGLRUBlock
from leangrad.nn.transformer import TransformerBlock

__all__ = [
    "ABN",
    "MLP",
    "RGLRU",
    "Activate",
    "AttentionContext",
    "Dense",
    "DiffusionBlock",
    "InPlaceABN",
    "InPlaceABNSync",
    "MambaBlock",
    "RGLRUBlock",
    "TransformerBlock",
    "convert_abn",
]
