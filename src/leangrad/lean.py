"""The entry points `lean`, `plain` and `saving`: the same model, with the same gradients, in less memory.

    model = leangrad.lean(model)            # from now on every forward keeps only what backward cannot rebuild
    model = leangrad.plain(model)           # undo it

    with leangrad.saving() as ledger:       # the same for any region of code, the loss included
        loss = criterion(model(x), y)
    loss.backward()
    print(ledger.summary())

`lean` sets forward hooks on the model, which open and close a region. `ledger/` holds what runs inside the region: when
autograd saves a tensor, the ledger finds out how the tensor was made, and keeps it, shares one that is kept already, or
stores a recipe that rebuilds it bit for bit in backward.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from leangrad import _torch
from leangrad._torch import compiler
from leangrad.attach.inert import Watch
from leangrad.attach.training_step import (
    add_training_step,
    has_training_step,
    manual_parts,
    remove_training_step,
)
from leangrad.ledger import MIN_BYTES, Goal, Ledger, Region
from leangrad.ledger.batches import Batches
from leangrad.ledger.gc_pause import GcPause
from leangrad.ledger.learn.entries import Entry
from leangrad.loss.lazy import describe, make_eager, make_lazy, note_sharding
from leangrad.sizes import parse_budget
from leangrad.switch import is_plain_for_now

__all__ = ["is_lean", "lean", "ledger_of", "plain", "saving"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def lean(
    model: ModuleT,
    *,
    budget: int | str | None = None,
    slowdown: float | None = None,
    exact: bool = True,
    spare: float = 0.02,
    residual_depth: int | Literal["auto"] = "auto",
    min_bytes: int = MIN_BYTES,
) -> ModuleT:
    """Make ``model`` keep only what backward cannot rebuild. Returns the same object.

    Equals ``model``: class, parameters, state_dict, forward and gradients are the same, bit for bit. Autograd only
    keeps fewer bytes between forward and backward.

    budget: the memory that a step may use: bytes, ``"20GB"``, ``"20GiB"``, or ``"90%"`` of the GPU's memory. On a GPU
        this is the peak of allocated memory over the whole step (``torch.cuda.max_memory_allocated``); on a CPU, the
        memory that the step uses in addition to what was allocated before it
        (``leangrad.measure(step).peak_bytes``). The first step is recorded and may use more than the budget. The next
        steps use the least memory possible; after them, as many tensors are kept as fit, beginning with those that are
        the most expensive to rebuild. If the budget cannot be met, one of the next forwards raises
        ``leangrad.errors.BudgetError``, which names the smallest budget that can be met.
    slowdown: use the least memory with which a step takes at most this many times as long as in plain PyTorch, 1.1 for
        instance. The times are measured in the first steps, some of which run plain. Without ``budget`` and
        ``slowdown`` a step uses the least memory possible, apart from ``spare``.
    exact: False lets the loss of a language model be computed without its logits; it is then not equal to that of plain
        PyTorch bit for bit, and neither are the gradients. The projection to the vocabulary returns a tensor whose
        values are computed only if they are read, and ``F.cross_entropy`` on it computes
        ``leangrad.linear_cross_entropy``. Everything else stays as it is.
    spare: a fraction of the least memory possible, for models on a GPU without ``budget`` and ``slowdown``. If the GPU
        waits for the host, a step may use this much more, to keep tensors whose rebuild costs the host much time and
        saves few bytes; 0: keep none of them. Whether the GPU waits is measured in a few of the first steps; on a CPU
        nothing is measured.
    residual_depth: how many additions of a residual stream may be rebuilt in a row. ``"auto"`` chooses the cut with the
        lowest peak, from the recording of the first step.
    min_bytes: tensors with fewer bytes are kept without being examined.

    A model that is lean already gets the new settings and starts to learn anew. The model runs plain under
    ``torch.compile`` (to save memory there, use ``backend="leangrad"``), ``torch.func``, ``no_grad``, inference mode
    and ``LEANGRAD_DISABLE=1``. Only ``forward`` is lean, and the ``training_step`` of a LightningModule. If a model is
    trained through other methods, a warning says so at its first backward; use ``saving`` there.

    >>> import torch, leangrad
    >>> model = leangrad.lean(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()))
    >>> model(torch.ones(2, 8)).sum().backward()
    """
    _check_module("lean", model, "; for code that is no module use `with saving():`")
    goal = _goal(budget, slowdown)
    if not isinstance(exact, bool):
        raise ValueError(f"exact must be True or False, got {exact!r}")
    ledger = Ledger(residual_depth=residual_depth, min_bytes=min_bytes, goal=goal, spare=spare)
    parts = manual_parts(model)
    if parts and ledger.goal is not None:
        raise ValueError(
            f"this {type(model).__name__} optimizes manually, with several backward passes in a training_step, and a "
            "budget or a slowdown is for one; give it to the submodule that needs it: leangrad.lean(model.part, ...)"
        )
    plain(model)
    for part in parts:
        if not is_lean(part):
            _make_lean(part, ledger.fresh(), is_part=True)
    if not exact:
        make_lazy(model)
    ledger.remark = Remark(model)
    _make_lean(model, ledger, is_part=False)
    return model


def _make_lean(model: nn.Module, ledger: Ledger, *, is_part: bool) -> None:
    enter = Enter(ledger, Watch(model), is_part=is_part)
    hooks: list[Any] = [enter]
    if ledger.goal is not None:
        hooks.insert(0, SeeBatch(enter, Batches(ledger)))
        model.register_forward_pre_hook(hooks[0], with_kwargs=True)
    model.register_forward_pre_hook(enter, with_kwargs=True)
    model.register_forward_hook(Leave(), prepend=True, always_call=True)
    if has_training_step(model) and not manual_parts(model):
        add_training_step(model, Around(hooks))


def _goal(budget: int | str | None, slowdown: float | None) -> Goal | None:
    if budget is not None and slowdown is not None:
        raise ValueError("give a budget or a slowdown, not both: each says how far to go, by memory or by time")
    if slowdown is not None:
        if isinstance(slowdown, bool) or not isinstance(slowdown, int | float) or not 1 <= slowdown < float("inf"):
            raise ValueError(f"slowdown must be a number of at least 1, such as 1.1, got {slowdown!r}")
        return Goal(slowdown=float(slowdown))
    return None if budget is None else Goal(budget=parse_budget(budget))


def plain(model: ModuleT) -> ModuleT:
    """Undo ``lean``. Returns the same object; a model that is not lean stays as it is.

    >>> import torch, leangrad
    >>> model = leangrad.lean(torch.nn.Linear(2, 2))
    >>> leangrad.is_lean(leangrad.plain(model))
    False
    """
    _check_module("plain", model)
    for hook in _torch.forward_pre_hooks(model):
        if isinstance(hook, Enter):
            hook.end_watch()
    _torch.remove_forward_hooks(model, (SeeBatch, Enter, Leave))
    remove_training_step(model)
    for part in manual_parts(model):
        if any(isinstance(hook, Enter) and hook.is_part for hook in _torch.forward_pre_hooks(part)):
            plain(part)
    make_eager(model)
    return model


def saving(*, residual_depth: int | Literal["auto"] = "auto", min_bytes: int = MIN_BYTES) -> Ledger:
    """Return a context manager that does for any region of code, the loss included, what ``lean`` does for a model.

    Backward may run inside the region or after it. Keep the object and enter it again in the next step, so that it uses
    what it learned.

    >>> import torch, leangrad
    >>> x = torch.ones(64, 64, requires_grad=True)
    >>> with leangrad.saving() as ledger:
    ...     loss = torch.nn.functional.gelu(x @ x).relu().sum()
    >>> loss.backward()
    """
    return Ledger(residual_depth=residual_depth, min_bytes=min_bytes)


def is_lean(model: nn.Module) -> bool:
    """Whether ``lean`` was called on this very module, not on one around it.

    >>> import torch, leangrad
    >>> leangrad.is_lean(torch.nn.Linear(2, 2))
    False
    """
    _check_module("is_lean", model)
    return any(isinstance(hook, Enter) for hook in _torch.forward_pre_hooks(model))


def ledger_of(model: nn.Module) -> Ledger:
    """Return the ledger of a lean model, which shows what was kept, shared and rebuilt, and why.

    >>> import torch, leangrad
    >>> ledger = leangrad.ledger_of(leangrad.lean(torch.nn.Linear(2, 2)))
    """
    _check_module("ledger_of", model)
    for hook in _torch.forward_pre_hooks(model):
        if isinstance(hook, Enter):
            return hook.ledger
    raise ValueError(f"this {type(model).__name__} is not lean; call leangrad.lean(model) first")


def _check_module(function: str, model: object, mend: str = "") -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}() expects an nn.Module, got {type(model).__name__}{mend}")


@compiler.while_tracing
def _say_which_backend() -> bool:
    """Warn, once per process, if torch.compile compiles a lean model with a backend other than leangrad's."""
    global _has_said
    backend = compiler.tracing_backend()
    if not _has_said and backend not in (None, "leangrad", "compile_lean"):
        _has_said = True
        warnings.warn(
            f'torch.compile(..., backend="{backend}") compiles a lean model as a plain one; for less memory use '
            'torch.compile(model, backend="leangrad")',
            stacklevel=2,
        )
    return True


_has_said = False


class Remark:
    """Writes what a model's summary says about its logits, and about submodules that have ledgers of their own."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def __call__(self, entries: Sequence[Entry]) -> str:
        model = self._model()
        if model is None:
            return ""
        if manual_parts(model) and not entries:
            return (
                f"That is as it should be here: this {type(model).__name__} optimizes manually, so its submodules are "
                "lean, each with a ledger of its own: leangrad.ledger_of(model.part).summary()"
            )
        return describe(model, entries)


class Hook:
    """Base class of the hooks of a lean module."""

    @property
    def __name__(self) -> str:
        """Raise an error that explains what to do: only torch.jit.script, which cannot compile the hook, reads this."""
        raise AttributeError(
            "torch.jit.script cannot compile a lean model, whose hooks are Python; script it after "
            "leangrad.plain(model), or record it with torch.jit.trace(model, inputs), which takes a lean model"
        )


class SeeBatch(Hook):
    """The first forward pre-hook of a lean module with a goal: selects the ledger for the shapes of the batch."""

    is_leangrads = True

    def __init__(self, enter: Enter, batches: Batches) -> None:
        self.enter, self.batches = enter, batches

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not _torch.is_traced() and torch.is_grad_enabled() and not _is_inside(module):
            self.enter.ledger = self.batches.select((args, kwargs))


class Enter(Hook):
    """The forward pre-hook of a lean module: opens its region.

    torch passes to a hook the module that really runs, so copies and replicas of a lean module are lean themselves.
    torch calls the forward hook `Leave` whenever forward ends, except by a KeyboardInterrupt or another error that is
    not an ``Exception``. For these the arguments that this hook returns carry a guard, which closes the region when the
    frame of forward is freed.
    """

    is_leangrads = True

    def __init__(self, ledger: Ledger, watch: Watch | None = None, *, is_part: bool = False) -> None:
        self.ledger = ledger
        self.watch = watch  # warns of training without forward; None once forward has run
        self.is_part = is_part  # the module was made lean with the LightningModule that it is a part of
        self._has_run = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy without ``watch``, because the hooks of parameters are not copied with them."""
        return _enter, (self.ledger, self.is_part)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Arguments, dict[str, Any]] | None:
        guarded = self.open(module, args, (list(args), kwargs))
        return None if guarded is None else (guarded, kwargs)

    def open(self, module: nn.Module, args: tuple[Any, ...], batch: Any = None) -> Arguments | None:
        """Open the region of ``module``, and return its arguments with a guard; ``batch``: see `Ledger.region`."""
        if _torch.is_traced():
            if torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting():
                _say_which_backend()
            if self.watch is not None:
                self.watch.forward_ran = True
            return None
        if self.watch is not None and torch.is_grad_enabled() and not is_plain_for_now():
            self.end_watch()
        if not self._has_run:
            self._has_run = True
            note_sharding(module)
        region = None if _is_inside(module) else self.ledger.region(module, batch)
        if region is not None:
            region.__enter__()
        call = _Call(module, region, self.ledger)
        _calls().append(call)
        return Arguments(*args, guard=_Guard(call))

    def end_watch(self) -> None:
        """Stop watching, because forward runs or the module is no longer lean."""
        if self.watch is not None:
            self.watch.end()
            self.watch = None


def _enter(ledger: Ledger, is_part: bool) -> Enter:
    """Make a copy of an `Enter`, or load a pickled one."""
    return Enter(ledger, is_part=is_part)


class Leave(Hook):
    """The forward hook of a lean module, called also after an exception: closes its region."""

    is_leangrads = True

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if _torch.is_traced():
            return
        calls = _calls()
        if calls and calls[-1].module is module:
            region = calls[-1].region
            if region is not None:
                region.wrap_new_reentrant(output)
            if not calls[-1].is_inside:
                calls[-1].ledger.note_output(output)
            calls[-1].close()


class Around:
    """Opens and closes the region of a lean module around a method other than forward."""

    def __init__(self, before: list[Any]) -> None:
        self.before = before  # the forward pre-hooks of the module

    def __call__(self, method: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call ``method(*args, **kwargs)``, a method of ``module``, in a region."""
        *see_batch, enter = self.before
        for hook in see_batch:
            hook(module, args, kwargs)
        guarded = enter.open(module, args)
        output = None
        try:
            output = method(*args, **kwargs)
            return output
        finally:
            Leave()(module, guarded, output)


class Arguments(tuple[Any, ...]):
    """The arguments of forward, with the guard of its region.

    A full backward hook on the same module replaces them by ``type(arguments)(*others)``, which then carries the guard.
    """

    guard: _Guard | None

    def __new__(cls, *args: Any, guard: _Guard | None = None) -> Arguments:
        arguments = super().__new__(cls, args)
        calls = _calls()
        arguments.guard = guard or (calls[-1].guard() if calls else None)
        return arguments


class _Guard:
    """Closes the region of a call when the guard is freed, unless it is closed already."""

    def __init__(self, call: _Call) -> None:
        self.call = call
        call.guard = weakref.ref(self)

    def __del__(self) -> None:
        self.call.close()


class _Call:
    """A running call of a lean module, and the region it opened."""

    def __init__(self, module: nn.Module, region: Region | None, ledger: Ledger) -> None:
        self.module, self.region, self.ledger = module, region, ledger
        self.is_inside = _is_inside(module)
        self.has_gradients = torch.is_grad_enabled()
        self.thread = threading.get_ident()
        self.gc_pause = GcPause() if region is not None else None
        self.guard: Callable[[], _Guard | None] = lambda: None  # once there is a guard, a weak reference to it

    def close(self) -> None:
        """End this call, and those inside it that were left open."""
        calls = _calls()
        if self.thread != threading.get_ident() or self not in calls:
            self._end_gc_pause()  # at the latest here, in whichever thread the call is freed
            return
        while calls:
            call = calls.pop()
            if call.region is not None:
                call.region.__exit__(None, None, None)
            call._end_gc_pause()
            if call is self:
                return

    def _end_gc_pause(self) -> None:
        if self.gc_pause is not None:
            self.gc_pause.end()


_local = threading.local()


def _is_inside(module: nn.Module) -> bool:
    """Whether a call of this very module runs in this thread with gradients; a call inside it begins no new step.

    For example, the training_step of a LightningModule may call its forward.
    """
    return any(call.module is module and call.has_gradients for call in _calls())


def _calls() -> list[_Call]:
    """Return the calls of lean modules that are running in this thread, the outermost first."""
    if not hasattr(_local, "calls"):
        _local.calls = []
    return _local.calls  # type: ignore[no-any-return]
