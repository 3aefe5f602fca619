"""Outputs of a compiled graph beside its loss that seldom get a gradient, such as the logits of a language model.

[Note: side outputs] If a graph returns a loss and a large tensor that the loss is computed from, autograd passes
the gradients of both to backward. If the tensor gets none, autograd allocates zeros of its size, and backward adds to
them: 2 GiB for the logits of 4 x 2048 tokens over 128,256 words in bfloat16. So the graph is compiled as if these
outputs had no gradient, and the caller gets them through an autograd node of their own. If a gradient does reach that
node, the node runs the graph once more, compiled as it was captured, with the same inputs, random numbers and autocast,
and runs backward for those outputs alone. Gradients are linear, so the two backward passes add up to what one would
have computed. The second run costs one more forward, and raises an error if an input was changed in between. From then
on the graph runs as it was captured.

Only compiled code draws the random numbers of compiled code. Dynamo may silently run a function in eager mode, at its
limit of recompilations for instance. So a counter shows whether the compiled graph ran. Other kernels may draw other
numbers (`fallback_random`). So the generator's state after the second run is compared with that after the first run,
and the outputs of the second run with those of the first, if these still exist. If one of these checks fails, an error
is raised; a wrong gradient is never returned.

A graph that writes into its inputs (the statistics of a batch norm) is left as it is, because it cannot run twice. So
is a graph that reads a number out of a tensor, as it does for a float argument that differs from call to call: Dynamo
would break the graph there. Under saved-tensor hooks, those of a checkpoint for instance, each run is as captured: a
checkpoint's recompute must save what its first run saved, even if a gradient has reached a side output in between.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx

from leangrad._torch import compiler, saved_tensor_hooks_active
from leangrad.errors import LeangradError

__all__ = ["SideOutputs", "set_apart", "writes"]

PLAIN_TYPES = (Tensor, torch.nn.Parameter)
ROUNDING = 64  # times the precision of a dtype: two kernels may differ by so much in one sum
LARGE = 1 << 20  # least bytes of side outputs for which avoiding a gradient of zeros is worth a node
# Python's operators that change their first operand.
IN_PLACE = {
    "delitem", "iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow", "irshift",
    "isub", "itruediv", "ixor", "setitem",
}  # fmt: skip
UNSAID = ("batch_norm", "instance_norm")  # parts of names of ops that write although their schema does not say so
DEVICES = ("cpu", "cuda", "meta")  # their random numbers can be drawn again, or they draw none
Run = Callable[..., Any]


def set_apart(gm: fx.GraphModule, inputs: Sequence[Any], compile_graph: Run) -> SideOutputs | None:
    """Detach the side outputs of ``gm`` in place; None if it has none, or cannot run twice.

    inputs: the example inputs that it is compiled with.
    compile_graph: the backend that compiles the graph as it was captured.
    """
    (output,) = gm.graph.find_nodes(op="output")
    returned = output.args[0]
    places = _side_places(gm.graph, inputs, returned)
    if not places:
        return None
    captured = fx.GraphModule(gm, _copy(gm.graph))
    with gm.graph.inserting_before(output):
        for place in places:
            detached = gm.graph.call_method("detach", (returned[place],))
            detached.meta = {"example_value": returned[place].meta["example_value"].detach()}
            returned = (*returned[:place], detached, *returned[place + 1 :])
    output.args = (returned,)
    gm.recompile()
    return SideOutputs(places, _Captured(captured, compile_graph))


def _copy(graph: fx.Graph) -> fx.Graph:
    """Return a copy of the graph without the meta of its nodes, which would keep the compilation alive."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, val_map={}))
    for node in copy.nodes:
        node.meta = {}
    return copy


def _side_places(graph: fx.Graph, inputs: Sequence[Any], returned: Any) -> tuple[int, ...]:
    """Return the positions of the outputs that may get no gradient; empty: the graph is left as it is."""
    if not isinstance(returned, tuple) or not torch.is_grad_enabled():
        return ()
    values: list[Any] = [node.meta.get("example_value") if isinstance(node, fx.Node) else None for node in returned]
    graded = [k for k, value in enumerate(values) if isinstance(value, Tensor) and value.requires_grad]
    read = _read_for([returned[k] for k in graded if values[k].dim() == 0])
    side = [k for k in graded if values[k].dim() > 0 and returned[k] in read]
    nbytes = sum(compiler.bytes_of(values[k]) for k in side)
    if nbytes < LARGE:
        return ()
    traced = [node.meta.get("example_value") for node in graph.find_nodes(op="placeholder")]
    tensors = [value for value in (*inputs, *traced, *values) if isinstance(value, Tensor)]
    if any(type(value) not in PLAIN_TYPES and not compiler.is_fake(value) for value in tensors):
        return ()
    if any(value.device.type not in DEVICES for value in tensors):
        return ()
    memories = [compiler.memory_of(value) for value in tensors]
    if None in memories or any(memories.count(compiler.memory_of(values[k])) > 1 for k in side):
        return ()  # a side output shares its memory with another tensor
    made_before = [value for value in inputs if isinstance(value, Tensor) and not value.is_leaf]
    if sum(map(compiler.bytes_of, made_before)) >= nbytes or any(map(writes, graph.nodes)):
        return ()
    if any(isinstance(value, Tensor) and value._version > 0 for value in traced):
        return ()  # an input was written to while it was traced
    if any(node.target == "item" or node.meta.get("unbacked_bindings") for node in graph.nodes):
        return ()  # Dynamo would break the graph where it reads a number out of a tensor
    return tuple(side)


def _read_for(losses: Sequence[fx.Node]) -> set[fx.Node]:
    """Return all nodes that ``losses`` are computed from.

    A block of a network may return a routing loss beside its output. That loss is not computed from the output, which
    the rest of the network reads.
    """
    found: set[fx.Node] = set()
    stack = list(losses)
    while stack:
        for node in stack.pop().all_input_nodes:
            if node not in found:
                found.add(node)
                stack.append(node)
    return found


def writes(node: fx.Node) -> bool:
    """Whether a node may write into one of its arguments."""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    target = node.target
    name = (target if isinstance(target, str) else getattr(target, "__name__", "")).split(".")[0]
    if getattr(target, "__module__", "") == "_operator":
        return name in IN_PLACE
    is_in_place = name.endswith("_") and not name.endswith("__")
    if node.op == "call_module" or is_in_place or "out" in node.kwargs or node.kwargs.get("inplace") is True:
        return True
    if isinstance(target, torch._ops.HigherOrderOperator) or any(said in name for said in UNSAID):
        return True
    return any(_says_it_writes(schema) for schema in compiler.schemas_of(target, name))


def _says_it_writes(schema: Any) -> bool:
    """Whether a schema declares an argument that is written to, other than ``out``."""
    return any(arg.alias_info is not None and arg.alias_info.is_write and not arg.is_out for arg in schema.arguments)


class _Captured:
    """A graph as it was captured. It is compiled when it first runs."""

    def __init__(self, captured: fx.GraphModule, compile_graph: Run) -> None:
        self._count = threading.local()

        def compile_and_count(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
            compiled = compile_graph(gm, inputs)

            def run(*given: Any) -> Any:
                self._count.runs = self.runs + 1
                return compiled(*given)

            return run

        # Dynamo runs its own graph modules in eager mode, but compiles a function that calls one. It counts
        # compilations per code object, so each graph gets a code object of its own.
        def call(*given: Any) -> Any:
            return captured.forward(*given)

        call.__code__ = call.__code__.replace()
        self._run: Run = torch.compile(call, backend=compile_and_count)

    @property
    def runs(self) -> int:
        """The number of runs of compiled code in this thread."""
        return getattr(self._count, "runs", 0)

    def __call__(self, *inputs: Any) -> Any:
        return self._run(*inputs)


class SideOutputs:
    """Runs a graph whose side outputs were detached, and returns them through an autograd node of their own."""

    def __init__(self, places: tuple[int, ...], as_captured: _Captured) -> None:
        self.places = places
        self.as_captured = as_captured
        self.are_used = False  # True once a gradient has reached them

    def around(self, compiled: Run) -> Run:
        """Return the function that Dynamo calls in place of ``compiled``."""

        def run(*inputs: Any) -> Any:
            if not torch.is_grad_enabled():
                return compiled(*inputs)
            if self.are_used or _must_run_as_captured(inputs):
                return self.as_captured(*inputs)
            call = _Call(self, inputs)
            outputs = list(compiled(*inputs))
            for place, shown in zip(self.places, call.show([outputs[k] for k in self.places]), strict=True):
                outputs[place] = shown
            return outputs

        return run


def _must_run_as_captured(inputs: Sequence[Any]) -> bool:
    """Whether saved-tensor hooks are active, such as a checkpoint's, or an input has no version counter."""
    return saved_tensor_hooks_active() or any(isinstance(v, Tensor) and v.is_inference() for v in inputs)


# Held during a second run: generators are global to the process, and AOTAutograd cannot compile in two threads at once.
# Reentrant, because an autograd thread may start another second run inside of one.
_one_at_a_time = threading.RLock()


class _Call:
    """One run of a graph, with all that is needed to run it once more."""

    def __init__(self, side: SideOutputs, inputs: Sequence[Any]) -> None:
        self._side, self._inputs = side, inputs
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        self._versions = [value._version for value in tensors]
        devices = {value.device for value in tensors if value.device.type == "cuda"}
        self._devices = sorted(device.index for device in devices if device.index is not None)
        is_captured = bool(self._devices) and torch.cuda.is_current_stream_capturing()
        self._random = None if is_captured else _random_states(self._devices)
        kinds = {"cpu", *(value.device.type for value in tensors)}
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in sorted(kinds)
            if torch.amp.is_autocast_available(kind)
        ]

    def show(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the side outputs as outputs of one autograd node."""
        shown: Sequence[Tensor] = _Shown.apply(self, len(outputs), *outputs, *self._inputs)
        self._shown = [(weakref.ref(one), one._version) for one in shown]
        self._random_after = None if self._random is None else _random_states(self._devices)
        return shown

    def gradients(self, given: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the graph once more, and return its inputs' gradients for the gradients ``given`` of the side outputs."""
        self._side.are_used = True
        tensors = [value for value in self._inputs if isinstance(value, Tensor)]
        if [value._version for value in tensors] != self._versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: an "
                "input of a compiled graph, from which an output beside the loss is computed again; that is done once, "
                "so this step can be run again"
            )
        if self._random is None:
            raise RuntimeError(
                "a gradient came to an output beside the loss of a compiled graph that was captured in a CUDA graph; "
                "use that output once in a step that is not captured, before the capture"
            )
        fresh = [_leaf(value) for value in self._inputs]
        leaves = [value for value in fresh if isinstance(value, Tensor) and value.requires_grad]
        with _one_at_a_time, contextlib.ExitStack() as stack:
            for context in self._contexts():
                stack.enter_context(context)
            torch.set_rng_state(self._random[0])
            for index, state in zip(self._devices, self._random[1:], strict=True):
                torch.cuda.set_rng_state(state, index)
            captured = self._side.as_captured
            ran = captured.runs
            outputs = captured(*fresh)
            self._check(outputs, is_compiled=captured.runs == ran + 1)
            pairs = [(outputs[k], g) for k, g in zip(self._side.places, given, strict=True) if g is not None]
            outs, grads = zip(*pairs, strict=True)
            found = iter(torch.autograd.grad(outs, leaves, grads, allow_unused=True))
        return [next(found) if isinstance(v, Tensor) and v.requires_grad else None for v in fresh]

    def _check(self, outputs: Sequence[Tensor], *, is_compiled: bool) -> None:
        """Raise an error unless the second run was like the first: see [Note: side outputs]."""
        pairs = [(ref(), version, outputs[k]) for k, (ref, version) in zip(self._side.places, self._shown, strict=True)]
        alike = (_is_near(one, other) for one, version, other in pairs if one is not None and one._version == version)
        if not is_compiled or not self._has_drawn_alike() or not all(alike):
            raise LeangradError(
                "a gradient came to an output beside the loss of a compiled graph, and the graph could not be run once "
                "more as it ran before; compile a function that returns what has a gradient, summed into one loss"
            )

    def _has_drawn_alike(self) -> bool:
        """Whether each generator is in the state after the first run, or was not used by the second run.

        In the latter case another thread may have drawn from it during the first run.
        """
        before, after, now = self._random or [], self._random_after or [], _random_states(self._devices)
        return all(torch.equal(n, b) or torch.equal(n, a) for b, a, n in zip(before, after, now, strict=True))

    def _contexts(self) -> list[AbstractContextManager[Any]]:
        return [
            torch.enable_grad(),
            torch.random.fork_rng(self._devices),
            *(torch.autocast(kind, dtype, enabled=enabled) for kind, enabled, dtype in self._autocast),
        ]


def _random_states(devices: Sequence[int]) -> list[Tensor]:
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]


def _is_near(one: Tensor, other: Tensor) -> bool:
    """Whether two results of one graph differ only by rounding."""
    one, other = one.detach(), other.detach()
    largest = one.abs().max()
    return bool((one - other).abs().max() <= ROUNDING * torch.finfo(one.dtype).eps * largest) or not largest.isfinite()


def _leaf(value: Any) -> Any:
    """Return an input without its autograd history, of the same type, because compiled code guards on the type."""
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(value.detach(), value.requires_grad)
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


class _Shown(torch.autograd.Function):
    """The autograd node of the side outputs of one run."""

    @staticmethod
    def forward(ctx: Any, call: _Call, count: int, *values: Any) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.count = call, count
        return tuple(value.detach() for value in values[:count])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(g is None for g in given):
            return (None,) * len(ctx.needs_input_grad)
        return (None, None, *[None] * ctx.count, *ctx.call.gradients(given))
