"""Logits that a graph returns: their projection runs outside of the graph, when their values are read.

[Note: returned logits] Models return logits beside their loss, and few callers read them. The rewritten graph returns
the input of the projection instead. The caller gets lazy logits (`leangrad.loss.lazy`), made from the graph's hidden
states and from the parameters themselves. They have the place in autograd's graph that the logits would have, and they
run the projection when their values are read. Where the weight may have been freed by then (FSDP, ZeRO), the logits are
computed at once.

[Note: broken graphs] Dynamo may break a graph between the projection and its loss: at a warning that is logged, as in
GPT-2 of transformers. If such a graph ends with logits that require a gradient, the caller gets lazy logits too. Dynamo
then runs the ops on them in eager mode, and the loss is that of lazy logits. If the values turn out to be read for a
gradient, and no loss is computed from them, the logits are computed at once from the third time on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from leangrad._torch import is_gathered, same_storage, saved_tensor_hooks_active
from leangrad.compiled.logits_chain import Chain, known, logits_of
from leangrad.loss.lazy.heads import Head
from leangrad.loss.lazy.logits import project
from leangrad.loss.lazy.source import stays

__all__ = ["LazyOutputs"]

Run = Callable[..., Any]


class LazyOutputs:
    """The logits that a graph no longer returns, and how the caller gets them: see [Note: returned logits]."""

    def __init__(self, graph: fx.Graph, output: fx.Node) -> None:
        self.graph, self.output = graph, output
        self.inputs = {node: place for place, node in enumerate(graph.find_nodes(op="placeholder"))}
        self.returned: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        self.projections: list[_PutOff] = []

    def put_off(self, chain: Chain, *, has_loss: bool) -> None:
        """Make the graph return the input of a chain's projection in place of its logits, if it returns any.

        has_loss: whether the graph computes a loss from these logits.
        """
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
        """Rewrite the graph's outputs, and drop the references to the graph, which would keep the compilation alive."""
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
        """Return the function that Dynamo calls in place of ``compiled``: it adds the logits to the outputs."""

        def run(*inputs: Any) -> Any:
            outputs = list(compiled(*inputs))
            shown = outputs[: self.count]
            logits = [pair for one in self.projections for pair in one.project(inputs, outputs)]
            for place, tensor in sorted(logits, key=lambda pair: pair[0]):
                shown.insert(place, tensor)
            return shown

        return run

    def _tail(self, chain: Sequence[fx.Node]) -> Callable[..., Any] | None:
        """Return the ops of ``chain`` as a function of the logits and all inputs of the graph; None if it is empty."""
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
    """Logits that the caller gets."""

    places: list[int]  # positions among the outputs that Dynamo expects
    tail: Callable[..., Any] | None  # the captured graph's ops between projection and output; None: no ops
    requires_grad: bool


@dataclass
class _PutOff:
    """A projection that runs outside of the graph, when its result is read."""

    shown: list[_Shown]
    x: fx.Node | None  # the input of the projection; None once ``hidden`` is known
    weight: int  # position among the graph's inputs
    bias: int | None  # the same of the bias; None: it has none
    autocast: torch.dtype | None  # the dtype that autocast runs it in; None: without autocast
    requires_grad: bool
    head: Head  # counts how the logits of earlier runs were used
    hidden: int = -1  # position of x among the outputs of the graph if ``is_returned``, else its inputs
    is_returned: bool = False

    def project(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[tuple[int, Tensor]]:
        """Return the logits of one run with their output positions. Outputs that are views of one another stay so."""
        x, weight = (outputs if self.is_returned else inputs)[self.hidden], inputs[self.weight]
        bias = None if self.bias is None else inputs[self.bias]
        can_wait = (
            not self.head.why_eager
            and stays(weight)
            and not any(is_gathered(parameter) for parameter in (weight, bias) if parameter is not None)
            and not saved_tensor_hooks_active()  # a checkpoint's recompute must save what its first run saved
            and not any(map(_is_foreign, (x, weight, bias)))
        )
        autocast = torch.autocast(x.device.type, dtype=self.autocast, enabled=self.autocast is not None)
        with torch.set_grad_enabled(self.requires_grad), autocast:
            if _has_other_names(x, outputs):
                x = x.clone()
            logits = project(x, weight, bias, self.head.asked) if can_wait else F.linear(x, weight, bias)
        found: list[tuple[int, Tensor]] = []
        for places, tail, requires_grad in self.shown:
            with torch.set_grad_enabled(requires_grad):
                one = logits if tail is None else tail(logits, *inputs)
            found += [(place, one) for place in places]
        return found


def _is_foreign(tensor: Tensor | None) -> bool:
    return tensor is not None and (type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_inference())


def _has_other_names(x: Tensor, outputs: Sequence[Any]) -> bool:
    """Whether another output lies in the memory of ``x``.

    AOTAutograd returns views with version counters of their own: a write through one would not be seen.
    """
    others = (one for one in outputs if isinstance(one, Tensor) and one is not x)
    return any(same_storage(x, one) for one in others)
