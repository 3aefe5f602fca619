"""The partitioner: splits a joint graph into forward and backward; the policy chooses what forward saves."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import fx

from leangrad import __version__
from leangrad._torch import compiler
from leangrad.compiled.convolutions import handed_out, lay_out_convolutions, split_convolutions
from leangrad.compiled.copies import NamedCopy, insert_copies
from leangrad.compiled.dropout import restore_dropout, write_out_dropout
from leangrad.compiled.first_step import FirstStep
from leangrad.compiled.joint_graph import copy_changed_inputs, read_joint_graph
from leangrad.errors import BudgetError
from leangrad.loss.graph_op import LOSS_OP
from leangrad.policy.choice import REUSED_READS, Choice, choose
from leangrad.policy.copies import Copy
from leangrad.policy.peak import copies_of
from leangrad.sizes import size_text

__all__ = ["Partitioner", "Settings"]


@dataclass(frozen=True)
class Settings:
    """The user's options. All of them are part of the key of torch's compile caches."""

    exact: bool = False
    slowdown: float = 1.1
    budget: int | None = None  # most bytes of one graph's step above what is allocated before it; None: no bound
    fused_loss: bool = True  # ignored if ``exact``


class Partitioner(compiler.partitioner_class()):  # type: ignore[misc]
    """AOTAutograd's partitioner with the policy's cut. Everything around the cut is torch's own."""

    def __init__(self, settings: Settings, limits: Sequence[int] = REUSED_READS) -> None:
        self.settings = settings
        self.limits = tuple(limits)  # values of ``Fusion.reused_reads`` for backward; the first is the default one
        self.reused_reads = self.limits[0]  # the limit that was chosen together with the cut
        self.chosen: Chosen | None = None  # for the graph that was partitioned; None before that
        self._copies: list[NamedCopy] = []  # what backward computes once more, for the graph that is being partitioned

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Partition one joint graph into forward and backward."""
        self._copies = []
        written = write_out_dropout(gm.graph) if self.settings.exact else []
        try:
            with compiler.choosing(self._keep):
                forward, backward = compiler.partition(gm, joint_inputs, **kwargs)
        except OverflowError:  # backward reads the old value of an input that forward writes into
            copy_changed_inputs(gm.graph)
            with compiler.choosing(self._keep_or_leave_it):
                forward, backward = compiler.partition(gm, joint_inputs, **kwargs)
        restore_dropout(forward, written)
        if not self.settings.exact:
            insert_copies(backward.graph, self._copies)
            lay_out_convolutions(backward.graph)
            split_convolutions(backward.graph)
            backward.recompile()
        return forward, backward

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the settings alone: Inductor makes its cache keys from all that is pickled with its configuration."""
        return Partitioner, (self.settings, self.limits)

    def uuid(self) -> str:
        """Return the key of this partitioner in torch's caches: its settings, and a digest of the code that chooses."""
        return f"leangrad {__version__} {_code()} {asdict(self.settings)} {self.limits}"

    def _keep(self, graph: fx.Graph, info: Any) -> list[fx.Node]:
        began = time.perf_counter()
        step, nodes = read_joint_graph(graph, info, fused=not self.settings.exact)
        usual = None if self.settings.exact else self._usual(graph, info, nodes)
        budget = self.settings.budget
        choice = choose(step, slowdown=self.settings.slowdown, limits=self.limits, usual=usual, budget=budget)
        if budget is not None and choice.outcome.peak_bytes > budget:
            least = choice.outcome.peak_bytes
            raise BudgetError(
                f"leangrad.budget: {size_text(budget)} cannot be met; the step of this graph takes at least "
                f"{size_text(least)} above what stands before it. Give it that much, or use torch.utils.checkpoint.",
                smallest=least,
            )
        self.reused_reads = choice.reused_reads
        losses = sum(node.target is LOSS_OP for node in graph.nodes)
        self.chosen = Chosen(choice, time.perf_counter() - began, fused_losses=losses)
        chosen.append(self.chosen)
        del chosen[:-REMEMBERED]
        self._copies = [_named(copy, nodes) for copy in copies_of(step, choice.kept, reused_reads=choice.reused_reads)]
        views = {node for node, value in zip(nodes, step.values, strict=True) if value.view_of is not None}
        return [handed_out(nodes[n], views) if step.values[n].is_inlined else nodes[n] for n in sorted(choice.kept)]

    @staticmethod
    def _usual(graph: fx.Graph, info: Any, nodes: list[fx.Node]) -> frozenset[int] | None:
        """Return the indices of the values that torch itself would keep; None if its solver fails on this graph."""
        kept = compiler.stock_choice(graph, info)
        return None if kept is None else frozenset(map({node: n for n, node in enumerate(nodes)}.__getitem__, kept))

    def _keep_or_leave_it(self, graph: fx.Graph, info: Any) -> list[fx.Node] | None:
        try:
            return self._keep(graph, info)
        except OverflowError:
            return None  # a value can neither be kept nor recomputed: torch's own choice is used


def _named(copy: Copy, nodes: list[fx.Node]) -> NamedCopy:
    groups = (copy.ops, copy.readers, copy.inlined, copy.kernels)
    return NamedCopy(nodes[copy.value].name, *(frozenset(nodes[n].name for n in group) for group in groups))


@dataclass
class Chosen:
    """What the policy chose for one graph, how long the choice took, and the memory that the first step held."""

    choice: Choice
    seconds: float
    first_step: FirstStep | None = None  # None if the graph does not run on a GPU
    fused_losses: int = 0  # number of losses that are computed without logits


REMEMBERED = 64
chosen: list[Chosen] = []  # for the last graphs that were compiled; `summary` reads it


def _code() -> str:
    """Return a digest of the code that chooses, so that graphs cached by one version are not used by another."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    others = [here.parent / name for name in ("_torch/compiler.py", "loss/graph_op.py", "loss/logit_ops.py")]
    for path in sorted([*here.glob("*.py"), *(here.parent / "policy").glob("*.py"), *others]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
