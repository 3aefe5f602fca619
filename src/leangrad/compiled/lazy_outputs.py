"""The logits that a graph returns: the projection is done outside of it, when somebody reads them.

[Note: returned logits] Models return logits beside their loss, and few ask for them. The graph then returns what the
projection reads, and the projection is put off until somebody reads values: what is handed out are lazy logits
(`leangrad.loss.lazy`), of the graph's hidden states and of the parameters themselves, and in autograd's graph as the
logits would be. Where the weight may be gone by then (FSDP, ZeRO) they are computed at once.

[Note: broken graphs] Dynamo may break a graph between the projection and its loss: at a warning that is logged, as in
GPT-2 of transformers. Logits that such a graph ends with are handed out as lazy ones too, if they have a gradient.
Dynamo leaves what is done to them to eager, and the loss is that of lazy logits. If they turn out to be read for
a gradient, and no loss is computed from them, they are computed at once from the third time on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from leangrad._torch import is_gathered, saved_tensor_hooks_active
from leangrad.compiled.logits_chain import Chain, known, logits_of
from leangrad.loss.lazy.heads import Head
from leangrad.loss.lazy.logits import project
from leangrad.loss.lazy.source import stays

__all__ = ["LazyOutputs"]

Run = Callable[..., Any]


class LazyOutputs:
    """The logits that a graph no longer returns, and how they are handed out: see [Note: returned logits]."""

    def __init__(self, graph: fx.Graph, output: fx.Node) -> None:
        self.graph, self.output = graph, output
        self.inputs = {node: place for place, node in enumerate(graph.find_nodes(op="placeholder"))}
        self.returned: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        self.projections: list[_PutOff] = []

    def put_off(self, chain: Chain, *, has_loss: bool) -> None:
        """Let the graph return what a projection reads, if it returns its logits."""
        projection, head = chain.projection, Head()
        head.losses += has_loss
        shown: dict[fx.Node, _Shown] = {}
        for place, node in enumerate(self.returned):
            if node in chain.nodes:
                tail = self._tail(chain.between[: chain.nodes.index(node)])
                shown.setdefault(node, _Shown([], tail, known(node).requires_grad)).places.append(place)
        if shown:
            self.projections.append(
                _PutOff(
                    shown=list(shown.values()),
                    x=projection.x,
                    weight=self.inputs[projection.weight],
                    bias=None if projection.bias is None else self.inputs[projection.bias],
                    autocast=projection.dtype if projection.is_autocast else None,
                    requires_grad=known(projection.node).requires_grad,
                    head=head,
                )
            )

    def finish(self) -> None:
        """Rewrite what the graph returns, and let go of it: it holds on to the compilation."""
        places = {place for one in self.projections for shown in one.shown for place in shown.places}
        kept = [node for place, node in enumerate(self.returned) if place not in places]
        self.count = len(kept)
        for one in self.projections:
            assert one.x is not None
            if one.x in self.inputs:
                one.hidden = self.inputs[one.x]
            else:
                if one.x not in kept:
                    kept.append(one.x)
                one.hidden = kept.index(one.x)
                one.is_returned = True
            one.x = None
        self.output.args = (tuple(kept),)
        del self.graph, self.output, self.inputs, self.returned

    def around(self, compiled: Run) -> Run:
        """What Dynamo calls in the stead of ``compiled``."""

        def run(*inputs: Any) -> Any:
            outputs = list(compiled(*inputs))
            shown = outputs[: self.count]
            logits = [pair for one in self.projections for pair in one.project(inputs, outputs)]
            for place, tensor in sorted(logits, key=lambda pair: pair[0]):
                shown.insert(place, tensor)
            return shown

        return run

    def _tail(self, chain: Sequence[fx.Node]) -> Callable[..., Any] | None:
        """What is done to the logits before they are returned, as a function of them and all inputs of the graph."""
        if not chain:
            return None
        graph = fx.Graph()
        start = logits_of(chain[0])
        assert start is not None
        copies = {start: graph.placeholder("logits")}
        copies |= {node: graph.placeholder(f"input_{place}") for node, place in self.inputs.items()}
        for node in chain:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = {}
        graph.output(copies[chain[-1]])
        return fx.GraphModule({}, graph).forward


class _Shown(NamedTuple):
    """Logits that are handed out."""

    places: list[int]  # among the outputs that Dynamo expects
    tail: Callable[..., Any] | None  # what is done to them before, in the graph as it was
    requires_grad: bool


@dataclass
class _PutOff:
    """A projection that is done outside of the graph, when somebody reads it."""

    shown: list[_Shown]
    x: fx.Node | None  # until its place is known
    weight: int  # among the inputs
    bias: int | None
    autocast: torch.dtype | None
    requires_grad: bool
    head: Head  # what became of these logits before
    hidden: int = -1  # the place of x among the outputs of the graph, or among its inputs
    is_returned: bool = False

    def project(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[tuple[int, Tensor]]:
        """The logits of one run, and their places. Views of each other know of each other."""
        x, weight = (outputs if self.is_returned else inputs)[self.hidden], inputs[self.weight]
        bias = None if self.bias is None else inputs[self.bias]
        can_wait = (
            not self.head.why_eager
            and stays(weight)
            and not any(is_gathered(parameter) for parameter in (weight, bias) if parameter is not None)
            and not saved_tensor_hooks_active()  # a checkpoint's second run has to save what its first did
            and not any(map(_is_foreign, (x, weight, bias)))
        )
        autocast = torch.autocast(x.device.type, dtype=self.autocast, enabled=self.autocast is not None)
        with torch.set_grad_enabled(self.requires_grad), autocast:
            logits = project(x, weight, bias, self.head.asked) if can_wait else F.linear(x, weight, bias)
        found: list[tuple[int, Tensor]] = []
        for places, tail, requires_grad in self.shown:
            with torch.set_grad_enabled(requires_grad):
                one = logits if tail is None else tail(logits, *inputs)
            found += [(place, one) for place in places]
        return found


def _is_foreign(tensor: Tensor | None) -> bool:
    return tensor is not None and (type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_inference())
