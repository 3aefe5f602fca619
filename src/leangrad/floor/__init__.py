"""The floor: the fewest bytes that can be kept from forward to backward with no product computed twice.

A product is a matmul, a convolution, an attention or a fused recurrent layer. `floor` runs one real step, records
every ATen op that eager PyTorch runs in it (`recorded_step.py`), and finds the cheapest cut (`leangrad.policy`).

[Note: the cut] A value that backward reads is kept, at its own size, or rebuilt, which takes the inputs of its op; a
product is never rebuilt. Parameters, buffers, the batch, constants and the loss exist anyway and are free; a buffer
that the forward changes is free in its last state only. A random op is rebuilt from the state of its generator, a few
integers on the host that count nothing. The floor speaks of kept bytes, not of the peak: while something is rebuilt
more is alive.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from leangrad.floor.aten_op import tensors_in
from leangrad.floor.recorded_step import Recorder, Value
from leangrad.floor.result import Floor, Kept
from leangrad.policy import graph as policy
from leangrad.policy.cut import cheapest_cut

__all__ = ["Floor", "Kept", "floor"]


def floor(
    model: nn.Module, batch: Any, loss: Callable[[Any], Tensor] | None = None, *, autocast: torch.dtype | None = None
) -> Floor:
    """The fewest bytes that one training step of the model can keep for backward.

    The step is `loss(model(*batch))` for a tuple or list, `model(**batch)` for a mapping, `model(batch)` for anything
    else; without a loss the scalar is the output, or its `.loss`. It runs once, and leaves buffers, batch, `.grad` and
    the random state as they were. With `autocast` the forward and the loss run in that dtype and backward outside of
    it, as eager training does. A reentrant checkpoint does not work with `torch.autograd.grad`: use_reentrant=False.

    >>> net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    >>> floor(net, torch.randn(4, 8), torch.mean).bytes  # 4 x 32 pre-activations in float32
    512
    """
    leaves = [one for one in (*model.parameters(), *tensors_in(batch)) if one.requires_grad and one.is_leaf]
    if not leaves:
        raise ValueError(
            "expected a model with a parameter that requires grad, got none; unfreeze one with requires_grad_()"
        )
    recorder = Recorder()
    cast = nullcontext() if autocast is None else torch.autocast(leaves[0].device.type, autocast)
    with _untouched(model, batch), _named(model, recorder), torch.enable_grad(), recorder:
        with cast:
            value = _scalar(_call(model, batch), loss)
        gradient = recorder.begin_backward(value)
        torch.autograd.grad(value, leaves, gradient, allow_unused=True)
    values = recorder.values
    kept = cheapest_cut(policy.Graph([_as_policy(value) for value in values]), early=True)
    cut = [values[index] for index in sorted(kept) if values[index].bytes and not values[index].free]
    return Floor(tuple(Kept(value.op, value.shape, value.dtype, value.bytes, value.module) for value in cut))


def _as_policy(value: Value) -> policy.Value:
    """A recorded value, as the policy sees it. What backward needs is all that the policy asks of backward."""
    return policy.Value(
        value.bytes,
        () if value.free else tuple(value.inputs),
        is_fixed=value.fixed,
        is_standing=value.free,
        is_asked_for=value.needed,
    )


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _scalar(output: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
    value = getattr(output, "loss", output) if loss is None else loss(output)
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"expected a loss of one element that requires grad, got {found}; pass loss=, a callable of the output"
        )
    return value


@contextmanager
def _untouched(model: nn.Module, batch: Any) -> Iterator[None]:
    """Put buffers, batch and random state back."""
    before = [(tensor, tensor.detach().clone()) for tensor in (*model.buffers(), *tensors_in(batch))]
    devices = {one.device for one in (*model.parameters(), *model.buffers()) if one.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(device.index for device in devices)):
        try:
            yield
        finally:
            for tensor, old in before:
                if not torch.equal(tensor, old):
                    tensor.detach().copy_(old)


@contextmanager
def _named(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Tell the recorder which module is running."""
    names = {module: name for name, module in model.named_modules()}

    def enter(module: nn.Module, _: Any) -> None:
        recorder.modules.append(names[module])

    def leave(module: nn.Module, _inputs: Any, _output: Any) -> None:
        recorder.modules.pop()

    hooks = [module.register_forward_pre_hook(enter) for module in names]
    hooks += [module.register_forward_hook(leave, always_call=True) for module in names]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
