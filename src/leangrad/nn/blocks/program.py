"""A Transformer block as a program on a tape, and the same on autograd's own ops.

    r   = x + dropout(out(attend(qkv(norm1(x)))))
    y   = r + dropout(down(activation(up(norm2(r)))))

With a condition, `norm(x) * (1 + scale) + shift` takes the place of each norm. A block has four products and one
attention; `leangrad.nn.blocks.steps` says what each keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

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


T = TypeVar("T")


class Inputs(NamedTuple, Generic[T]):
    """Everything that a block reads, in the order in which it is passed to `single_node.run`; x is (B·T, D).

    T is Tensor, or `Var` for the same on a tape.
    """

    x: T
    norm1_weight: T | None
    norm1_bias: T | None
    qkv_weight: T
    qkv_bias: T | None
    out_weight: T
    out_bias: T | None
    norm2_weight: T | None
    norm2_bias: T | None
    up_weight: T
    up_bias: T | None
    down_weight: T
    down_bias: T | None
    mask: T | None = None
    cos: T | None = None
    sin: T | None = None
    scale1: T | None = None
    shift1: T | None = None
    scale2: T | None = None
    shift2: T | None = None


@dataclass(frozen=True)
class Block:
    """The constants of a block. Calling it with a tape runs the block on that; `plain` runs it on tensors."""

    heads: Heads
    norms: tuple[tuple[str, float], tuple[str, float]]  # kind and eps of each norm
    activation: Activation
    dropout: float
    replay: Replay | None = None  # random state before forward; None without dropout

    def __call__(self, tape: Tape, *variables: Var | None, observe: Callable[[Tensor], None] | None = None) -> Var:
        """Run the block on `tape`; `observe` is called with the output of the attention half, before dropout."""
        v: Inputs[Var] = Inputs(*variables)  # type: ignore[arg-type]
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
        """Compute the same numbers, dropout included, on autograd's own ops, which have a second derivative.

        Torch's fused attention kernels have none, so the attention of separate ops runs (`SDPBackend.MATH`). But with
        dropout on CUDA it draws other random numbers than the fused kernels: there a fused kernel runs, and torch
        raises for a second derivative.
        """
        i: Inputs[Tensor] = Inputs(*tensors)  # type: ignore[arg-type]
        written_out = i.x.device.type == "cpu" or not self.heads.dropout
        with (
            nullcontext() if self.replay is None else self.replay.again(),
            sdpa_kernel(SDPBackend.MATH) if written_out else nullcontext(),
        ):
            return self._plain(i)

    def _plain(self, i: Inputs[Tensor]) -> Tensor:
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
    """Returns `F.layer_norm` or `F.rms_norm` over the last dimension."""
    if kind == "rms":
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _film(n: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
    if scale is None or shift is None:
        return n
    by_sequence = n.view(scale.shape[0], -1, n.shape[1])
    return (by_sequence * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)).flatten(0, 1)


class Replay:
    """The random state of a device at construction, and a context in which the same numbers are drawn again."""

    def __init__(self, device: torch.device):
        self._device = device
        self._state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the generator has the stored state; afterwards it has the state from before the context."""
        is_cuda = self._device.type == "cuda"
        with torch.random.fork_rng(devices=[self._device] if is_cuda else []):
            if is_cuda:
                torch.cuda.set_rng_state(self._state, self._device)
            else:
                torch.set_rng_state(self._state)
            yield
