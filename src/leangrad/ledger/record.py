"""What one step shows: the tensors it saved, what became of each and why, and the order in which backward read them."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from leangrad.ledger.plan import Item, Record
from leangrad.ledger.value import Value


@dataclass(frozen=True)
class Entry:
    """One saved tensor in the summary."""

    module: str
    op: str
    outcome: str  # "kept", "rebuilt" or "shared"
    nbytes: int
    why: str


class Recorder:
    """Listens to one region and to the backward passes that follow it."""

    def __init__(self, root: nn.Module | None, min_bytes: int) -> None:
        self.min_bytes = min_bytes
        self.entries: list[Entry] = []
        self.items: list[Item] = []
        self.reads: list[int] = []
        self.caught = 0  # tensors kept although autograd did not ask for them
        self.signatures: list[tuple[str, int]] = []  # of every decision, in order
        self._decided: list[tuple[Value, str, str]] = []  # value, module, why it was kept
        self._decisions: list[int] = []  # the item of every decision
        self._kept: list[bool] = []  # what became of it
        self._names = {} if root is None else {id(m): name or type(m).__name__ for name, m in root.named_modules()}
        self._local = threading.local()
        self._handles: list[Any] = []

    # ---------------------------------------------------------------- in forward

    def start(self) -> None:
        """Follow which module runs."""
        self._local.stack = []
        self._handles = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        stack = getattr(self._local, "stack", None)
        if stack is not None:
            stack.append(self._names.get(id(module), type(module).__name__))

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        stack = getattr(self._local, "stack", None)
        if stack:
            stack.pop()

    def module(self) -> str:
        """The path of the module that runs now."""
        stack = getattr(self._local, "stack", None)
        return stack[-1] if stack else ""

    def decided(self, value: Value, signature: tuple[str, int], why: str) -> None:
        """The ledger chose: ``value`` is kept because of ``why``, or rebuilt."""
        self.signatures.append(signature)
        self._decided.append((value, self.module(), why))

    def shared(self, value: Value, nbytes: int) -> None:
        """A tensor was asked for again."""
        if nbytes >= self.min_bytes:
            self.entries.append(Entry(self.module(), value.op, "shared", nbytes, "kept or rebuilt once for all readers"))

    def stop(self) -> None:
        """The region ends: number the values, and turn what was decided into plain data."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for value, module, why in self._decided:
            self._number(value)
            self._decisions.append(value.ordinal)
            self._kept.append(value.tensor is not None)
            outcome = "kept" if value.tensor is not None else "rebuilt"
            self.entries.append(Entry(module, value.op, outcome, value.nbytes, why if outcome == "kept" else ""))
        for value, _, _ in self._decided:
            value.forget_recipe()
        self._decided = []

    def _number(self, value: Value) -> int:
        if value.ordinal < 0:
            sources = tuple(sorted(self._sources(value))) if value.function is not None and not value.blocked else ()
            joins = len({id(v.root or v) for v in value.values() if not v.free}) > 1 if sources else False
            value.ordinal = len(self.items)
            self.items.append(Item(value.nbytes, sources, choice=joins or value.depth > 0))
        return value.ordinal

    def _sources(self, value: Value) -> set[int]:
        found: set[int] = set()
        for v in value.values():
            if v.ordinal >= 0:
                found.add(v.ordinal)
            elif v.free or v.nbytes < self.min_bytes and v.tensor is not None:
                continue
            elif v.tensor is not None:
                found.add(self._number(v))
            else:
                found |= self._sources(v)
        return found

    # ---------------------------------------------------------------- in backward

    def read(self, value: Value) -> None:
        """Backward asked for ``value``."""
        while value.ordinal < 0 and value.op == "view" and type(value.args[0]) is Value:
            value = value.args[0]
        if value.ordinal >= 0:
            self.reads.append(value.ordinal)

    def record(self) -> Record:
        """The step as data, for the plan."""
        return Record(tuple(self.items), tuple(self.reads))

    def decisions(self, cut: frozenset[int] | None) -> list[tuple[str, int, bool]]:
        """For every decision of the step in order: its signature, and whether the tensor is simply kept.

        Without a cut, what was kept is kept again and what was rebuilt is rebuilt again.
        """
        made = []
        for (op, nbytes), n, kept in zip(self.signatures, self._decisions, self._kept, strict=True):
            item = self.items[n]
            made.append((op, nbytes, n in cut if cut is not None and item.choice else kept))
        return made


def tensor_signature(tensor: Tensor) -> tuple[str, int]:
    """What a decision is known by from step to step."""
    return type(tensor.grad_fn).__name__, tensor.nbytes
