"""The floor: the fewest bytes that can be kept from forward to backward with no product computed twice.

A product is a matmul, a convolution, an attention or a fused recurrent layer. `floor` runs one real step in plain
PyTorch, records every ATen op that eager PyTorch runs in it, and computes the cheapest cut of that graph with
`leangrad.policy`. It is one of the policy's adapters, beside those of the two engines.

Read in this order: `aten_op` (one call of an op: what it reads and writes, whether it may run twice), `recorded_step`
(the dispatch mode that records a step as a graph of values), `result` (the tensors of the cut, as a table), and `floor`
itself, here.

[Note: the cut] A value that backward reads is either kept, which costs its own size, or rebuilt, which requires the
inputs of its op. A product is never rebuilt. Parameters, buffers, the batch, constants and the loss exist anyway, so
keeping them is free; a buffer that the forward changes is free only in its last state. A random op is rebuilt from the
state of its generator, a few integers on the host that are not counted. The floor is about kept bytes, not about the
peak: while a value is rebuilt, more memory is held.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from leangrad import _torch
from leangrad._torch.compiler import nothing_compiled
from leangrad.errors import LeangradError
from leangrad.floor.recorded_step import Recorder, Value
from leangrad.floor.result import Floor, Kept
from leangrad.ledger.observe.active_region import open_region
from leangrad.policy import graph as policy
from leangrad.policy.cut import cheapest_cut
from leangrad.switch import plain_for_now
from leangrad.verify.memory import Memory
from leangrad.verify.subject import Subject

__all__ = ["Floor", "Kept", "floor"]


def floor(
    model: nn.Module, batch: Any, loss: Callable[[Any], Tensor] | None = None, *, autocast: torch.dtype | None = None
) -> Floor:
    """Find the fewest bytes that one training step of a model can keep for backward with no product computed twice.

    The step runs once in plain PyTorch, and every ATen op of it is recorded::

        value = loss(model(*batch))
        torch.autograd.grad(value, [*model.parameters(), *inputs_that_require_grad])

    A lean model, a packed one and the modules of `leangrad.nn` run without leangrad in it, so the floor is that of the
    plain model. (While `floor` runs, the rest of leangrad is switched off in the whole process.) Afterwards model,
    batch, `.grad` and random states are as before, even if the model raises; see [Note: What is put back] in
    `verify/memory.py`. The user's own hooks run, except those that wait for `.grad`, which is not written. A tensor
    that leaves torch and comes back, through NumPy for instance, counts as a constant, which exists anyway. Call
    `floor` before or after a step: between a forward and its backward, running statistics that `floor` writes back
    count as changed in place.

    Args:
        model: a module in the mode in which it will be trained. If no parameter requires a gradient, a tensor of the
            batch must.
        batch: a tensor; a tuple or list of positional arguments; or a mapping of keyword arguments.
        loss: called with the model's output, returns a scalar. None means what it means for `leangrad.verify`: the
            output itself if it is a scalar, its `.loss` or `["loss"]` if it has one, else the mean squares of the
            output.
        autocast: run forward and loss under `torch.autocast` with this dtype, and backward outside of it.

    Raises:
        TypeError, ValueError: an argument is not as described above.
        LeangradError: the model launches kernels past torch's dispatcher, so that `floor` cannot see what they read.
        RuntimeError: torch's own, for a checkpoint inside the model with `use_reentrant=True`; pass False.

    >>> net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    >>> print(floor(net, torch.randn(4, 8), torch.mean))  # the pre-activations, 4 x 32 x 4 bytes: GELU is rebuilt
    bytes  op     dtype    shape   module
      512  addmm  float32  4 x 32  0
      512  the floor: 1 tensor
    """
    subject = Subject.of(model, batch, loss, autocast, caller="floor")
    _check_surroundings()
    memory = Memory(model, batch, loss)
    recorder = Recorder()
    try:
        with plain_for_now(), nothing_compiled(), _naming_modules(model, recorder), torch.enable_grad():
            _run(subject, recorder)
    finally:
        memory.restore()
    values = recorder.values
    kept = cheapest_cut(policy.Graph([_as_policy(value) for value in values]), early=True)
    cut = [values[index] for index in sorted(kept) if values[index].bytes and not values[index].free]
    return Floor(tuple(Kept(value.op, value.shape, value.dtype, value.bytes, value.module) for value in cut))


def _run(subject: Subject, recorder: Recorder) -> None:
    """Run forward, loss and backward once, under the recorder."""
    arguments, inputs = subject.fresh_arguments()
    leaves = [one for one in subject.model.parameters() if one.requires_grad] + list(inputs.values())
    if not leaves:
        raise ValueError(
            f"expected a model with a parameter that requires a gradient, got {type(subject.model).__name__} with "
            "none; unfreeze one with requires_grad_(), or pass a batch that requires a gradient"
        )
    if any(one.is_meta for one in (*leaves, *subject.model.parameters(), *subject.model.buffers())):
        raise ValueError(
            "expected a model with memory, got one on the meta device, where torch takes other kernels than in "
            "training; build it on the device that it is trained on, with a small batch if need be"
        )
    with recorder:
        with subject.under_autocast():
            value = subject.forward(arguments)
        gradients = torch.autograd.grad(value, leaves, recorder.begin_backward(value), allow_unused=True)
    if all(one is None for one in gradients):
        raise ValueError(
            "expected a loss that depends on a parameter of the model or on a tensor of the batch that requires a "
            "gradient, got one that depends on neither; check what `loss` is computed from"
        )


def _check_surroundings() -> None:
    if missing := _torch.missing_dispatch_names():
        raise LeangradError(
            f"torch {torch.__version__} has no {', '.join(missing)}, without which floor cannot see what a step "
            "computes; use a torch that leangrad knows"
        )
    if open_region() is not None:
        raise ValueError(
            "expected to be outside of `with leangrad.saving()` and of a lean model's forward, which would take the "
            "step that floor records for one of training; call floor before or after"
        )


def _as_policy(value: Value) -> policy.Value:
    """Convert a recorded value to one of the policy, whose graph has no backward: ``needed`` stands in for it."""
    return policy.Value(
        value.bytes,
        () if value.free else tuple(value.inputs),
        is_fixed=value.fixed,
        is_standing=value.free,
        is_asked_for=value.needed,
    )


@contextmanager
def _naming_modules(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Keep ``recorder.modules`` up to date by hooks. A scripted module supports no such hooks, and stays unnamed."""
    names = {module: name for name, module in model.named_modules() if not isinstance(module, torch.jit.ScriptModule)}

    def enter(module: nn.Module, _: Any) -> None:
        recorder.modules.append(names.get(module, ""))

    def leave(module: nn.Module, _inputs: Any, _output: Any) -> None:
        recorder.modules.pop()

    hooks = [module.register_forward_pre_hook(enter) for module in names]
    hooks += [module.register_forward_hook(leave, always_call=True) for module in names]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
