"""The steps of a Transformer block on a tape: `project` and `attend`, which handle leases as the tape's own steps do.

    project    out = residual + dropout(prepare(x) Wᵀ + b)        prepare: a norm, an activation, or nothing
    attend     out = attention over the heads in one map of queries, keys and values

What `prepare` makes is never stored: it is written into scratch, read by the product, and in backward written there
again for the gradient of the weight; then the gradient of it is written over it. So a block keeps the outputs of its
products and of its attention, and nothing else that is as large: the floor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from leangrad.engine.grad_buffer import Lease
from leangrad.engine.tape import Tape, Var
from leangrad.nn.blocks.input_transform import Prepare, take_over
from leangrad.nn.blocks.recorded_attention import Recorded, record_attention
from leangrad.ops.attention import attend as attend_plainly
from leangrad.ops.attention import rotate_
from leangrad.ops.linear import linear, linear_backward_bias, linear_backward_input, linear_backward_weight
from leangrad.ops.norm import Statistics

__all__ = ["Heads", "attend", "keep_addend", "project"]


def project(
    tape: Tape,
    x: Var,
    weight: Var,
    bias: Var | None = None,
    *,
    prepare: Prepare | None = None,
    residual: Var | None = None,
    dropout: float = 0.0,
    observe: Callable[[Tensor], None] | None = None,
    addend_may_do: bool = False,
    shape: torch.Size | None = None,
) -> Var:
    """Residual + dropout(prepare(x) Wᵀ + b), for x of (N, in); `observe` is shown the product before the dropout.

    Keeps x, and one byte an element of the output where there is dropout. For `addend_may_do` see `keep_addend`. With
    a `shape` the output, which is then a sum, has that shape, and is no view: its caller may change it in place.
    """
    given = x.value
    lease = None
    if prepare is not None:
        lease, _ = prepare.forward(tape, given, weight.dtype)
        given = lease.tensor
    into = None if shape is None or residual is None else residual.value.new_empty(shape)
    rows = None if into is None else into.view(x.shape[0], -1)
    is_sum_over_y = residual is not None and residual.dtype == weight.dtype  # autocast makes y smaller
    y = linear(given, weight.value, None if bias is None else bias.value, rows if is_sum_over_y else None)
    if lease is not None:
        tape.pool.release(lease)
    if observe is not None:
        observe(y)
    y, mask = _drop(y, dropout) if dropout else (y, None)
    addend = y
    if residual is not None:
        if is_sum_over_y and (rows is None or y is rows):
            y.add_(residual.value)
        else:
            y = torch.add(residual.value, y, out=rows)
        y = y if into is None else into
    needs_grad = (prepare is not None and prepare.needs_grad) or any(map(_needs, (x, weight, bias, residual)))
    reads = (x,) if weight.needs_grad or (prepare is not None and (x.needs_grad or prepare.needs_grad)) else ()
    noise = None if mask is None or not needs_grad else _keep(tape, mask)
    arguments = (x, weight, bias, prepare, residual, noise, dropout)
    out = tape._push(_project_backward, y, arguments, needs_grad, reads)
    if addend_may_do and residual is not None and addend is not y:
        out.rebuilt = (_Sum(residual), Var(addend, addend, False, fixed=True))  # type: ignore[assignment]
    return out


@dataclass(frozen=True)
class _Sum:
    """How a sum is rebuilt from what was added to the residual; to a `Var` it looks like an activation."""

    residual: Var
    parameter: float = 0.0

    def forward(self, addend: Tensor, parameter: float, out: Tensor | None) -> Tensor:
        return torch.add(self.residual.value, addend, out=out)


def keep_addend(tape: Tape, x: Var) -> None:
    """Once nothing in forward reads a sum any more: keep what was added to the residual, if that is smaller.

    Under autocast the residual stream is float32 and what is added to it is half as large. The sum is made again in
    backward, with the same bits.
    """
    if x.rebuilt is None:
        return
    if x.readers:
        addend, x.tensor = x.rebuilt[1], None
        addend.readers = 1
        tape._kept.append(addend)
    else:
        x.rebuilt = None


def _read(tape: Tape, x: Var) -> tuple[Tensor, Lease | None]:
    """The value of x; where it had to be added up again, also the lease on the scratch that it is in."""
    if x.tensor is not None or x.rebuilt is None:
        return x.value, None
    lease = tape.pool.borrow(x.shape, x.rebuilt[1].value.new_empty(0, dtype=x.dtype))
    x.rebuilt[0].forward(x.rebuilt[1].value, 0.0, lease.tensor)
    return lease.tensor, lease


def _project_backward(
    tape: Tape,
    g: Lease,
    out: Var,
    again: bool,
    x: Var,
    weight: Var,
    bias: Var | None,
    prepare: Prepare | None,
    residual: Var | None,
    mask: Var | None,
    dropout: float,
) -> None:
    w = weight.value
    if g.tensor.dim() != 2:
        g = _by_rows(tape, g, x.shape[0])
    if residual is not None and residual.needs_grad:
        tape.receive(residual, g.lend())
    if mask is not None or g.tensor.dtype != w.dtype:
        g = _gradient_of_product(tape, g, w, None if mask is None else mask.value, dropout)
    needs_dx = x.needs_grad or (prepare is not None and prepare.needs_grad)
    reads_x = weight.needs_grad or (prepare is not None and needs_dx)
    value, summed = _read(tape, x) if reads_x else (w, None)
    lease: Lease | None = None
    statistics: Statistics = ()
    if prepare is not None and reads_x:
        lease, statistics = prepare.forward(tape, value, w.dtype)
    if weight.needs_grad:
        tape.receive(weight, Lease(linear_backward_weight(g.tensor, value if lease is None else lease.tensor)))
    if bias is not None and bias.needs_grad:
        tape.receive(bias, Lease(linear_backward_bias(g.tensor)))
    if needs_dx:
        into = lease or tape.pool.borrow(x.shape, w)
        linear_backward_input(g.tensor, w, into=into.tensor)
        tape.pool.release(g)
        if prepare is None:
            tape.receive(x, into)
        else:
            prepare.backward(tape, into, x, value, statistics, again)
    else:
        tape.pool.release(g)
        if lease is not None:
            tape.pool.release(lease)
    if summed is not None:
        tape.pool.release(summed)
    if reads_x:
        tape.done(x, again)


def _by_rows(tape: Tape, g: Lease, rows: int) -> Lease:
    """The gradient of (B, T, D) as (B·T, D)."""
    flat = g.tensor.reshape(rows, -1)
    if flat.data_ptr() == g.tensor.data_ptr():
        return g.viewed_as(flat)
    tape.pool.release(g)
    return Lease(flat)


def _gradient_of_product(tape: Tape, g: Lease, w: Tensor, mask: Tensor | None, p: float) -> Lease:
    """The gradient before the dropout, in the dtype of the product."""
    if mask is not None and not mask.is_cpu and p < 1:
        undropped = Lease(torch.ops.aten.native_dropout_backward(g.tensor.to(w.dtype), mask, 1 / (1 - p)))
        tape.pool.release(g)
        return undropped
    into = tape.pool.borrow(g.tensor.shape, w)
    into.tensor.copy_(g.tensor)
    tape.pool.release(g)
    if mask is not None:
        into.tensor.mul_(mask).mul_(_kept_scale(into.tensor, p))
    return into


def _drop(y: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Dropout, over y where it can be, and its mask. Draws what `F.dropout` draws, none for p = 1; gives its bits."""
    if p == 1:
        return y.mul_(0), torch.zeros_like(y, dtype=torch.bool)
    if not y.is_cpu:
        return torch.native_dropout(y, p, True)
    mask = torch.empty_like(y, dtype=torch.bool).bernoulli_(1 - p)
    return y.mul_(mask).mul_(_kept_scale(y, p)), mask


def _kept_scale(like: Tensor, p: float) -> Tensor:
    """1/(1 − p), rounded as dropout rounds it; for p = 1 the mask is 0 anyway."""
    return torch.ones((), dtype=like.dtype).div_(1 - p if p < 1 else 1)


@dataclass(frozen=True)
class Heads:
    """How a map of (B·T, (H + 2K)·d) is divided into queries, keys and values, and how they attend."""

    batch: int
    length: int
    queries: int
    keys: int
    causal: bool = False
    dropout: float = 0.0

    def split(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of (B, H, T, d), (B, K, T, d) and (B, K, T, d)."""
        q, k, v = self._by_position(packed).transpose(1, 2).split([self.queries, self.keys, self.keys], 1)
        return q, k, v

    def turning(self, packed: Tensor) -> Tensor:
        """The queries and keys, which rotary positions turn: (B, T, H + K, d)."""
        return self._by_position(packed)[:, :, : self.queries + self.keys]

    def _by_position(self, packed: Tensor) -> Tensor:
        heads = self.queries + 2 * self.keys
        return packed.view(self.batch, self.length, heads, packed.shape[-1] // heads)


def attend(tape: Tape, qkv: Var, heads: Heads, mask: Var | None = None, rotary: tuple[Var, Var] | None = None) -> Var:
    """Attention over a map of queries, keys and values of (B·T, (H + 2K)·d), to (B·T, H·d).

    Keeps that map (turned in place where there are rotary positions), the output, and what the kernel keeps beside.
    """
    packed, masked = qkv.value, None if mask is None else mask.value
    if rotary is not None:
        rotate_(heads.turning(packed), rotary[0].value, rotary[1].value)
    if not qkv.needs_grad:
        y = _rows(attend_plainly(*heads.split(packed), masked, heads.causal, heads.dropout))
        return Var(y, y, False)
    y, recorded, kept = record_attention(*heads.split(packed), masked, heads.causal, heads.dropout)
    places: list[_Place] = []
    out = tape._push(_attend_backward, _rows(y), (qkv, heads, rotary, recorded, places), True, (qkv,))
    out.readers += 1
    for tensor in kept:
        shared = next((var for var in (qkv, out) if _share_memory(var.value, tensor)), None)
        places.append(_Place(_keep(tape, tensor)) if shared is None else _Place(shared, _view_in(shared.value, tensor)))
    return out


@dataclass(frozen=True)
class _Place:
    """Where a tensor that the attention wants to keep is: all of a value, or a view in it."""

    var: Var
    view: tuple[torch.Size, tuple[int, ...], int] | None = None

    @property
    def tensor(self) -> Tensor:
        value = self.var.value
        if self.view is None:
            return value
        shape, stride, offset = self.view
        return value.as_strided(shape, stride, value.storage_offset() + offset)


def _attend_backward(
    tape: Tape,
    g: Lease,
    out: Var,
    again: bool,
    qkv: Var,
    heads: Heads,
    rotary: tuple[Var, Var] | None,
    recorded: Recorded,
    places: list[_Place],
) -> None:
    by_head = g.tensor.view(heads.batch, heads.length, heads.queries, -1).transpose(1, 2)
    gradients = recorded.backward(by_head, [place.tensor for place in places], again=again)
    tape.pool.release(g)
    into = take_over(tape, qkv, again) or tape.pool.borrow(qkv.shape, g.tensor)
    for part, gradient in zip(heads.split(into.tensor), gradients, strict=True):
        part.copy_(gradient)
    if rotary is not None:
        rotate_(heads.turning(into.tensor), rotary[0].value, -rotary[1].value)
    tape.receive(qkv, into)
    tape.done(qkv, again)
    tape.done(out, again)


def _rows(y: Tensor) -> Tensor:
    """(B, H, T, d) as (B·T, H·d); a view where the kernel has written it so."""
    batch, heads, length, width = y.shape
    return y.transpose(1, 2).reshape(batch * length, heads * width)


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _view_in(base: Tensor, tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], int]:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset() - base.storage_offset())


def _keep(tape: Tape, tensor: Tensor) -> Var:
    """Hold a tensor for backward as the tape holds its values; it is never overwritten, since a caller may have it."""
    var = Var(tensor, tensor, False, fixed=True)
    var.readers = 1
    tape._kept.append(var)
    return var


def _needs(var: Var | None) -> bool:
    return var is not None and var.needs_grad
