"""What Inductor would be given, without its code generation: graphs are partitioned and run op by op.

A C++ compile takes half a minute, a partition a fraction of a second. The graphs are those of Inductor: decomposed,
with its random numbers, after its passes over the joint graph.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.exc import InductorError
from torch._inductor.graph import GraphLowering

from leangrad._torch import compiler
from leangrad.compiled.joint_graph import op_name, read_joint_graph
from leangrad.compiled.partitioner import Partitioner, Settings
from leangrad.policy.choice import REUSED_READS
from leangrad.policy.ops import is_heavy
from tests.support.bits import difference
from tests.support.compiling import no_caches


@dataclass
class Partition:
    """One joint graph, cut by our partitioner and by torch's own."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    stock_forward: fx.GraphModule
    stock_backward: fx.GraphModule
    outputs: int  # of forward, before what it keeps
    stock_kept: list[dict[str, Any]] = field(default_factory=list)  # by torch's own forward, each time it ran; by node
    compared: int = 0  # tensors that both gave
    differences: list[str] = field(default_factory=list)

    @property
    def kept_bytes(self) -> int:
        return kept_bytes(self.forward, self.outputs)

    @property
    def stock_kept_bytes(self) -> int:
        return kept_bytes(self.stock_forward, self.outputs)

    def kept_ops(self) -> list[str]:
        """The names of the ops whose results forward keeps, but for its inputs."""
        return [op_name(node) for node in saved(self.forward, self.outputs) if node.op == "call_function"]

    def run_twice(self) -> list[str]:
        """The names of the ops that forward runs, and backward again."""
        first = {node.name for node in self.forward.graph.nodes if node.op == "call_function"}
        return [
            op_name(node) for node in self.backward.graph.nodes if node.op == "call_function" and node.name in first
        ]

    def heavy_twice(self) -> list[str]:
        return [name for name in self.run_twice() if is_heavy(name)]


@dataclass
class Partitions(Partitioner):
    """A backend of torch.compile that notes each partition, runs it, and compares it with torch's own."""

    settings: Settings = field(default_factory=Settings)
    options: dict[str, Any] = field(default_factory=dict)
    limits: tuple[int, ...] = REUSED_READS
    found: list[Partition] = field(default_factory=list)
    compiles: int = 0
    fixed: list[str] = field(default_factory=list)  # names of the ops whose results may not be made again

    def backend(self, gm: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        self.compiles += 1
        patches = {"custom_partitioner_fn": self, "fx_graph_cache": False, **self.options}
        return compile_fx(gm, list(inputs), inner_compile=self._inner_compile, config_patches=patches)

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        stock = compiler.partition(twin(gm), joint_inputs, **kwargs)
        ours = super().__call__(gm, joint_inputs, **kwargs)
        self.found.append(Partition(*ours, *stock, kwargs["num_fwd_outputs"]))
        return ours

    def _keep(self, graph: fx.Graph, info: Any) -> list[fx.Node]:
        step, nodes = read_joint_graph(graph, info, fused=not self.settings.exact)
        self.fixed += [op_name(node) for value, node in zip(step.values, nodes, strict=True) if value.is_fixed]
        return super()._keep(graph, info)

    def _inner_compile(self, gm: fx.GraphModule, inputs: Any, **_: Any) -> Callable[[list[Any]], Any]:
        part = next((p for p in reversed(self.found) if is_half(gm, p.forward) or is_half(gm, p.backward)), None)

        def run(arguments: list[Any]) -> Any:
            given = list(arguments)
            arguments.clear()
            with torch.no_grad():
                return compare(part, gm, given) if part else Interpreter(gm).run(*given)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    @property
    def kept_bytes(self) -> int:
        return sum(p.kept_bytes for p in self.found)

    @property
    def stock_kept_bytes(self) -> int:
        return sum(p.stock_kept_bytes for p in self.found)


def twin(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graph, for a partition changes it; what its nodes tell is shared."""
    graph, nodes = fx.Graph(), {}
    result = graph.graph_copy(gm.graph, nodes)
    (old,) = (node for node in gm.graph.nodes if node.op == "output")
    graph.output(result).meta = dict(old.meta)
    return fx.GraphModule(gm, graph)


def compare(part: Partition, gm: fx.GraphModule, given: list[Any]) -> Any:
    """Run one half of a partition, and torch's own cut of the same on the same inputs; note how they differ."""
    is_forward = is_half(gm, part.forward)
    stock = part.stock_forward if is_forward else part.stock_backward
    named = dict(zip(placeholders(gm), (clone(one) for one in given), strict=True))
    named |= {} if is_forward else part.stock_kept.pop()  # of the last forward: backward runs the other way round
    state = torch.random.get_rng_state()
    expected = Interpreter(stock).run(*(named[name] for name in placeholders(stock)))
    torch.random.set_rng_state(state)
    result = Interpreter(gm).run(*given)
    outputs = part.outputs if is_forward else len(result)
    for n, (mine, other) in enumerate(zip(result[:outputs], expected[:outputs], strict=True)):
        if isinstance(mine, Tensor):
            part.compared += 1
            if words := difference(mine, other, nans="any"):
                part.differences.append(f"{'forward' if is_forward else 'backward'} {n}: {words}")
    if is_forward:
        nodes = saved(stock, part.outputs)
        part.stock_kept.append(dict(zip((node.name for node in nodes), expected[part.outputs :], strict=True)))
    return result


def clone(one: Any) -> Any:
    """Inputs are cloned, for forward writes into buffers."""
    return one.clone() if isinstance(one, Tensor) else one


def is_half(gm: fx.GraphModule, half: fx.GraphModule) -> bool:
    """Whether a graph is this half of a partition, or a copy of it."""
    return [(node.name, look(node)) for node in gm.graph.nodes] == [
        (node.name, look(node)) for node in half.graph.nodes
    ]


def look(node: fx.Node) -> object:
    value = node.meta.get("val")
    return (value.shape, value.dtype, value.stride()) if isinstance(value, Tensor) else None


def placeholders(gm: fx.GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes if node.op == "placeholder"]


class Interpreter(fx.Interpreter):
    """Runs Inductor's random ops as functions of their seed, as its kernels do."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.prims.inductor_random.default:
            size, seed, mode = args[:3]
            generator = torch.Generator().manual_seed(int(seed))
            return getattr(torch, mode)(size, generator=generator)
        return super().call_function(target, args, kwargs)


def saved(forward: fx.GraphModule, outputs: int) -> list[fx.Node]:
    """What forward gives beside its outputs."""
    (output,) = (node for node in forward.graph.nodes if node.op == "output")
    return list(output.args[0][outputs:])


def kept_bytes(forward: fx.GraphModule, outputs: int) -> int:
    """The bytes that forward hands to backward, each memory once, without the inputs of forward and what it returns."""
    (output,) = (node for node in forward.graph.nodes if node.op == "output")
    given = [node for node in forward.graph.nodes if node.op == "placeholder"]
    given += [node for node in output.args[0][:outputs] if isinstance(node, fx.Node)]
    free = {compiler.storage_of(node) for node in given}
    sizes: dict[int, int] = {}
    for node in saved(forward, outputs):
        value, storage = node.meta.get("val"), compiler.storage_of(node)
        if isinstance(value, Tensor) and storage is not None and storage not in free:
            sizes[storage] = max(sizes.get(storage, 0), int(value.untyped_storage().nbytes()))
    return sum(sizes.values())


@dataclass(frozen=True)
class Moved:
    """What Inductor's scheduler says of a graph."""

    nbytes: int  # that its kernels read and write
    pointwise_bytes: int  # the same of those that Inductor generates
    kernels: int  # that Inductor generates


def moved_by_backward(model: nn.Module, x: Tensor, *, dynamic: bool = False) -> Moved:
    """What the backward of a step moves, by Inductor's scheduler, with our partitioner; no code is generated."""
    found = _Scheduled(Settings(slowdown=10.0))
    torch._dynamo.reset()
    with no_caches():
        torch.compile(model, backend=found.backend, dynamic=dynamic)(x).square().sum().backward()
    assert found.moved is not None
    return found.moved


class _EnoughError(Exception):
    """Raised in place of generating code."""


class _Scheduled(Partitions):
    """Partitions that ask Inductor's scheduler about the backward graph."""

    moved: Moved | None = None

    def _inner_compile(self, gm: fx.GraphModule, inputs: Any, **named: Any) -> Any:
        run = super()._inner_compile(gm, inputs, **named)
        if named.get("is_backward"):
            with pytest.MonkeyPatch.context() as patch, config.patch(realize_reads_threshold=self.reused_reads):
                patch.setattr(GraphLowering, "compile_to_module", lambda lowering: self._count(lowering))
                with pytest.raises((_EnoughError, InductorError)):
                    compile_fx_inner(copy.deepcopy(gm), inputs, **named)
        return run

    def _count(self, lowering: Any) -> None:
        lowering.init_wrapper_code()
        lowering._update_scheduler()
        sizes = [(node.is_extern(), node.get_read_write_buffers_sizes()) for node in lowering.scheduler.nodes]
        own = [size for is_extern, size in sizes if not is_extern]
        self.moved = Moved(sum(size for _, size in sizes), sum(own), len(own))
        raise _EnoughError
