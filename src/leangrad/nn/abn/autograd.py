"""The autograd Function of activated batch norm: what a layer keeps, and which buffers its backward overwrites.

A layer keeps one map. If its output can be inverted, it keeps the output, which the next convolution keeps anyway, and
which is written over the input where that is safe. Otherwise it keeps its input; `rule.py` and `recipe.py` then rebuild
the output for the ops that read it.

Backward writes dx over the incoming gradient if nothing else can see that gradient, else into a new buffer. The kept
map is never overwritten, so a second backward (`retain_graph=True`), a held output and a second consumer need no
special handling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version

from leangrad._torch import graph_is_kept, has_memory
from leangrad.engine.ownership import owned
from leangrad.errors import ConsumedError, LeangradError
from leangrad.kernels import serves
from leangrad.ledger.observe.rng import mark_of
from leangrad.nn.abn.invertibility import Answer, Limits, note_backward, poison, wider
from leangrad.nn.abn.recipe import Recipe
from leangrad.ops import abn as ops
from leangrad.overridable import overridable

__all__ = ["Call", "apply_abn", "once"]


@dataclass(slots=True)
class Call:
    """Everything about one forward of one layer except its differentiable tensors."""

    activation: ops.Activation
    # An activation that the ops do not have, and then `activation` is identity; None: `activation` is applied.
    function: Callable[[Tensor], Tensor] | None
    eps: float
    training: bool  # True: normalize with statistics of the batch; False: with the running ones
    running: tuple[Tensor, Tensor] | None  # mean and variance; None: they are not tracked
    momentum: float
    absolute: bool  # apply |γ| + eps in place of γ
    invert: bool  # keep the output and invert it in backward; False: keep the input
    in_place: bool  # write the output over the input
    group: dist.ProcessGroup | None  # processes to synchronize the statistics with; None: no synchronization
    counter: Tensor | None = None  # number of batches, which forward still has to increment; None: it need not
    answer: Answer | None = None  # says which channels cannot be inverted
    limits: Limits | None = None  # limits that forward checks for the inverted channels once more; None: it does not
    # Set by forward:
    layer: Any = None  # the kernels of the whole layer; None: `ops` run it in steps
    count: Any = 0  # number of values per channel in the statistics; a tensor if synchronized
    dtypes: tuple[torch.dtype | None, torch.dtype | None] = (None, None)  # of weight and bias; None: there is none
    sign: Tensor | None = None  # sign of the weight if `absolute`, else None
    added: bool = False  # a residual was added
    draws: bool = False  # `function` drew random numbers
    trains: bool | None = None  # whether `function` is a module in training mode; None: it is no module
    keeps_dtype: bool = True  # the output has the dtype of the input; `function` may return another one

    @property
    def needs_residual(self) -> bool:
        """Whether backward reads a residual, if one was added."""
        return self.activation.name != "identity" or self.function is not None


class ABNFunction(torch.autograd.Function):
    """z = act(γ̂·x̂ + β + residual). Keeps the vectors, one map, the residual if needed, and input of spare channels."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, call: Call
    ) -> Tensor:
        """Returns z, written over x if `call.in_place`. x must be dense."""
        layer = begun = None
        if call.training and call.group is None:
            layer = call.layer = ops.fused_layer(
                x, weight, bias, call.activation, absolute=call.absolute, inverted=call.invert, running=call.running,
                counter=call.counter, added=residual is not None,
            )  # fmt: skip
        if layer is not None:
            roll = None if call.answer is None else call.answer.roll
            begun = layer.begin(x, None if roll is None or not roll.open else roll.take_question())
        # If `begin` launched a question to the device, it is answered while the host does the following work.
        z = x if call.in_place else torch.empty_like(x)
        if call.in_place:
            ctx.mark_dirty(x)
        ctx.call, ctx.recipe, ctx.consumed, ctx.origins = call, None, False, (weight, bias)
        call.dtypes = (None if weight is None else weight.dtype, None if bias is None else bias.dtype)
        call.added = residual is not None
        if call.absolute and weight is not None:
            call.sign = weight.detach().sign()
        if layer is not None:
            vectors, channels, spare = _finish(begun, x, weight, bias, residual, call, z)
        else:
            vectors, channels, spare = _forward_in_steps(x, weight, bias, residual, call, z)
        if call.function is not None:
            before = mark_of(z.device)
            z = call.function(z)
            call.draws = mark_of(z.device) != before
            call.trains = getattr(call.function, "training", None)
            call.keeps_dtype = z.dtype == x.dtype
            if z.shape != x.shape:
                raise ValueError(f"expected an activation that keeps the shape {tuple(x.shape)}, got {tuple(z.shape)}")
        elif not call.invert:
            ctx.recipe = Recipe.of(x, vectors, residual, z, call.activation, layer)
            if ctx.recipe is not None:
                ctx.origins = (weight, bias, x)
        if ctx.recipe is None:  # else the recipe holds all of it, without a call of the pack hook per tensor
            needed = residual if call.needs_residual else None
            ctx.save_for_backward(vectors, z if call.invert else x, needed, channels, spare)
        return z

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients; dx is written over dz if dz is owned."""
        mine = owned(dz)
        if not has_memory(dz):
            raise LeangradError(
                "activated batch norm cannot take a batch of gradients (is_grads_batched=True, a vectorized jacobian); "
                "take them one by one, or use torch.func, under which it runs plain"
            )
        if ctx.call.invert:
            note_backward(ctx.call.answer)
        if not torch.is_grad_enabled():
            return _backward(ctx, dz, mine)
        origins = (dz, *ctx.origins, *(() if ctx.recipe is not None else ctx.saved_tensors[1:3]))
        with torch.no_grad():
            return once(_backward(ctx, dz, False), *origins)


# `Function.apply` inspects every tensor in Python for `torch.func`. Under `torch.func` layers do not call this.
apply_abn = overridable(super(torch.autograd.Function, ABNFunction).apply)


def once(gradients: tuple[Tensor | None, ...], *origins: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns the gradients of a backward with `create_graph=True`, copied, so that differentiating them raises.

    origins: tensors that the gradients depend on. Without these in its graph, a second backward that names its inputs
        would not reach the copies, and leave out what comes through them.
    """
    with torch.enable_grad():
        start = torch.zeros((), requires_grad=True)
        found: tuple[Tensor | None, ...] = _Once.apply(len(gradients), start, *gradients, *origins)
    return found


class _Once(torch.autograd.Function):
    """Copies gradients of a backward with `create_graph=True`: they are right, but cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, count: int, unused: Tensor, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if g is None else g.clone() for g in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *unused: Tensor) -> None:
        raise LeangradError(
            "activated batch norm was differentiated twice, but its backward is not differentiable; "
            "use torch.nn.BatchNorm2d and an activation where you need second derivatives"
        )


def _backward(ctx: Any, dz: Tensor, mine: bool) -> tuple[Tensor | None, ...]:
    call: Call = ctx.call
    vectors, kept_map, residual, channels, spare = _saved(ctx)
    need_x, need_weight, need_bias, need_residual = ctx.needs_input_grad[:4]
    if dz.stride() != kept_map.stride() or dz.dtype != kept_map.dtype:
        dz, mine = torch.empty_like(kept_map).copy_(dz), True
    if call.function is not None:
        if call.draws:
            raise LeangradError(
                f"the activation {call.function!r} draws random numbers, and backward, which runs it again, would draw "
                "others; apply such an activation after an ABN with activation='identity'"
            )
        if getattr(call.function, "training", None) != call.trains:
            raise LeangradError(
                f"train() or eval() was called on the activation {call.function!r} between forward and backward, "
                "which runs it again"
            )
        dz, mine = _through_function(call.function, kept_map, residual, dz, vectors), True
        residual = None
    dx: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None
    linear = call.activation.name == "identity"
    in_kernels = call.layer is not None and need_x and channels is None
    dy = None
    if need_residual:
        # dy is the gradient of the residual. It is not overwritten: dx is computed from it into another buffer.
        dy = dz if linear or mine else torch.empty_like(dz)
    elif need_x and not call.invert and not linear and not in_kernels and not serves(dz):
        # The eager second pass is faster from dy than from dz; for a kernel, storing dy would be one more map to write.
        dy = dz if mine else torch.empty_like(dz)
    if in_kernels:
        dx = dz if mine and not need_residual else torch.empty_like(dz)
        dweight, dbias = call.layer.backward(
            kept_map, dz, residual, vectors, dy_out=None if linear else dy, out=dx
        )  # fmt: skip
    else:
        kept = [ops.Kept(kept_map, call.invert, residual, channels, spare)]
        del residual
        dx, dweight, dbias = _backward_in_steps(ctx, kept, dz, vectors, dy, mine)
    if call.sign is not None and dweight is not None:
        dweight = dweight * call.sign
    return dx, dweight if need_weight else None, dbias if need_bias else None, dy if need_residual else None, None


def _saved(ctx: Any) -> tuple[Any, ...]:
    """Returns the vectors, the kept map, the residual, the spare channels and their input.

    Drops the recipe unless the graph is retained, as autograd frees its saved tensors.
    """
    recipe: Recipe | None = ctx.recipe
    if recipe is None:
        if ctx.consumed:
            raise ConsumedError(
                "the graph of an activated batch norm was run backward a second time after what it kept was freed; "
                "pass retain_graph=True to the first backward"
            )
        return ctx.saved_tensors  # type: ignore[no-any-return]
    if not graph_is_kept():
        ctx.recipe, ctx.consumed, ctx.origins = None, True, ()
        recipe.session.released_bytes += recipe.x.nbytes
    return (*recipe.inputs(), None, None)


def _backward_in_steps(
    ctx: Any, taken: list[ops.Kept], dz: Tensor, vectors: Tensor, dy: Tensor | None, mine: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns dx, dγ̂ and dβ, computed in ops: the sums, their mean over all processes if synchronized, then dx.

    taken: a list of one `Kept`, which is popped, so that the caller holds no reference: a residual that was rebuilt is
        freed before dx is allocated, and dx may get its memory.
    """
    call: Call = ctx.call
    kept = taken.pop()
    act = call.activation
    need_x, need_weight, need_bias, need_residual = ctx.needs_input_grad[:4]
    sums = None
    if dz.numel() == 0:
        sums = vectors.new_zeros(2, vectors.shape[1])
    elif (need_x and call.training) or need_weight or need_bias or (dy is not None and act.name != "identity"):
        sums = ops.backward_sums(kept, dz, vectors, act, dy_out=None if act.name == "identity" else dy)
    dx = None
    if need_x:
        means, count = (sums, call.count) if call.training else (None, 1)
        if means is not None and call.group is not None:
            means, count = _mean_over_group(means, call.count, call.group), 1
        if dy is not None:
            dz, kept, act, mine = dy, ops.Kept(kept.map, call.invert), ops.Activation("identity"), not need_residual
        out = dz if mine else torch.empty_like(dz)
        dx = ops.backward_input(kept, dz, vectors, act, means, count, out=out) if dz.numel() else out
    dweight = sums[1].to(call.dtypes[0]) if need_weight and sums is not None else None
    dbias = sums[0].to(call.dtypes[1]) if need_bias and sums is not None else None
    return dx, dweight, dbias


def _through_function(
    function: Callable[[Tensor], Tensor], x: Tensor, residual: Tensor | None, dz: Tensor, vectors: Tensor
) -> Tensor:
    """Returns dy for an activation that is a Python function: rebuilds y and differentiates the function there."""
    y = torch.empty_like(x)
    ops.normalize(x, vectors, ops.Activation("identity"), residual=residual, out=y)
    with torch.enable_grad():
        z = function(y.requires_grad_())
    if _leaves(z.grad_fn) > 1:
        raise LeangradError(
            f"the activation {function!r} uses tensors that require grad, which would be left without a gradient; "
            "apply such an activation after an ABN with activation='identity'"
        )
    (dy,) = torch.autograd.grad(z, y, dz)
    return dy if dy.stride() == y.stride() else torch.empty_like(y).copy_(dy)


def _leaves(root: Any) -> int:
    """Returns the number of leaves (AccumulateGrad nodes) of the graph of `root`."""
    seen, todo, leaves = {root}, [root], 0
    while todo:
        parents = {node for node, _ in todo.pop().next_functions if node is not None} - seen
        leaves += sum(node.name().endswith("AccumulateGrad") for node in parents)
        seen |= parents
        todo += parents
    return leaves


def _finish(
    begun: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, call: Call, z: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Run the rest of a forward in kernels: write z; returns the vectors, the spare channels and their input."""
    layer = call.layer
    call.count = layer.count
    _count_changes(call.running, call.counter)
    vectors = torch.empty_like(layer.vectors)
    channels, spare = _spare(x, call)
    check = wider(call.limits)[:3] if call.limits is not None and channels is None else None
    roll = None if call.answer is None else call.answer.roll
    layer.finish(
        begun, x, weight, bias, residual, z, vectors, eps=call.eps, running=call.running, momentum=call.momentum,
        counter=call.counter, check=check, late=None if roll is None else roll.late,
    )  # fmt: skip
    if call.limits is not None and channels is not None:
        poison(vectors, channels, call.limits)
    return vectors, channels, spare


def _forward_in_steps(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, call: Call, z: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Run a whole forward in ops: write z; returns the vectors, the spare channels and their input."""
    call.count = x.numel() // x.shape[1]
    channels, spare = _spare(x, call)
    if call.training and call.group is None:
        _count_batch(call)
        vectors = ops.forward(
            x, weight, bias, call.activation, eps=call.eps, absolute=call.absolute, running=call.running,
            momentum=call.momentum, residual=residual, out=z,
        )  # fmt: skip
    else:
        vectors = _given_vectors(x, weight, bias, call)
        if x.numel():
            ops.normalize(x, vectors, call.activation, residual=residual, out=z)
    if call.limits is not None and serves(x):
        poison(vectors, channels, call.limits)
    return vectors, channels, spare


def _spare(x: Tensor, call: Call) -> tuple[Tensor | None, Tensor | None]:
    """Returns the channels that cannot be inverted and a copy of their input, or Nones; x must still be unchanged."""
    channels = None if call.answer is None else call.answer.channels()
    return channels, None if channels is None else x.index_select(1, channels).contiguous()


def _given_vectors(x: Tensor, weight: Tensor | None, bias: Tensor | None, call: Call) -> Tensor:
    """Returns the vectors from running statistics; with a group, from those of all processes, and sets `call.count`."""
    dtype = ops.accumulation_dtype(x.dtype)
    if call.group is not None:
        _count_batch(call)
        mean, var = ops.stats(x) if call.count else (x.new_zeros(x.shape[1], dtype=dtype) for _ in range(2))
        mean, var, call.count = _stats_over_group(mean, var, call.count, call.group)
        if call.running is not None:
            ops.update_running(call.running, mean, var, call.count, call.momentum)
    else:
        assert call.running is not None
        mean, var = (t.to(dtype) for t in call.running)
    return ops.stack_vectors(mean, var, weight, bias, eps=call.eps, absolute=call.absolute)


def _count_batch(call: Call) -> None:
    if call.counter is not None:
        call.counter.add_(1)


def _count_changes(running: tuple[Tensor, Tensor] | None, counter: Tensor | None) -> None:
    """Increment the version counters of tensors that kernels write to, since autograd does not see these writes."""
    if running is not None:
        increment_version(running if counter is None else (*running, counter))
    elif counter is not None:
        increment_version(counter)


def _stats_over_group(mean: Tensor, var: Tensor, count: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Returns mean, biased variance and count over all processes; their batches may differ in size, or be empty."""
    mine = torch.cat((mean, var * count, mean.new_full((1,), count)))
    all_flat = mine.new_empty(dist.get_world_size(group) * mine.numel())
    dist.all_gather_into_tensor(all_flat, mine, group=group)
    means, m2s, counts = all_flat.view(-1, mine.numel()).split((mean.numel(), mean.numel(), 1), dim=1)
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    m2 = (m2s + counts * (means - mean).square_()).sum(0)
    return mean, m2 / total, total


def _mean_over_group(sums: Tensor, total: Tensor, group: dist.ProcessGroup) -> Tensor:
    everywhere = sums.clone()  # the local sums are dβ and dγ, which data parallelism averages
    dist.all_reduce(everywhere, group=group)
    return everywhere.div_(total)
