"""Many ops as one autograd node: any model sees a single op, and inside it every buffer has one owner.

A node is made of a `Recording`: something that ran forward, keeps what it needs, and runs backward. What autograd
demands of a node is the same for all of them and is here: versions, `retain_graph`, double backward, saved-tensor
hooks, threads.
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
from leangrad.ledger.origins.functions import Replay, know
from leangrad.ledger.values.saved import Bare
from leangrad.ledger.values.value import Value
from leangrad.overridable import overridable

__all__ = ["Recording", "register_writer", "run", "run_recorded"]

Tensors = Sequence[Tensor | None]


class Recording(Protocol):
    """One run forward, and what it keeps. `tensors` are those that the node was given.

    output: in backward the output, if it `reads_output`; taken out of here, it can be freed before backward ends.
    """

    output: Tensor | None

    @property
    def reads_output(self) -> bool:
        """Whether backward reads the output, which then belongs to the caller."""

    @property
    def can_overwrite(self) -> bool:
        """Whether backward gains by a gradient that is `ours`; to find that out costs as much as a small op."""

    def hand_over(self) -> list[Tensor]:
        """Give away what is kept; before backward it comes back by `take_back`."""

    def take_back(self, kept: Sequence[Tensor], alone: Sequence[bool]) -> bool:
        """Hold what `hand_over` gave away, for one backward; whether what is kept may be `spent` in it.

        alone: of each, whether nobody else sees it. The others are never overwritten.
        """

    def let_go(self) -> None:
        """Hold nothing of that any more."""

    def backward(self, grad: Tensor, tensors: Tensors, *, ours: bool, spent: bool) -> Sequence[Tensor | None]:
        """A gradient for each tensor that needs one; `grad` may be overwritten if `ours`, what is kept if `spent`."""


#: `writer_of(node, tensors)` makes what writes the gradients of parameters in place of autograd; see `register_writer`.
WriterOf = Callable[[Any, Tensors], Writer | None]
_writer_of: WriterOf = lambda node, tensors: None  # noqa: E731


def register_writer(writer_of: WriterOf) -> None:
    """Let `writer_of` be asked in each backward; `leangrad.packed`, which stands above this file, is."""
    global _writer_of
    _writer_of = writer_of


Record = Callable[[Tensors, Sequence[bool]], tuple[Tensor, Recording]]


def run(program: Callable[..., Var], plain: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """Run `program(tape, *vars)` on a private tape as one autograd node.

    `plain(*tensors)` computes the same on autograd's own ops; it is what a double backward differentiates. `tensors`
    must hold everything that the program reads: the node saves them as autograd does, so that a change in place
    before backward is an error, and a gradient goes back to each that needs one.

    Keeps for backward: the tensors given, and what the program's steps keep.

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
    """Whether there are hooks that want what a node keeps beside `made`, its output."""
    return saved_tensor_hooks_active() and not ledger_saves() and not (made.is_cpu and only_saves_on_cpu())


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, record: Record, plain: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
        y, recording = record(tensors, ctx.needs_input_grad[2:])
        # Whoever hooks into saving (checkpointing, offloading) gets all that is kept, and decides what becomes of it.
        # A ledger could only keep it, and then nothing of it might be overwritten in backward.
        handed = recording.hand_over() if _others_save(y) else None
        output = y if recording.reads_output else None
        if handed is None:  # autograd would hold the output to the end of our backward, which reads it at the beginning
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
            if not has_memory(grad):  # a batch of gradients at once: only torch's own ops know what to do with it
                with torch.enable_grad():
                    return (None, None, *_differentiate(ctx.plain, tensors, needs, grad))
            handed, spent = ctx.handed, not again
            if handed:
                recording.output, kept = saved[len(needs)], list(saved[len(needs) + 1 :])
                del saved
                # What a checkpoint has computed again is its reader's; what other hooks hand out may be anybody's.
                alone = held_alone(kept) if ctx.in_checkpoint and not again else [False] * len(kept)
                spent = recording.take_back(kept, alone) and spent
                del kept  # what is overwritten or dropped on the way is to be free
            elif ctx.output is not None:
                recording.output = ctx.output.unpack()
                if not again:
                    ctx.output = None
            if isinstance(recording, Chain):
                recording.writer = _writer_of(ctx, tensors)
            try:
                if autocast_may_be_on():  # around `.backward()`; it has no say in what forward computed in other dtypes
                    with autocast_off(grad.device.type):
                        gradients = recording.backward(grad, tensors, ours=ours, spent=spent)
                else:
                    gradients = recording.backward(grad, tensors, ours=ours, spent=spent)
            finally:
                recording.output = None
                if isinstance(recording, Chain):
                    recording.writer = None  # it knows this node, which may keep the recording
            if handed:
                recording.let_go()
        return (None, None, *gradients)


_apply_node: Callable[..., Tensor] = super(torch.autograd.Function, _Node).apply


def _apply_any(*args: Any) -> Tensor:
    # `Function.apply` looks at every tensor in Python for the sake of `torch.func`; where that is not about, skip it.
    y: Tensor = _Node.apply(*args) if transforms_active() else _apply_node(*args)
    return y


_apply = overridable(_apply_any, product=True)


def _can_be_replayed(node: Any) -> bool:
    """Whether the output is the last activation of what the node keeps."""
    recording = getattr(node, "recording", None)
    return isinstance(recording, Chain) and recording.can_lend


def _replay(walk: Any, node: Any) -> Replay:
    kept = Value("the input of an activation")
    record, source = node.recording.lend(kept)
    kept.keep(source)
    kept.pinned = True
    return record.forward, (kept, record.parameter, None)


know(_Node, _replay, _can_be_replayed)


class _TapeRecording:
    """A program on a private tape."""

    can_overwrite = True

    def __init__(self, tape: Tape, inputs: list[Var | None], out: Var):
        self.tape, self.inputs, self.out = tape, inputs, out
        self.reads_output = bool(out.readers) and out.fixed
        self.handed: list[tuple[Var, bool]] = []  # and whether its memory is never overwritten
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
    """The gradients of `plain`, with a graph of their own."""
    # A tensor that is given twice must get two gradients: one alias for each place.
    aliases = [None if t is None else t.view_as(t) for t in tensors]
    wanted = [alias for alias, need in zip(aliases, needs, strict=True) if alias is not None and need]
    found = iter(torch.autograd.grad(plain(*aliases), wanted, grad, create_graph=True, allow_unused=True))
    return [next(found) if alias is not None and need else None for alias, need in zip(aliases, needs, strict=True)]
