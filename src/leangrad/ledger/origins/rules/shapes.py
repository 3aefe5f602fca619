"""Rules for views, and for ops that only move elements: gather, scatter, join, pad."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leangrad.ledger.origins.rules.rule import on_cpu, rule

aten = torch.ops.aten

# ---------------------------------------------------------------------------------------------------------------- views

rule("ViewBackward0", "self", Tensor.view, "@shape")
rule("UnsafeViewBackward0", "self", Tensor.view, "@shape")
rule("ReshapeAliasBackward0", "self", Tensor.reshape, "@shape")
rule("AliasBackward0", "self", Tensor.view, "@shape")
rule("ExpandBackward0", "self", Tensor.expand, "@shape")
rule("TBackward0", "self", Tensor.t)
rule("TransposeBackward0", "self", Tensor.transpose, "dim0", "dim1")
rule("PermuteBackward0", "self", Tensor.permute, "dims")
rule("UnsqueezeBackward0", "self", Tensor.unsqueeze, "dim")
rule("SqueezeBackward0", "self", Tensor.squeeze)
rule("SqueezeBackward1", "self", Tensor.squeeze, "dim")
rule("SqueezeBackward2", "self", Tensor.squeeze, "dim")
rule("SelectBackward0", "self", Tensor.select, "dim", "index")
rule("SliceBackward0", "self", aten.slice.Tensor, "dim", "start", "end", "step")
rule("DiagonalBackward0", "self", Tensor.diagonal, "offset", "dim1", "dim2")
rule("UnfoldBackward0", "self", Tensor.unfold, "dimension", "size", "step")
rule("ViewAsRealBackward0", "self", torch.view_as_real)
rule("ViewAsComplexBackward0", "self", torch.view_as_complex)
rule("ConjBackward0", "self", torch.conj)


rule("SplitBackward0", "self", Tensor.split, "split_size", "dim", numbered=True)
rule("SplitWithSizesBackward0", "self", Tensor.split, "split_sizes", "dim", numbered=True)
rule("UnsafeSplitBackward0", "self", Tensor.split, "split_size", "dim", numbered=True)
rule("UnsafeSplitWithSizesBackward0", "self", Tensor.split, "split_sizes", "dim", numbered=True)
rule("UnbindBackward0", "self", Tensor.unbind, "dim", numbered=True)

# ------------------------------------------------------------------------------------------------ joining and repeating

rule("CatBackward0", "*", torch.cat, "dim")
rule("StackBackward0", "*", torch.stack, "dim")
rule("RepeatBackward0", "self", Tensor.repeat, "repeats")
rule("RollBackward0", "self", torch.roll, "shifts", "dims")
rule("FlipBackward0", "self", torch.flip, "dims")
rule("Rot90Backward0", "self", torch.rot90, "k", "dims")
rule("DiagEmbedBackward0", "self", torch.diag_embed, "offset", "dim1", "dim2")
# A shuffle of one pixel, or by a factor of one, may return the memory of its input without being a view to autograd.
# ``[...]`` makes it a view, which a replay never overwrites.
rule("PixelShuffleBackward0", "self", lambda x, factor: F.pixel_shuffle(x, factor)[...], "upscale_factor")
rule("PixelUnshuffleBackward0", "self", lambda x, factor: F.pixel_unshuffle(x, factor)[...], "downscale_factor")
rule("ChannelShuffleBackward0", "self", lambda x, groups: aten.channel_shuffle(x, groups)[...], "groups")


def _padded(x: Tensor, pad: Any, value: complex | None) -> Tensor:
    """Pad with a constant; ``F.pad`` refuses complex numbers."""
    return torch.constant_pad_nd(x, pad, 0 if value is None else value)


rule("ConstantPadNdBackward0", "self", _padded, "pad", "?value")
for _d in "123":
    rule(f"ReflectionPad{_d}DBackward0", "self", getattr(aten, f"reflection_pad{_d}d").default, "padding")
    rule(f"ReplicationPad{_d}DBackward0", "self", getattr(aten, f"replication_pad{_d}d").default, "padding")

# --------------------------------------------------------------------------------------------- gathering and scattering


def _at(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns ``function(x, dim, index, source)`` with the arguments reordered: ``x, source, dim, index``."""

    def at(x: Tensor, source: Tensor, dim: int, index: Tensor, **options: Any) -> Tensor:
        return function(x, dim, index, source, **options)

    return at


rule("IndexSelectBackward0", "self", torch.index_select, "dim", "index")
rule("GatherBackward0", "self", torch.gather, "dim", "index")
rule("IndexBackward0", "self", aten.index.Tensor, "indices")
rule("TakeBackward0", "self", torch.take, "index")
rule("MaskedSelectBackward0", "self", torch.masked_select, "mask")
rule("EmbeddingBackward0", "weight", lambda weight, indices: F.embedding(indices, weight), "indices")
rule("MaskedScatterBackward0", "self ?source", lambda x, source, mask: x.masked_scatter(mask, source), "mask")
rule("ScatterBackward0", "self ?value", _at(torch.scatter), "dim", "index", when=on_cpu)
rule("ScatterBackward1", "self", torch.scatter, "dim", "index", "?value")
rule("IndexFillBackward0", "self", torch.index_fill, "dim", "index", "?value")
rule("IndexCopyBackward0", "self ?source", _at(torch.index_copy), "dim", "index", when=on_cpu)


# The nodes of scatter_add and index_add save the index only if the tensor that is added needs a gradient.


def _adds_gradient(node: Any) -> bool:
    return on_cpu(node) and node.next_functions[1][0] is not None


def _adds_constant(node: Any) -> bool:
    return on_cpu(node) and node.next_functions[1][0] is None


rule("ScatterAddBackward0", "self src", _at(torch.scatter_add), "dim", "index", when=_adds_gradient)
rule("ScatterAddBackward0", "self ?src", _at(torch.scatter_add), "dim", "?index", when=_adds_constant)
rule("IndexAddBackward0", "self source", _at(torch.index_add), "dim", "index", alpha="alpha", when=_adds_gradient)
rule("IndexAddBackward0", "self ?source", _at(torch.index_add), "dim", "?index", alpha="alpha", when=_adds_constant)
