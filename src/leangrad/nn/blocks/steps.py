"""The steps of a Transformer block on a tape, `project` and `attend`. They handle leases as the tape's own steps do.

    project    out = residual + dropout(prepare(x) Wᵀ + b)        prepare: a norm, an activation, or nothing
    attend     out = attention over the heads in one map of queries, keys and values

The output of `prepare` is not kept: it is written to scratch, read by the product, and computed again in backward for
the gradient of the weight; then its own gradient is written over it. So a block keeps the outputs of its products and
of its attention, and no other tensor of that size: this is the floor.
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
    """Returns residual + dropout(prepare(x) Wᵀ + b), for x of (N, in).

    observe: called with the product before dropout.
    addend_may_do: `keep_addend` may keep the addend of the residual in place of the sum.
    shape: shape of the output. Only with a residual; the output is then no view, so its caller may change it in place.

    Keeps x, and with dropout one byte per element of the output.
    """
    given = x.value
    lease = None
    if prepare is not None:
        lease, _ = prepare.forward(tape, given, weight.dtype)
        given = lease.tensor
    into = None if shape is None or residual is None else residual.value.new_empty(shape)
    rows = None if into is None else into.view(x.shape[0], -1)
    is_sum_over_y = residual is not None and residual.dtype == weight.dtype  # under autocast y has a smaller dtype
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
    """Rebuilds a sum from the addend of the residual; has the interface that `Var.rebuilt` expects of an activation."""

    residual: Var
    parameter: float = 0.0

    def forward(self, addend: Tensor, parameter: float, out: Tensor | None) -> Tensor:
        return torch.add(self.residual.value, addend, out=out)


def keep_addend(tape: Tape, x: Var) -> None:
    """Keep the addend of a sum x in place of x, if it is smaller; call it when nothing in forward reads x any more.

    Under autocast the residual stream is float32, and the addends have half as many bytes. Backward computes the sum
    again, with the same bits.
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
    """Returns the value of x; if the sum had to be computed again, also the lease on the scratch that holds it."""
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
    """Returns the gradient g of (B, T, D) as (B·T, D), with `rows` = B·T."""
    flat = g.tensor.reshape(rows, -1)
    if flat.data_ptr() == g.tensor.data_ptr():
        return g.viewed_as(flat)
    tape.pool.release(g)
    return Lease(flat)


def _gradient_of_product(tape: Tape, g: Lease, w: Tensor, mask: Tensor | None, p: float) -> Lease:
    """Returns the gradient of the product, before its dropout, in the dtype of w."""
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
    """Apply dropout to y, in place if possible; returns the result and the mask.

    Draws the same random numbers as `F.dropout`, none for p = 1, and gives the same bits.
    """
    if p == 1:
        return y.mul_(0), torch.zeros_like(y, dtype=torch.bool)
    if not y.is_cpu:
        return torch.native_dropout(y, p, True)
    mask = torch.empty_like(y, dtype=torch.bool).bernoulli_(1 - p)
    return y.mul_(mask).mul_(_kept_scale(y, p)), mask


def _kept_scale(like: Tensor, p: float) -> Tensor:
    """Returns 1/(1 − p), rounded as `F.dropout` rounds it; 1 for p = 1, where the mask is 0 anyway."""
    return torch.ones((), dtype=like.dtype).div_(1 - p if p < 1 else 1)


@dataclass(frozen=True)
class Heads:
    """How a map of (B·T, (H + 2K)·d) is divided into queries, keys and values, and how they attend."""

    batch: int  # B
    length: int  # T
    queries: int  # H, the number of query heads
    keys: int  # K, the number of key and value heads
    causal: bool = False
    dropout: float = 0.0

    def split(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns views of (B, H, T, d), (B, K, T, d) and (B, K, T, d)."""
        q, k, v = self._by_position(packed).transpose(1, 2).split([self.queries, self.keys, self.keys], 1)
        return q, k, v

    def turning(self, packed: Tensor) -> Tensor:
        """Returns a view of the queries and keys, which rotary positions rotate: (B, T, H + K, d)."""
        return self._by_position(packed)[:, :, : self.queries + self.keys]

    def _by_position(self, packed: Tensor) -> Tensor:
        heads = self.queries + 2 * self.keys
        return packed.view(self.batch, self.length, heads, packed.shape[-1] // heads)


def attend(tape: Tape, qkv: Var, heads: Heads, mask: Var | None = None, rotary: tuple[Var, Var] | None = None) -> Var:
    """Returns the attention, (B·T, H·d), for a map of queries, keys and values of (B·T, (H + 2K)·d).

    Keeps that map (with rotary positions, rotated in place), the output, and what else the kernel saves.
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
    """Where a tensor that the attention saved is: `var` itself, or a view (shape, stride, offset) in its memory."""

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
    """Returns y of (B, H, T, d) as (B·T, H·d): a view if the kernel wrote it in that layout, else a copy."""
    batch, heads, length, width = y.shape
    return y.transpose(1, 2).reshape(batch * length, heads * width)


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _view_in(base: Tensor, tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], int]:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset() - base.storage_offset())


def _keep(tape: Tape, tensor: Tensor) -> Var:
    """Let the tape keep a tensor for backward; it is never overwritten, since a caller may hold it too."""
    var = Var(tensor, tensor, False, fixed=True)
    var.readers = 1
    tape._kept.append(var)
    return var


def _needs(var: Var | None) -> bool:
    return var is not None and var.needs_grad
