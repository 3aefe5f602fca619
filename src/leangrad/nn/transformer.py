"""`TransformerBlock`: one autograd node that keeps the fewest bytes for which no product is computed twice.

A block keeps the caller's own x, the outputs of its products (queries, keys and values; the sum after attention; the
hidden layer before its activation), the output of the attention and its logsumexp. Backward computes the outputs of
norms and activations again, into scratch. Calls that the node does not support (hooks on a child, a child that was
replaced, a tensor subclass, `torch.compile`, `torch.func`) run the child modules of the block one after another.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leangrad._torch import has_global_hooks, has_hooks_of_others, has_own_forward
from leangrad.engine.single_node import run
from leangrad.functional import autocast_enabled, runs_plain
from leangrad.ledger.observe.active_region import ledger_saves
from leangrad.ledger.observe.mutation import report_change
from leangrad.nn.blocks.masks import fit_mask
from leangrad.nn.blocks.program import Block, Replay
from leangrad.nn.blocks.steps import Heads
from leangrad.nn.context import AttentionContext
from leangrad.ops.activation import ACTIVATIONS, Activation, resolve
from leangrad.ops.attention import attend, rotary_tables, rotate

__all__ = ["FeedForward", "Film", "ResidualBlock", "SelfAttention", "TransformerBlock"]

# A block whose hidden layer has fewer bytes runs its child modules: there the host time of a node (2.4 ms against 1.4
# ms in plain PyTorch, forward and backward, on a slow ARM core) is worth more than the bytes that it saves.
_NODE_MIN_BYTES = 1 << 20

#: Scale and shift after the first norm, then after the second, each (B, width); Nones if there is no condition.
Film = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
_NO_FILM: Film = (None, None, None, None)


class SelfAttention(nn.Module):
    """Self-attention, with one linear layer for queries, keys and values, and one for the output.

    >>> SelfAttention(8, 2)(torch.ones(1, 3, 8)).shape
    torch.Size([1, 3, 8])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        causal: bool = False,
        dropout: float = 0.0,
        rotary: bool | float = False,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        _check_heads(width, heads, kv_heads, bool(rotary))
        self.heads, self.kv_heads, self.head_width = heads, kv_heads, width // heads
        self.causal, self.dropout = causal, dropout
        self.theta = (10_000.0 if rotary is True else float(rotary)) if rotary else None
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.head_width, bias, device=device, dtype=dtype)
        self.out = nn.Linear(width, width, bias, device=device, dtype=dtype)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns (B, T, width) for x of (B, T, width)."""
        packed = self.qkv(x)
        mask, heads = self.divide(x, mask, packed.dtype)
        q, k, v = heads.split(packed.contiguous())
        if self.theta is not None:
            cos, sin = rotary_tables(x.shape[1], self.head_width, self.theta, packed)
            q, k = (rotate(t.transpose(1, 2), cos, sin).transpose(1, 2) for t in (q, k))
        mixed = attend(q, k, v, mask, heads.causal, heads.dropout)
        y: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return y

    def divide(self, x: Tensor, mask: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, Heads]:
        """Returns the mask as (B or 1, heads or 1, T or 1, T), and the `Heads` that x is divided into."""
        batch, length, _ = x.shape
        mask, causal = fit_mask(mask, (batch, length), self.heads, self.causal, dtype)
        dropout = self.dropout if self.training else 0.0
        return mask, Heads(batch, length, self.heads, self.kv_heads, causal, dropout)

    def extra_repr(self) -> str:
        """Show the heads, and how they attend."""
        return (
            f"heads={self.heads}, kv_heads={self.kv_heads}, causal={self.causal}, dropout={self.dropout}, "
            f"rotary={self.theta or False}"
        )


class FeedForward(nn.Module):
    """Two linear layers with an activation between; for swiglu and geglu the first computes the gates, then the values.

    >>> FeedForward(8, 32, "gelu")(torch.ones(1, 3, 8)).shape
    torch.Size([1, 3, 8])
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        activation: str | Activation = "gelu",
        *,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.record = _resolve(activation)
        self.up = nn.Linear(width, (1 + self.record.gated) * hidden, bias, device=device, dtype=dtype)
        self.down = nn.Linear(hidden, width, bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Returns (..., width) for x of (..., width)."""
        y: Tensor = self.down(self.record.forward(self.up(x), self.record.parameter, None))
        return y

    def extra_repr(self) -> str:
        """Show the activation."""
        return f"activation={self.record}"


class ResidualBlock(nn.Module):
    """The base of `TransformerBlock` and `DiffusionBlock`: makes the children, and runs them, as one node if possible.

    For the arguments see `TransformerBlock`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        hidden: int | None = None,
        activation: str | Activation = "gelu",
        norm: str = "layer",
        causal: bool = False,
        dropout: float = 0.0,
        rotary: bool | float = False,
        bias: bool = True,
        context: AttentionContext | None = None,
        eps: float = 1e-5,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout: expected a probability from 0 to 1, got {dropout}")
        record = _resolve(activation)
        self.width, self.dropout = width, dropout
        _check_heads(width, heads, heads if kv_heads is None else kv_heads, bool(rotary))
        if hidden is None:
            hidden = -(-width // 3) * 8 if record.gated else 4 * width
        if not isinstance(hidden, int) or hidden < 1:
            raise ValueError(f"hidden: expected a positive int, got {hidden!r}")
        self.norm1 = _make_norm(norm, width, eps, bias, place)
        self.attention = SelfAttention(
            width, heads, kv_heads=kv_heads, causal=causal, dropout=dropout, rotary=rotary, bias=bias, **place
        )
        self.norm2 = _make_norm(norm, width, eps, bias, place)
        self.ffn = FeedForward(width, hidden, record, bias=bias, **place)
        if context is not None and context.width != width:
            raise ValueError(f"context: expected one of width {width}, got one of {context.width}")
        self.context = context

    def _run(self, x: Tensor, mask: Tensor | None, film: Film = _NO_FILM) -> Tensor:
        """Run as one autograd node if a gradient is needed and the node supports this call; else run the children."""
        self._check(x)
        if not self._is_as_made() or not self._pays(x) or not _may_be_node(x, mask) or self._leaves_it_to_ledger(x):
            return self._run_plain(x, mask, film)
        parameters = self._own_parameters()
        if not _wants_node(x, parameters, film):
            return self._run_plain(x, mask, film)
        given, x = x, x if self.context is None else self.context(x)
        device_type = x.device.type
        autocast = autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if autocast else x.dtype
        if dtype != x.dtype:  # cast the parameters of linear layers; norms run in the dtype of x
            cast = [None if p is None else p.to(dtype) for p in parameters]
            parameters = (*parameters[:2], *cast[2:6], *parameters[6:8], *cast[8:])
        dropout = self.dropout if self.training else 0.0
        mask, heads = self.attention.divide(x, mask, dtype)
        rows = x.reshape(-1, self.width)
        inputs = (rows, *parameters, mask, *self._rotary(x, dtype), *film)  # in the order of `Inputs`
        norms = (_kind_and_eps(self.norm1), _kind_and_eps(self.norm2))
        replay = Replay(x.device) if dropout or heads.dropout else None
        block = Block(heads, norms, self.ffn.record, dropout, replay)
        program = block if self.context is None else partial(block, observe=partial(_update, self.context, given))
        with torch.autocast(device_type, enabled=False) if autocast else nullcontext():
            return run(program, block.plain, *inputs)

    def _pays(self, x: Tensor) -> bool:
        """Whether the hidden layer for this input is large enough for a node to pay."""
        return x.shape[0] * x.shape[1] * self.ffn.up.out_features * x.element_size() >= _NODE_MIN_BYTES

    def _leaves_it_to_ledger(self, x: Tensor) -> bool:
        """Whether a ledger's region is open in which the child modules keep less than the node.

        On a CPU torch computes attention with dropout as separate ops, which save the attention weights, the dropout
        mask and their product. The node has to keep all that these save; a ledger draws the mask again and multiplies
        again.
        """
        drops = x.is_cpu and self.attention.dropout > 0 and self.training
        return drops and ledger_saves()

    def _rotary(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        theta = self.attention.theta
        if theta is None:
            return None, None
        return rotary_tables(x.shape[1], self.attention.head_width, theta, x.new_empty(0, dtype=dtype))

    def _run_plain(self, x: Tensor, mask: Tensor | None, film: Film = _NO_FILM) -> Tensor:
        """Run the child modules, one after another."""
        scale1, shift1, scale2, shift2 = film
        given, x = x, x if self.context is None else self.context(x)
        y = self.attention(_film(self.norm1(x), scale1, shift1), mask)
        if self.context is not None:
            self.context.update(given, y)
        r = x + self._dropped(y)
        return r + self._dropped(self.ffn(_film(self.norm2(r), scale2, shift2)))

    def _dropped(self, y: Tensor) -> Tensor:
        return F.dropout(y, self.dropout, self.training) if self.dropout else y

    def _own_parameters(self) -> tuple[Tensor | None, ...]:
        """Returns the parameters that the node reads, in the order of `Inputs`."""
        attention, ffn = self.attention, self.ffn
        layers = (self.norm1, attention.qkv, attention.out, self.norm2, ffn.up, ffn.down)
        return tuple(p for layer in layers for p in (layer.weight, getattr(layer, "bias", None)))

    def _is_as_made(self) -> bool:
        """Whether each child has the class that `__init__` gave it, its own forward, and no hooks but leangrad's."""
        attention, ffn = self.attention, self.ffn
        if type(attention) is not SelfAttention or type(ffn) is not FeedForward or has_global_hooks():
            return False
        linears = (attention.qkv, attention.out, ffn.up, ffn.down)
        norms = (self.norm1, self.norm2)
        if any(type(m) is not nn.Linear for m in linears) or not all(_is_known_norm(m, self.width) for m in norms):
            return False
        return not any(has_hooks_of_others(m) or has_own_forward(m) for m in (attention, ffn, *linears, *norms))

    def _check(self, x: Tensor) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(f"x: expected a tensor, got {type(x).__name__}")
        if x.dim() != 3 or x.shape[-1] != self.width:
            raise ValueError(f"x: expected (batch, length, {self.width}), got {tuple(x.shape)}")
        weight = next(self.attention.parameters(), x)
        if x.device != weight.device:
            raise ValueError(
                f"x: expected the device of the weights, {weight.device}, got {x.device}; move x or the module"
            )
        if x.dtype != weight.dtype and not autocast_enabled(x.device.type):
            raise TypeError(
                f"x: expected the dtype of the weights, {weight.dtype}, got {x.dtype}; convert x or the module"
            )

    def extra_repr(self) -> str:
        """Show the dropout of both halves."""
        return f"dropout={self.dropout}" if self.dropout else ""


class TransformerBlock(ResidualBlock):
    """A pre-norm Transformer block that keeps only what cannot be rebuilt without computing a product twice.

    Equals, on the modules of the same names that it consists of::

        r = x + dropout(attention(norm1(x)))        # SDPA; dropout on its weights too
        y = r + dropout(ffn(norm2(r)))              # ffn: down(gelu(up(x)))

    Keeps for backward, for x of (B, T, width), N = B·T, with H heads, K key heads of d = width/H and a hidden width F
    (2F for swiglu): the caller's own x; N·((H + 2K)·d + 2·width + F) elements; and the logsumexp, N·H of float32. With
    dropout also 2·N·width bytes, and what the attention kernel keeps for its dropout. A second backward without
    `retain_graph=True` raises ConsumedError. A block whose hidden layer is below 1 MiB runs in plain PyTorch. So does
    one with dropout on a CPU inside a lean model, whose ledger draws the masks again.

    Args:
        width: of the model.
        heads: number of query heads; divides width.
        kv_heads: number of key and value heads (grouped queries); divides heads. By default equal to heads.
        hidden: width of the hidden layer; 4·width by default, for swiglu and geglu 8/3·width, up to a multiple of 8.
        activation: "gelu", "swiglu", or any of `leangrad.ops.activation` whose backward can run from its input.
        norm: "layer" or "rms".
        causal: each position attends to itself and to earlier positions only.
        dropout: probability, for attention weights and for the outputs of both halves.
        rotary: True for rotary positions with theta 10,000, or a theta.
        bias: whether the four linear layers (and a layer norm) have biases.
        context: an `AttentionContext` of the same width, applied to x first, and updated in training.

    >>> block = TransformerBlock(16, 4, causal=True)
    >>> block(torch.ones(2, 5, 16)).shape
    torch.Size([2, 5, 16])
    >>> list(block.state_dict())[:4]
    ['norm1.weight', 'norm1.bias', 'attention.qkv.weight', 'attention.qkv.bias']
    """

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns (B, T, width) for x of (B, T, width).

        mask: True where a position takes part; a floating mask is added to the scores, so it is 0 there. (B, T) for the
            keys, (B, T, T), or (B or 1, heads or 1, T or 1, T).
        """
        return self._run(x, mask)

    def plain(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute the same on autograd's own ops: the child modules of the block, one after another."""
        self._check(x)
        return self._run_plain(x, mask)


_NORM_KINDS: dict[type, str] = {nn.LayerNorm: "layer", nn.RMSNorm: "rms"}


def _make_norm(kind: str, width: int, eps: float, bias: bool, place: dict[str, Any]) -> nn.LayerNorm | nn.RMSNorm:
    if kind == "layer":
        return nn.LayerNorm(width, eps, bias=bias, **place)
    if kind == "rms":
        return nn.RMSNorm(width, eps, **place)
    raise ValueError(f"norm: expected 'layer' or 'rms', got {kind!r}")


def _is_known_norm(norm: nn.Module, width: int) -> bool:
    return type(norm) in _NORM_KINDS and norm.normalized_shape == (width,) and norm.eps is not None


def _kind_and_eps(norm: nn.Module) -> tuple[str, float]:
    eps: Any = norm.eps
    return _NORM_KINDS[type(norm)], eps


def _resolve(activation: str | Activation) -> Activation:
    """Returns the record of an activation; raises if its backward cannot run from its input, which a block keeps."""
    record = resolve(activation)
    if _runs_from_input(record):
        return record
    names = ", ".join(name for name, one in ACTIVATIONS.items() if _runs_from_input(one))
    raise ValueError(f"activation: expected one of {names}; got {record.name!r}")


def _runs_from_input(record: Activation) -> bool:
    return (record.keeps == "input" or record.zero_where_masked) and not record.float32_in_autocast


def _film(n: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
    return n if scale is None or shift is None else n * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def _update(context: AttentionContext, x: Tensor, y: Tensor) -> None:
    report_change(context.context)
    context.update(x, y.view(x.shape))


def _may_be_node(x: Tensor, mask: Tensor | None) -> bool:
    """Whether a node can run: not in no-grad mode, for an empty x, if the mask requires grad, or in graph capture."""
    if not torch.is_grad_enabled() or x.numel() == 0 or (mask is not None and mask.requires_grad):
        return False
    if mask is not None and runs_plain(mask):
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _wants_node(x: Tensor, parameters: tuple[Tensor | None, ...], film: Film) -> bool:
    """Whether some tensor requires grad, torch's own ops need not be visible, and all tensors have the dtype needed."""
    tensors = [t for t in (x, *parameters, *film) if t is not None]
    if not any(t.requires_grad for t in tensors) or runs_plain(*tensors):
        return False
    # Under autocast a norm runs in the dtype of its input on a CPU, in float32 on CUDA: the same for a float32 input.
    dtype = torch.float32 if autocast_enabled(x.device.type) else x.dtype
    return x.dtype == dtype and all(p is None or p.dtype == dtype for p in parameters)


def _check_heads(width: int, heads: int, kv_heads: int, rotary: bool) -> None:
    for name, value in (("width", width), ("heads", heads), ("kv_heads", kv_heads)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: expected a positive int, got {value!r}")
    if width % heads:
        raise ValueError(f"heads: expected a divisor of width, {width}; got {heads}")
    if heads % kv_heads:
        raise ValueError(f"kv_heads: expected a divisor of heads, {heads}; got {kv_heads}")
    if rotary and width // heads % 2:
        raise ValueError(f"rotary: needs heads of an even width, got {width} / {heads} = {width // heads}")
