"""The partitioner: of a joint graph, what forward hands to backward, by the policy."""

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
from leangrad.compiled.dropout import restore_dropout, write_out_dropout
from leangrad.compiled.first_step import FirstStep
from leangrad.compiled.joint_graph import copy_changed_inputs, read_joint_graph
from leangrad.compiled.layouts import handed_out, lay_out_convolutions
from leangrad.errors import BudgetError
from leangrad.loss.graph_op import LOSS_OP
from leangrad.policy.choice import REUSED_READS, Choice, choose
from leangrad.sizes import size_text

__all__ = ["Partitioner", "Settings"]


@dataclass(frozen=True)
class Settings:
    """What a user may say; all of it is part of the key of torch's compile caches."""

    exact: bool = False
    slowdown: float = 1.1
    budget: int | None = None  # bytes of one graph's step, above what stands before it
    fused_loss: bool = True  # but not if ``exact``


class Partitioner(compiler.partitioner_class()):  # type: ignore[misc]
    """AOTAutograd's partitioner with the policy's cut. Everything around the cut is torch's own."""

    def __init__(self, settings: Settings, limits: Sequence[int] = REUSED_READS) -> None:
        self.settings = settings
        self.limits = tuple(limits)  # on reads: those that backward may be compiled with, first the one it would be
        self.reused_reads = self.limits[0]  # the one that goes with the cut
        self.chosen: Chosen | None = None  # for the graph that was partitioned

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Partition one joint graph."""
        written = write_out_dropout(gm.graph) if self.settings.exact else []
        try:
            with compiler.choosing(self._keep):
                forward, backward = compiler.partition(gm, joint_inputs, **kwargs)
        except OverflowError:  # backward reads what forward has changed
            copy_changed_inputs(gm.graph)
            with compiler.choosing(self._keep_or_leave_it):
                forward, backward = compiler.partition(gm, joint_inputs, **kwargs)
        restore_dropout(forward, written)
        if not self.settings.exact:
            lay_out_convolutions(backward.graph)
            backward.recompile()
        return forward, backward

    def uuid(self) -> str:
        """What tells this partitioner from another in the caches: its settings, and the code of the policy."""
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
        views = {node for node, value in zip(nodes, step.values, strict=True) if value.view_of is not None}
        return [handed_out(nodes[n], views) if step.values[n].is_inlined else nodes[n] for n in sorted(choice.kept)]

    @staticmethod
    def _usual(graph: fx.Graph, info: Any, nodes: list[fx.Node]) -> frozenset[int] | None:
        """The values that torch itself would keep."""
        kept = compiler.stock_choice(graph, info)
        return None if kept is None else frozenset(map({node: n for n, node in enumerate(nodes)}.__getitem__, kept))

    def _keep_or_leave_it(self, graph: fx.Graph, info: Any) -> list[fx.Node] | None:
        try:
            return self._keep(graph, info)
        except OverflowError:
            return None  # something can be handed to no backward: torch itself may know what to do with it


@dataclass
class Chosen:
    """What the policy chose for one graph, how long that took, and what the first step then held."""

    choice: Choice
    seconds: float
    first_step: FirstStep | None = None  # where the device counts its memory
    fused_losses: int = 0  # that are computed without logits


REMEMBERED = 64
chosen: list[Chosen] = []  # of the last graphs that were compiled, for the summary


def _code() -> str:
    """A digest of the code that chooses: another version of it must not be served another's graphs."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    others = [here.parent / name for name in ("_torch/compiler.py", "loss/graph_op.py", "loss/logit_ops.py")]
    for path in sorted([*here.glob("*.py"), *(here.parent / "policy").glob("*.py"), *others]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
