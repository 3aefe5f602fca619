"""Views, and ops that only move elements."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.rule_cases.case import WIDE, table
from tests.support.rule_cases.pointwise import pair

aten = torch.ops.aten


def rotate_half(x: Tensor) -> Tensor:
    """As it is written in Hugging Face's models."""
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def rotary(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (q * cos) + (rotate_half(q) * sin)


def repeat_kv(x: Tensor, n: int) -> Tensor:
    batch, heads, length, width = x.shape
    return x[:, :, None].expand(batch, heads, n, length, width).reshape(batch, heads * n, length, width)


VIEWS = {
    "View0": lambda h, t: h.view(2, 4, 48),
    "View0 flatten": lambda h, t: h.flatten(1),
    "View0 unflatten": lambda h, t: h.unflatten(-1, (2, -1)),
    "UnsafeView0": lambda h, t: h.transpose(1, 2).reshape(2, 6, 32),
    "ReshapeAlias0": lambda h, t: aten._reshape_alias(h, (2, 4, 48), (192, 48, 1)),
    "Alias0": lambda h, t: aten.alias(h),
    "Expand0": lambda h, t: h[:, :1].expand(-1, 3, -1, -1),
    "Expand0 new dim": lambda h, t: h.cos().expand(3, 2, 4, 6, 8),
    "T0": lambda h, t: h[0, 0].t(),
    "Transpose0": lambda h, t: h.transpose(-1, 1),
    "Transpose0 mT": lambda h, t: h.mT,
    "Permute0": lambda h, t: h.permute(0, 2, -1, 1),
    "Unsqueeze0": lambda h, t: h.unsqueeze(-1),
    "Unsqueeze0 none": lambda h, t: h[:, None],
    "Squeeze0": lambda h, t: h[:1].squeeze(),
    "Squeeze1": lambda h, t: h[..., :1].squeeze(-1),
    "Squeeze2": lambda h, t: h[:1, :, :, :1].squeeze((0, -1)),
    "Select0": lambda h, t: h[:, -1],
    "Select0 method": lambda h, t: h.select(-2, 1),
    "Slice0": lambda h, t: h[:, 1:3],
    "Slice0 step": lambda h, t: h[..., ::2],
    "Slice0 ends": lambda h, t: h[..., -3:-1],
    "Slice0 narrow": lambda h, t: h.narrow(-1, 2, 4),
    "Diagonal0": lambda h, t: h.diagonal(1, -2, -1),
    "Unfold0": lambda h, t: h.unfold(-1, 3, 2),
    "Split0": lambda h, t: h.split(3, -1),
    "Split0 chunk": lambda h, t: h.cos().chunk(3, dim=-1),
    "Mul0 gated chunks": lambda h, t: (lambda a, b: F.silu(a) * b)(*h.chunk(2, dim=-1)),
    "SplitWithSizes0": lambda h, t: h.split([1, 5, 2], dim=-1),
    "UnsafeSplit0": lambda h, t: h.unsafe_split(3, -1)[1:],
    "UnsafeSplitWithSizes0": lambda h, t: h.unsafe_split_with_sizes([3, 5], -1),
    "Unbind0": lambda h, t: h.unbind(1)[1:3],
    "Unbind0 qkv": lambda h, t: h.view(2, 4, 2, 3, 8).permute(3, 0, 2, 1, 4).unbind(0),
}

COMPLEX_VIEWS = {
    "ViewAsReal0": lambda h, t: torch.view_as_real(pair(h) * 2),
    "ViewAsComplex0": lambda h, t: torch.view_as_complex(h.unflatten(-1, (-1, 2))) + 1,
    "ViewAsComplex0 rotary": lambda h, t: torch.view_as_real(
        torch.view_as_complex(h.reshape(*h.shape[:-1], -1, 2)) * torch.polar(t.const(6, 4), t.const(6, 4))
    ).flatten(3),
    "Conj0": lambda h, t: (pair(h) * 2).conj() + 1j,
    "Select0 real": lambda h, t: (pair(h) * 2).real + (pair(h) * 3).imag,
}

MOVES = {
    "Cat0": lambda h, t: torch.cat([h, t.leaf(2, 1, 6, 8), h.cos()], 1),
    "Cat0 const": lambda h, t: torch.cat((t.const(2, 1, 6, 8), h), dim=1),
    "Cat0 keyword": lambda h, t: torch.concat(tensors=(h, t.const(2, 4, 6, 1)), dim=-1),
    "Cat0 dtypes": lambda h, t: torch.cat([h, t.leaf(2, 4, 6, 8, dtype=torch.float64)]),
    "Cat0 rotary": lambda h, t: rotary(h, t.const(6, 8), t.const(6, 8)),
    "Stack0": lambda h, t: torch.stack([h, h.cos(), t.const(2, 4, 6, 8)], -1),
    "Expand0 repeat kv": lambda h, t: repeat_kv(h, 3),
    "Clone0 repeat interleave": lambda h, t: h.repeat_interleave(2, dim=1),
    "IndexSelect0 repeat interleave": lambda h, t: h.repeat_interleave(torch.tensor([1, 2, 0, 3]), dim=1),
    "Repeat0": lambda h, t: h.repeat(1, 2, 1, 1),
    "Repeat0 tile": lambda h, t: torch.tile(h[0], (2, 1, 1, 2)),
    "Roll0": lambda h, t: torch.roll(h, shifts=(-1, 2), dims=(-2, -1)),
    "Roll0 flat": lambda h, t: h.roll(3),
    "Flip0": lambda h, t: h.flip(-1, 1),
    "Flip0 lr": lambda h, t: torch.fliplr(h),
    "Rot900": lambda h, t: torch.rot90(h, 1, (-2, -1)),
    "DiagEmbed0": lambda h, t: torch.diag_embed(h, 1, 0, -1),
    "PixelShuffle0": lambda h, t: F.pixel_shuffle(h, 2),
    "PixelUnshuffle0": lambda h, t: F.pixel_unshuffle(h, 2),
    "ChannelShuffle0": lambda h, t: F.channel_shuffle(h, 2),
    "ConstantPadNd0": lambda h, t: F.pad(h, (1, 2, 0, 1)),
    "ConstantPadNd0 value": lambda h, t: F.pad(h, (1, 2), value=-0.5),
    "ConstantPadNd0 negative zero": lambda h, t: F.pad(h, (1, 2), value=-0.0),
    "ConstantPadNd0 place": lambda h, t: F.pad(h, (1, 2), "constant", 3),
    "ConstantPadNd0 crop": lambda h, t: F.pad(h, (-1, 2, -1, -1)),
    "ConstantPadNd0 function": lambda h, t: torch.constant_pad_nd(h, (1, 1)),
    "ConstantPadNd0 module": lambda h, t: torch.nn.ZeroPad2d(1)(h),
    "ReflectionPad1D0": lambda h, t: F.pad(h[0], (2, 1), mode="reflect"),
    "ReflectionPad2D0": lambda h, t: F.pad(h, (2, 1, 1, 1), mode="reflect"),
    "ReflectionPad3D0": lambda h, t: F.pad(h[None], (2, 1, 1, 1, 1, 0), mode="reflect"),
    "ReplicationPad1D0": lambda h, t: F.pad(h[0], (2, 1), mode="replicate"),
    "ReplicationPad2D0": lambda h, t: F.pad(h, (2, 1, 1, 1), mode="replicate"),
    "ReplicationPad3D0": lambda h, t: F.pad(h[None], (2, 1, 1, 1, 1, 0), mode="replicate"),
}

GATHERS = {
    "IndexSelect0": lambda h, t: h.index_select(-1, t.index(8, 5)),
    "Gather0": lambda h, t: h.gather(-1, t.index(8, 2, 4, 6, 3)),
    "Gather0 take along": lambda h, t: torch.take_along_dim(h, t.index(8, 2, 4, 6, 3), dim=-1),
    "Index0": lambda h, t: h[:, t.index(4, 3)],
    "Index0 two": lambda h, t: h[t.index(2, 5), :, t.index(6, 5)],
    "Index0 mask": lambda h, t: h[t.mask(2, 4)],
    "Index0 rows and columns": lambda h, t: h[0, 0][torch.arange(6), t.index(8, 6)],
    "Take0": lambda h, t: h.take(t.index(300, 7)),
    "MaskedSelect0": lambda h, t: h.masked_select(t.mask(6, 8)),
    "Embedding0": lambda h, t: F.embedding(t.index(10, 2, 4, 6), t.leaf(10, 8)) + h,
    "Embedding0 padding": lambda h, t: F.embedding(t.index(10, 2, 4, 6), t.leaf(10, 8), padding_idx=0) + h,
    "MaskedScatter0": lambda h, t: h.masked_scatter(t.mask(6, 8), t.leaf(2, 4, 6, 8)),
    "MaskedScatter0 const": lambda h, t: h.masked_scatter(t.mask(6, 1) & (torch.arange(8) < 1), t.const(48)),
    "Scatter0": lambda h, t: h.scatter(-1, t.index(8, 2, 4, 6, 3), t.leaf(2, 4, 6, 3)),
    "Scatter0 const": lambda h, t: h.scatter(-1, t.index(8, 2, 4, 6, 3), t.const(2, 4, 6, 3)),
    "Scatter1": lambda h, t: torch.scatter(h, -1, t.index(8, 2, 4, 6, 3), -1e4),
    "Scatter1 keyword": lambda h, t: h.scatter(-1, t.index(8, 2, 4, 6, 3), value=2),
    "Scatter1 inplace": lambda h, t: (h * 2).scatter_(-1, t.index(8, 2, 4, 6, 3), float("-inf")),
    "ScatterAdd0": lambda h, t: h.scatter_add(0, t.index(2, 2, 4, 6, 8), t.leaf(2, 4, 6, 8)),
    "ScatterAdd0 const": lambda h, t: h.scatter_add(0, t.hold(t.index(2, 2, 1, 2, 8)), t.const(2, 1, 6, 8)),
    "IndexFill0": lambda h, t: h.index_fill(-1, t.index(8, 3), -2.5),
    "IndexCopy0": lambda h, t: h.index_copy(-1, t.order(8)[:3], t.leaf(2, 4, 6, 3)),
    "IndexCopy0 const": lambda h, t: h.index_copy(-1, t.order(8)[:3], t.const(2, 4, 6, 3)),
    "IndexAdd0": lambda h, t: h.index_add(1, t.index(4, 7), t.leaf(2, 7, 6, 8), alpha=0.3),
    "IndexAdd0 const": lambda h, t: h.index_add(1, t.hold(t.index(4, 2)), t.const(2, 2, 6, 8)),
    "IndexAdd0 inplace": lambda h, t: (h * 2).index_add_(1, t.hold(t.index(4, 2)), t.const(2, 2, 6, 8), alpha=2),
}

SHAPES = (*table(VIEWS), *table(COMPLEX_VIEWS, dtypes=WIDE), *table(MOVES), *table(GATHERS))
