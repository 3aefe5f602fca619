"""A Transformer block as a program on a tape, and the same on autograd's own ops.

    r   = x + dropout(out(attend(qkv(norm1(x)))))
    y   = r + dropout(down(activation(up(norm2(r)))))

with `norm(x) * (1 + scale) + shift` for the norms where a condition is given. Four products and one attention; see
`leangrad.nn.blocks.steps` for what each keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from leangrad.engine.tape import Tape, Var
from leangrad.nn.blocks.input_transform import Activated, Normed
from leangrad.nn.blocks.steps import Heads, attend, keep_addend, project
from leangrad.ops.activation import Activation
from leangrad.ops.attention import attend as attend_plainly
from leangrad.ops.attention import rotate
from leangrad.ops.norm import NORMS

__all__ = ["Block", "Inputs", "Replay"]


class Inputs(NamedTuple):
    """Everything that a block reads, in the order in which `single_node.run` is given it; x is (B·T, D)."""

    x: Tensor
    norm1_weight: Tensor | None
    norm1_bias: Tensor | None
    qkv_weight: Tensor
    qkv_bias: Tensor | None
    out_weight: Tensor
    out_bias: Tensor | None
    norm2_weight: Tensor | None
    norm2_bias: Tensor | None
    up_weight: Tensor
    up_bias: Tensor | None
    down_weight: Tensor
    down_bias: Tensor | None
    mask: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    scale1: Tensor | None = None
    shift1: Tensor | None = None
    scale2: Tensor | None = None
    shift2: Tensor | None = None


class _Vars(NamedTuple):
    """The same on a tape."""

    x: Var
    norm1_weight: Var | None
    norm1_bias: Var | None
    qkv_weight: Var
    qkv_bias: Var | None
    out_weight: Var
    out_bias: Var | None
    norm2_weight: Var | None
    norm2_bias: Var | None
    up_weight: Var
    up_bias: Var | None
    down_weight: Var
    down_bias: Var | None
    mask: Var | None
    cos: Var | None
    sin: Var | None
    scale1: Var | None
    shift1: Var | None
    scale2: Var | None
    shift2: Var | None


@dataclass(frozen=True)
class Block:
    """What a block is beside its tensors. Called with a tape it is the program; `plain` takes the tensors."""

    heads: Heads
    norms: tuple[tuple[str, float], tuple[str, float]]  # the kind and eps of both
    activation: Activation
    dropout: float
    replay: Replay | None = None  # where there is dropout

    def __call__(self, tape: Tape, *variables: Var | None, observe: Callable[[Tensor], None] | None = None) -> Var:
        """Four products and an attention; `observe` is shown what the attention adds."""
        v = _Vars(*variables)  # type: ignore[arg-type]
        (kind1, eps1), (kind2, eps2) = self.norms
        norm1 = Normed(NORMS[kind1], eps1, v.norm1_weight, v.norm1_bias, v.scale1, v.shift1)
        norm2 = Normed(NORMS[kind2], eps2, v.norm2_weight, v.norm2_bias, v.scale2, v.shift2)
        rotary = None if v.cos is None or v.sin is None else (v.cos, v.sin)
        qkv = project(tape, v.x, v.qkv_weight, v.qkv_bias, prepare=norm1)
        mixed = attend(tape, qkv, self.heads, v.mask, rotary)
        r = project(
            tape,
            mixed,
            v.out_weight,
            v.out_bias,
            residual=v.x,
            dropout=self.dropout,
            observe=observe,
            addend_may_do=True,
        )
        h = project(tape, r, v.up_weight, v.up_bias, prepare=norm2)
        y = project(
            tape,
            h,
            v.down_weight,
            v.down_bias,
            prepare=Activated(self.activation),
            residual=r,
            dropout=self.dropout,
            shape=torch.Size((self.heads.batch, self.heads.length, v.x.shape[1])),
        )
        keep_addend(tape, r)
        return y

    def plain(self, *tensors: Tensor | None) -> Tensor:
        """The same numbers, the same draws included, on autograd's own ops, each of which has a second derivative.

        Torch's fused attentions have none, so the one that is written out in ATen runs. It draws other numbers for
        dropout on CUDA than they do: there the fused one runs, and a second derivative is refused by torch.
        """
        i = Inputs(*tensors)  # type: ignore[arg-type]
        written_out = i.x.device.type == "cpu" or not self.heads.dropout
        with (
            nullcontext() if self.replay is None else self.replay.again(),
            sdpa_kernel(SDPBackend.MATH) if written_out else nullcontext(),
        ):
            return self._plain(i)

    def _plain(self, i: Inputs) -> Tensor:
        (kind1, eps1), (kind2, eps2) = self.norms
        n1 = _normalize(kind1, i.x, i.norm1_weight, i.norm1_bias, eps1)
        qkv = F.linear(_film(n1, i.scale1, i.shift1).to(i.qkv_weight.dtype), i.qkv_weight, i.qkv_bias)
        if i.cos is not None and i.sin is not None:
            turned = rotate(self.heads.turning(qkv), i.cos, i.sin).flatten(0, 1).flatten(1)
            qkv = torch.cat([turned, qkv[:, turned.shape[1] :]], 1)
        mixed = attend_plainly(*self.heads.split(qkv), i.mask, self.heads.causal, self.heads.dropout)
        mixed = mixed.transpose(1, 2).reshape(i.x.shape[0], -1)
        r = i.x + F.dropout(F.linear(mixed, i.out_weight, i.out_bias), self.dropout)
        n2 = _normalize(kind2, r, i.norm2_weight, i.norm2_bias, eps2)
        h = F.linear(_film(n2, i.scale2, i.shift2).to(i.up_weight.dtype), i.up_weight, i.up_bias)
        f = self.activation.forward(h, self.activation.parameter, None)
        y = r + F.dropout(F.linear(f, i.down_weight, i.down_bias), self.dropout)
        return y.view(self.heads.batch, self.heads.length, -1)


def _normalize(kind: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """`F.layer_norm` or `F.rms_norm` over the last dimension."""
    if kind == "rms":
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _film(n: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
    if scale is None or shift is None:
        return n
    by_sequence = n.view(scale.shape[0], -1, n.shape[1])
    return (by_sequence * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)).flatten(0, 1)


class Replay:
    """The random state of now, for a context in which the same numbers are drawn once more."""

    def __init__(self, device: torch.device):
        self._device = device
        self._state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside it the generator of the device stands where it stood; outside of it no draw is disturbed."""
        is_cuda = self._device.type == "cuda"
        with torch.random.fork_rng(devices=[self._device] if is_cuda else []):
            if is_cuda:
                torch.cuda.set_rng_state(self._state, self._device)
            else:
                torch.set_rng_state(self._state)
            yield
