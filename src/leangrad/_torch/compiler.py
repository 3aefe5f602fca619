"""Private names of torch's compiler: the facts and functions of AOTAutograd and Inductor that leangrad uses.

Written for torch 2.11 to 2.13. Where a release lacks one of them, `missing` says which, and `backend="leangrad"`
compiles with torch's own partitioner and warns once.
"""

from __future__ import annotations

import contextvars
import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from leangrad.errors import LeangradError

SYMBOL_BYTES = 1_000_000  # counted for a symbolic float or bool: torch can keep those, but avoids it
# Called with a joint graph and torch's classification of its nodes; returns the nodes to keep. None: torch's choice.
Choose = Callable[[fx.Graph, Any], list[fx.Node] | None]
# Called with a compiled graph, the arguments it was compiled for, and whether it is a backward graph.
Watch = Callable[[Any, Sequence[Any], bool], None]

_stock: Any = None  # torch's own `choose_saved_values_set`; None until `install_seam` has run
_choose: contextvars.ContextVar[Choose | None] = contextvars.ContextVar("leangrad_choose", default=None)


def partitioner_class() -> Any:
    """Return Inductor's base class of custom partitioners; `object` where torch lacks it."""
    try:
        from torch._inductor.custom_graph_pass import CustomPartitionerFn
    except ImportError:
        return object  # `missing` reports it, and no partitioner is made
    return CustomPartitionerFn


def _partitioners() -> Any:
    from torch._functorch import partitioners

    return partitioners


@functools.cache
def missing() -> tuple[str, ...]:
    """Return the names that this torch release lacks; empty if it has all."""
    try:
        from torch._inductor import config, custom_graph_pass, exc
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner  # noqa: F401

        found: list[tuple[Any, str]] = [
            (config, "custom_partitioner_fn"),
            (config, "realize_reads_threshold"),
            (config, "max_fusion_size"),
            (custom_graph_pass, "CustomPartitionerFn"),
            (exc, "InductorError"),
        ]
        names = "choose_saved_values_set min_cut_rematerialization_partition _size_of must_recompute is_sym_node"
        found += [(_partitioners(), name) for name in names.split()]
    except ImportError as error:
        return (str(error),)
    return tuple(f"{where.__name__}.{name}" for where, name in found if not hasattr(where, name))


@functools.cache
def install_seam() -> None:
    """Replace torch's `choose_saved_values_set` by a function that calls it or, inside `choosing`, ours.

    Every partition of the process looks that function up as a global of its module, so it is replaced once and stays
    replaced. The new function reads a context variable: another thread that compiles at the same time has its own.
    """
    global _stock
    partitioners = _partitioners()
    stock = _stock = partitioners.choose_saved_values_set

    @functools.wraps(stock)
    def choose_saved_values_set(joint_graph: fx.Graph, node_info: Any, *args: Any, **kwargs: Any) -> list[fx.Node]:
        choose = _choose.get()
        kept = choose(joint_graph, node_info) if choose is not None else None
        if kept is None:
            kept = list(stock(joint_graph, node_info, *args, **kwargs))
            if choose is not None and (stale := changed_inputs(joint_graph).intersection(kept)):
                names = ", ".join(sorted(node.name for node in stale))
                raise LeangradError(
                    f"forward writes into inputs whose old value backward needs ({names}), and this graph has ops for "
                    "which no copy of them can be kept; clone them before they are changed"
                )
        return kept

    partitioners.choose_saved_values_set = choose_saved_values_set


def stock_choice(joint_graph: fx.Graph, node_info: Any) -> list[fx.Node] | None:
    """Return the nodes that torch itself would keep, with no budget; None if it finds no set of nodes."""
    install_seam()
    try:
        return list(_stock(joint_graph, node_info, 1))
    except Exception:  # its solver failed, or it refuses the graph: the policy then decides alone
        return None


@contextmanager
def choosing(choose: Choose) -> Iterator[None]:
    """Return a context in which `choose` decides what a partition keeps, in this thread only."""
    install_seam()
    token = _choose.set(choose)
    try:
        yield
    finally:
        _choose.reset(token)


def partition(module: fx.GraphModule, inputs: Sequence[object], **arguments: Any) -> tuple[Any, Any]:
    """Split a joint graph into forward and backward with torch's own partitioner."""
    arguments.pop("compiler", None)
    return _partitioners().min_cut_rematerialization_partition(module, inputs, **arguments)  # type: ignore[no-any-return]


def is_symbol(node: fx.Node) -> bool:
    """Whether a node's value is a symbolic number."""
    return bool(_partitioners().is_sym_node(node))


def changed_inputs(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return the inputs that forward changes in place: inside the graph, or after it with one of its outputs."""
    (output,) = (node for node in graph.nodes if node.op == "output")
    told = [getattr(one, "mutated_input", None) for one in output.meta.get("desc") or ()]
    written = {target for node in graph.nodes for target in _written(node)}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return frozenset(
        node for node in inputs if node in written or (node.meta.get("desc") is not None and node.meta["desc"] in told)
    )


def _written(node: fx.Node) -> list[Any]:
    """Return the arguments that an op writes into; empty for an op of backward."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return []
    if node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward"):
        return []
    arguments = node.target._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, node.args, strict=False)} | dict(node.kwargs)
    found = [given.get(argument.name) for argument in arguments if argument.is_write]
    return [one for value in found for one in (value if isinstance(value, list | tuple) else [value])]


def can_be_kept(node: fx.Node) -> bool:
    """Whether forward can pass a node's value to backward: a tensor, a number or an object, but not a tuple."""
    value = node.meta.get("val")
    if isinstance(value, Tensor) or is_symbol(node):
        return True
    return value is not None and not isinstance(value, tuple | list | dict)


def size_of(node: fx.Node) -> int:
    """Return the bytes of a node's tensors; symbolic sizes are replaced by their hints, which adds no guards."""
    value = node.meta.get("val")
    if isinstance(value, torch.SymFloat | torch.SymBool):
        return SYMBOL_BYTES
    if not isinstance(value, Tensor | tuple | list):
        return 0
    return int(_partitioners()._size_of(node))


def bytes_of(value: Tensor) -> int:
    """Return the bytes of a fake tensor; symbolic sizes are replaced by their hints."""
    return value.element_size() * math.prod(map(_hint, value.shape))


def is_fake(value: Tensor) -> bool:
    """Whether ``value`` is the fake tensor or parameter that replaces a plain one while a graph is captured."""
    return type(value) is FakeTensor or (isinstance(value, FakeTensor) and isinstance(value, torch.nn.Parameter))


def memory_of(value: Tensor) -> int | None:
    """Return the address of a tensor's storage object, which identifies its memory; None if it has no storage."""
    return int(value.untyped_storage()._cdata) if torch._C._has_storage(value) else None


def schemas_of(target: Any, name: str) -> list[Any]:
    """Return the schemas of the op that a node of a captured graph calls, or of ATen's op ``name``; empty: no op."""
    if isinstance(target, torch._ops.OpOverload):
        return [target._schema]
    packets = (target, getattr(torch.ops.aten, name or "none", None))  # ATen's namespace has methods too: `__eq__`
    packet = next((one for one in packets if isinstance(one, torch._ops.OpOverloadPacket)), None)
    return [getattr(packet, one)._schema for one in packet.overloads()] if packet is not None else []


def elements_of(node: fx.Node) -> int:
    """Return the number of elements of a node's tensor, or of the first in a tuple; hints replace symbolic sizes."""
    value = node.meta.get("val")
    if isinstance(value, tuple | list):
        value = next((v for v in value if isinstance(v, Tensor)), None)
    return math.prod(map(_hint, value.shape)) if isinstance(value, Tensor) else 0


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a node's tensor; hints replace symbolic sizes."""
    value = node.meta.get("val")
    return tuple(map(_hint, value.shape)) if isinstance(value, Tensor) else ()


def dimension_of_rows(node: fx.Node) -> int | None:
    """Return the dimension with the smallest stride in a node's tensor, by hints; None if none is larger than one."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    strides = zip(map(_hint, value.shape), map(_hint, value.stride()), strict=True)
    rows = [(stride, -dimension) for dimension, (size, stride) in enumerate(strides) if size > 1]
    return -min(rows)[1] if rows else None


def is_channels_last(node: fx.Node) -> bool:
    """Whether convolutions treat a node's tensor as channels_last: by its strides, also in dimensions of size one."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.dim() not in (4, 5):
        return False
    sizes, strides = [*map(_hint, value.shape)], [*map(_hint, value.stride())]
    least = 0
    for dimension in (1, *range(value.dim() - 1, 1, -1), 0):
        if strides[dimension] < least or (dimension == 0 and least == strides[1]):
            return False
        least = strides[dimension] * sizes[dimension]
    return strides[1] != 0


def is_laid_out_like(node: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes' tensors have the same shape, strides, dtype and device; symbolic sizes equal by expression."""
    mine, its = node.meta.get("val"), other.meta.get("val")
    if not isinstance(mine, Tensor) or not isinstance(its, Tensor):
        return False
    if mine.layout is not torch.strided or its.layout is not torch.strided:
        return False
    if (mine.dtype, mine.device, mine.dim()) != (its.dtype, its.device, its.dim()):
        return False
    sizes, others = ([*one.shape, *one.stride()] for one in (mine, its))
    return [*map(_expression, sizes)] == [*map(_expression, others)]


def has_known_strides(node: fx.Node) -> bool:
    """Whether a node's tensor has strides, and none of them is a symbol."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    return all(isinstance(stride, int) for stride in value.stride())


def _expression(size: Any) -> Any:
    """Return a size in a form that is compared without a guard."""
    return size if isinstance(size, int) else size.node.expr


def _hint(size: Any) -> int:
    if isinstance(size, int):
        return size
    hint = size.node.hint  # None if torch has no hint, as for the number of nonzero elements
    return 4096 if hint is None else int(hint)


def storage_of(node: fx.Node) -> int | None:
    """Return the address of the storage object of a node's tensor, which identifies its memory; None if it has none."""
    value = node.meta.get("val")
    return memory_of(value) if isinstance(value, Tensor) else None


def user_policy(node: fx.Node) -> str:
    """Return the policy of the user's checkpoint for a node: "recompute" or "save"; empty if there is none."""
    if node.meta.get("recompute") is None:
        return ""
    return "recompute" if _partitioners().must_recompute(node) else "save"


def inductor_options() -> frozenset[str]:
    """Return the names of Inductor's settings."""
    from torch._inductor import config

    return frozenset(config.get_config_copy())


def mode_options(mode: str) -> dict[str, Any]:
    """Return Inductor's settings for a mode of torch.compile, such as "max-autotune"."""
    from torch._inductor import list_mode_options

    known = list_mode_options()
    if mode != "default" and mode not in known:
        raise ValueError(f"unknown mode {mode!r}; Inductor has default, {', '.join(known)}")
    return {} if mode == "default" else dict(known[mode])


def inductor_setting(name: str) -> Any:
    """Return the value of one of Inductor's settings."""
    from torch._inductor import config

    return getattr(config, name)


def compile_by_inductor(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    patches: dict[str, Any],
    of_backward: Callable[[], dict[str, Any]] = dict,
    watch: Watch = lambda *_: None,
) -> Callable[..., Any]:
    """Compile a captured graph as ``backend="inductor"`` does, with some of its settings changed.

    patches: the changed settings.
    of_backward: returns further settings for backward graphs; called when one is compiled, after it was partitioned.
    watch: called with each compiled graph.

    Raises LeangradError if this machine lacks a compiler that Inductor needs.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    # Backward is compiled now, not when it first runs: if that fails, both graphs can still be compiled differently.
    has_setting = hasattr(functorch_config, "force_non_lazy_backward_lowering")
    at_once = functorch_config.patch(force_non_lazy_backward_lowering=True) if has_setting else nullcontext()

    def compile_one(graph: fx.GraphModule, arguments: Sequence[Any], **kwargs: Any) -> Any:
        is_backward = bool(kwargs.get("is_backward"))
        with config.patch(of_backward() if is_backward else {}):
            compiled = compile_fx_inner(graph, arguments, **kwargs)
        watch(compiled, arguments, is_backward)
        return compiled

    try:
        with at_once:
            compiled: Any = compile_fx(gm, list(inputs), inner_compile=compile_one, config_patches=patches)
    except Exception as error:
        if lacks := _lacks(error):
            raise LeangradError(
                f"Inductor needs {lacks}; install one, or run eager's own kernels, which need none: "
                'torch.compile(model, backend="leangrad", options={"leangrad.exact": True})'
            ) from error
        raise
    return compiled  # type: ignore[no-any-return]


def is_inductors(error: Exception) -> bool:
    """Whether ``error`` is a failure of Inductor to compile a graph."""
    from torch._inductor.exc import InductorError

    return isinstance(error, InductorError)


def _lacks(error: BaseException | None) -> str:
    """Return which compiler this machine lacks, if that caused ``error``; an empty string if not."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        name = type(error).__name__
        if name == "InvalidCxxCompiler":
            return f"a C++ compiler to compile for a CPU, and found no working one ({error})"
        if name in ("TritonMissing", "GPUTooOldForTriton"):
            return f"a Triton that works with this GPU ({error})"
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return ""


def compile_op_by_op(
    gm: fx.GraphModule, inputs: Sequence[Any], partitioner: Any, watch: Watch = lambda *_: None
) -> Callable[..., Any]:
    """Trace forward and backward, partition them, and run both with eager's own kernels, one op after the other.

    As in eager PyTorch, nothing is decomposed, and autocast does not apply to backward. The arguments of a graph are
    released as soon as their last reader has run.

    watch: called with each compiled graph.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config

    def run_op_by_op(graph: fx.GraphModule, arguments: Sequence[Any], is_backward: bool) -> _OpByOp:
        compiled = _OpByOp(graph)
        watch(compiled, arguments, is_backward)
        return compiled

    forward, backward = (functools.partial(run_op_by_op, is_backward=which) for which in (False, True))
    with config.patch(backward_pass_autocast="off"):
        compiler = aot_autograd(fw_compiler=forward, bw_compiler=backward, partition_fn=partitioner)
        return compiler(gm, inputs)


class _OpByOp:
    """A graph that runs with eager's own kernels and has the interface of Inductor's compiled graphs."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self._boxed_call = True  # on the instance: Dynamo wraps it and copies only these
        self.current_callable = self._run
        self._interpreter = fx.Interpreter(graph)

    def __call__(self, arguments: list[Any]) -> Any:
        return self.current_callable(arguments)

    def _run(self, arguments: list[Any]) -> Any:
        with torch.no_grad():
            # A copy: an interpreter holds its results until it runs again, so all that forward keeps, through backward.
            return copy.copy(self._interpreter).boxed_run(arguments)


def around_runs(compiled: Any, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
    """Call ``before`` and ``after`` around each run of a compiled graph; return a function that ends and undoes that.

    Where torch calls its graphs in another way, neither is ever called.
    """
    run = getattr(compiled, "current_callable", None)
    if run is None:
        return lambda: None

    def watched(arguments: list[Any]) -> Any:
        before()
        result = run(arguments)
        after()
        return result

    def end() -> None:
        if compiled.current_callable is watched:
            compiled.current_callable = run

    compiled.current_callable = watched
    return end


def while_tracing(function: Callable[[], bool]) -> Callable[[], bool]:
    """Make Dynamo call ``function`` while it traces, and use the result as a constant, without a graph break.

    Equals ``torch.compiler.assume_constant_result``, which would import Dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` in a form that Dynamo does not trace into.

    Equals ``torch.compiler.disable(function)``, which would import Dynamo. Returns ``function`` itself if Dynamo is not
    imported.
    """
    if "_dynamo" not in vars(torch):  # nothing was compiled yet in this process
        return function
    if function not in _untraced:
        _untraced[function] = torch.compiler.disable(function)
    return _untraced[function]


_untraced: dict[Callable[..., Any], Callable[..., Any]] = {}


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """Return a context in which compiled code runs eagerly.

    Under a dispatch mode it would run eagerly in any case, but Dynamo would then skip that code (say, that of
    ``nn.Sequential.forward``) for the rest of the process, in every other model too.
    """
    if "_dynamo" not in vars(torch):  # nothing was compiled yet, and importing Dynamo takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def tracing_backend() -> str | None:
    """Return the name of the torch.compile backend that Dynamo is tracing for; None if it cannot be determined."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        compiler: Any = InstructionTranslator.current_tx().output.compiler_fn
    except (ImportError, AttributeError):
        return None
    for _ in range(4):  # the backend may be wrapped several times
        name = getattr(compiler, "compiler_name", None) or getattr(compiler, "_compiler_name", None)
        if name is not None:
            return str(name)
        compiler = getattr(compiler, "_torchdynamo_orig_backend", None)
    return None


def ends_at_a_break() -> bool:
    """Whether the graph that Dynamo is compiling ends at a graph break; False also where torch lacks the names."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        reason: Any = InstructionTranslator.current_tx().output.compile_subgraph_reason
    except (ImportError, AttributeError):
        return False
    return getattr(reason, "graph_break", False) is True


@contextmanager
def activation_budget(share: float) -> Iterator[None]:
    """Return a context that limits torch's own partitioner to this share of the memory it would keep otherwise."""
    from torch._functorch import config

    with config.patch(activation_memory_budget=share):
        yield
