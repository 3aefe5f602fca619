"""Many ops as one autograd node: autograd sees a single op, and inside it every buffer has one owner.

A node is made of a `Recording`: an object that ran forward, keeps what backward needs, and runs backward. What autograd
demands of a node is the same for all recordings and is implemented here: version checks, `retain_graph`, double
backward, saved-tensor hooks, threads.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from leangrad._torch import (
    autocast_may_be_on,
    autocast_off,
    graph_is_kept,
    has_memory,
    is_checkpointing,
    only_saves_on_cpu,
    saved_tensor_hooks_active,
    transforms_active,
    version,
)
from leangrad.engine.chain import Chain, Writer
from leangrad.engine.ownership import held_alone, owned, take
from leangrad.engine.tape import Tape, Var
from leangrad.ledger.observe.active_region import ledger_saves
from leangrad.ledger.origins.functions import Replay, register_rule
from leangrad.ledger.values.saved import Bare
from leangrad.ledger.values.value import Value
from leangrad.overridable import overridable

__all__ = ["Recording", "register_writer", "run", "run_recorded"]

Tensors = Sequence[Tensor | None]


class Recording(Protocol):
    """One forward run, and the tensors that it keeps for backward. `tensors` are those that the node was called with.

    output: during backward, the output of forward if `reads_output`, else None. A recording takes it out of here, so
        that it can be freed before backward ends.
    """

    output: Tensor | None

    @property
    def reads_output(self) -> bool:
        """Whether backward reads the output of forward. The output belongs to the caller and is not overwritten."""

    @property
    def can_overwrite(self) -> bool:
        """Whether backward gains by a gradient that is `ours`. Finding that out costs as much as a small op."""

    def hand_over(self) -> list[Tensor]:
        """Returns the kept tensors and drops them; before backward `take_back` stores them again."""

    def take_back(self, kept: Sequence[Tensor], alone: Sequence[bool]) -> bool:
        """Store the tensors of `hand_over` again, for one backward; returns whether they may be `spent` in it.

        alone: for each tensor, whether nothing else refers to it. The others are never overwritten.
        """

    def let_go(self) -> None:
        """Drop the tensors that `take_back` stored."""

    def backward(self, grad: Tensor, tensors: Tensors, *, ours: bool, spent: bool) -> Sequence[Tensor | None]:
        """Returns a gradient for each tensor that needs one.

        ours: `grad` may be overwritten. spent: the kept tensors may be overwritten.
        """


#: `writer_of(node, tensors)` returns what writes the gradients of parameters in place of autograd, or None.
WriterOf = Callable[[Any, Tensors], Writer | None]
_writer_of: WriterOf = lambda node, tensors: None  # noqa: E731


def register_writer(writer_of: WriterOf) -> None:
    """Call `writer_of` in each backward of a `Chain`. `leangrad.packed` uses this: it cannot be imported here."""
    global _writer_of
    _writer_of = writer_of


Record = Callable[[Tensors, Sequence[bool]], tuple[Tensor, Recording]]


def run(program: Callable[..., Var], plain: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """Run `program(tape, *vars)` on a private tape, as one autograd node.

    `plain(*tensors)` computes the same with autograd's own ops; a double backward differentiates it. `tensors` must
    hold everything that the program reads: the node saves them as autograd does, so that an in-place change before
    backward is an error, and backward returns a gradient for each that needs one.

    Keeps for backward: `tensors`, and what the program's steps keep.

    >>> x, w = torch.ones(2, 3, requires_grad=True), torch.ones(4, 3, requires_grad=True)
    >>> y = run(lambda tape, x, w: tape.activate(tape.linear(x, w), "relu"), lambda x, w: (x @ w.T).relu(), x, w)
    >>> y.sum().backward()
    >>> x.grad
    tensor([[4., 4., 4.],
            [4., 4., 4.]])
    """
    return run_recorded(lambda tensors, needs: _record_tape(program, tensors, needs), plain, *tensors)


def run_recorded(record: Record, plain: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """Run `record(tensors, needs)`, which returns its output and a `Recording`, as one autograd node; see `run`."""
    y: Tensor = _apply(record, plain, *tensors)
    return y


def _others_save(made: Tensor) -> bool:
    """Whether saved-tensor hooks are active that must get all tensors that a node keeps; `made` is its output.

    The hooks of a ledger need not get them, nor those of `save_on_cpu` for tensors on the CPU.
    """
    return saved_tensor_hooks_active() and not ledger_saves() and not (made.is_cpu and only_saves_on_cpu())


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, record: Record, plain: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
        y, recording = record(tensors, ctx.needs_input_grad[2:])
        # Saved-tensor hooks (of checkpointing or offloading) get all kept tensors and decide what to do with them. The
        # hooks of a ledger do not: it could only keep the tensors, and then backward could not overwrite them.
        handed = recording.hand_over() if _others_save(y) else None
        output = y if recording.reads_output else None
        if handed is None:  # autograd would hold the output to the end of our backward, which reads it at the start
            ctx.save_for_backward(*tensors)
            ctx.output = None if output is None else Bare(output.detach(), version(output), _Node)
        else:
            ctx.save_for_backward(*tensors, output, *handed)
        ctx.recording, ctx.plain, ctx.handed, ctx.lock = recording, plain, handed is not None, threading.Lock()
        ctx.in_checkpoint = handed is not None and is_checkpointing()
        ctx.can_overwrite = recording.can_overwrite
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ours = ctx.can_overwrite and owned(grad)
        with ctx.lock:  # two threads may run backward over one kept graph
            recording: Recording = take(
                ctx, "recording", keep="pass retain_graph=True to that one to run backward again"
            )
            again = graph_is_kept()
            if again:
                ctx.recording = recording
            needs, saved = ctx.needs_input_grad[2:], ctx.saved_tensors
            tensors = saved[: len(needs)]
            if torch.is_grad_enabled():
                return (None, None, *_differentiate(ctx.plain, tensors, needs, grad))
            if not has_memory(grad):  # a batch of gradients (`is_grads_batched`): only torch's own ops support it
                with torch.enable_grad():
                    return (None, None, *_differentiate(ctx.plain, tensors, needs, grad))
            handed, spent = ctx.handed, not again
            if handed:
                recording.output, kept = saved[len(needs)], list(saved[len(needs) + 1 :])
                del saved
                # A tensor that a checkpoint has recomputed belongs to this node; one of other hooks may be shared.
                alone = held_alone(kept) if ctx.in_checkpoint and not again else [False] * len(kept)
                spent = recording.take_back(kept, alone) and spent
                del kept  # so that a tensor is freed as soon as backward drops it
            elif ctx.output is not None:
                recording.output = ctx.output.unpack()
                if not again:
                    ctx.output = None
            if isinstance(recording, Chain):
                recording.writer = _writer_of(ctx, tensors)
            try:
                if autocast_may_be_on():  # around `.backward()`, where it must not change the dtypes of forward
                    with autocast_off(grad.device.type):
                        gradients = recording.backward(grad, tensors, ours=ours, spent=spent)
                else:
                    gradients = recording.backward(grad, tensors, ours=ours, spent=spent)
            finally:
                recording.output = None
                if isinstance(recording, Chain):
                    recording.writer = None  # it refers to this node, which may keep the recording
            if handed:
                recording.let_go()
        return (None, None, *gradients)


_apply_node: Callable[..., Tensor] = super(torch.autograd.Function, _Node).apply


def _apply_any(*args: Any) -> Tensor:
    # `Function.apply` inspects every tensor in Python for `torch.func`; without active transforms this is skipped.
    y: Tensor = _Node.apply(*args) if transforms_active() else _apply_node(*args)
    return y


_apply = overridable(_apply_any, product=True)


def _can_be_replayed(node: Any) -> bool:
    """Whether the node's output can be rebuilt: by its last activation, from an input that the node keeps."""
    recording = getattr(node, "recording", None)
    return isinstance(recording, Chain) and recording.can_lend


def _replay(walk: Any, node: Any) -> Replay:
    kept = Value("the input of an activation")
    record, source = node.recording.lend(kept)
    kept.keep(source)
    kept.pinned = True
    return record.forward, (kept, record.parameter, None)


register_rule(_Node, _replay, _can_be_replayed)


class _TapeRecording:
    """The `Recording` of a program on a private tape."""

    can_overwrite = True

    def __init__(self, tape: Tape, inputs: list[Var | None], out: Var):
        self.tape, self.inputs, self.out = tape, inputs, out
        self.reads_output = bool(out.readers) and out.fixed
        self.handed: list[tuple[Var, bool]] = []  # with its `fixed`, before `take_back`
        self.output: Tensor | None = None

    def hand_over(self) -> list[Tensor]:
        self.handed = [(var, var.fixed) for var in self.tape.held_values()]
        tensors = [var.value for var, _ in self.handed]
        for var, _ in self.handed:
            var.tensor = None
        return tensors

    def take_back(self, kept: Sequence[Tensor], alone: Sequence[bool]) -> bool:
        for (var, fixed), tensor, is_alone in zip(self.handed, kept, alone, strict=True):
            var.tensor, var.fixed = tensor, fixed or not is_alone
        return True

    def let_go(self) -> None:
        for var, _ in self.handed:
            var.tensor = None

    def backward(self, grad: Tensor, tensors: Tensors, *, ours: bool, spent: bool) -> list[Tensor | None]:
        given = zip((*self.inputs, self.out), (*tensors, self.output), strict=True)
        bound = [(var, t) for var, t in given if var is not None]
        for var, tensor in bound:
            var.tensor = tensor
        self.tape.backward(self.out, grad, ours=ours, again=not spent)
        gradients = [None if var is None else var.grad for var in self.inputs]
        for var, _ in bound:
            var.tensor = var.gradient = None
        return gradients


def _record_tape(program: Callable[..., Var], tensors: Tensors, needs: Sequence[bool]) -> tuple[Tensor, _TapeRecording]:
    tape = Tape(private=True)
    inputs = [None if t is None else tape.watch(t, needs_grad=n) for t, n in zip(tensors, needs, strict=True)]
    out = program(tape, *inputs)
    y = out.value
    out.fixed = out.rebuilt is None  # the output belongs to the caller from here on
    recording = _TapeRecording(tape, inputs, out)
    tape.forget_values(out)
    tape.pool.close()
    return y, recording


def _differentiate(
    plain: Callable[..., Tensor], tensors: Tensors, needs: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """Returns the gradients of `plain`, with a graph of their own."""
    # A tensor that is passed twice must get two gradients: one alias for each position.
    aliases = [None if t is None else t.view_as(t) for t in tensors]
    wanted = [alias for alias, need in zip(aliases, needs, strict=True) if alias is not None and need]
    found = iter(torch.autograd.grad(plain(*aliases), wanted, grad, create_graph=True, allow_unused=True))
    return [next(found) if alias is not None and need else None for alias, need in zip(aliases, needs, strict=True)]
