"""Every private torch name that leangrad uses, each in one small function with a plain fallback.

Nothing outside this file may touch a name of torch that starts with an underscore and is not documented, but for those
of [Note: names that are used in place]. A name that a torch release drops makes leangrad plainer, never wrong: the
fallback is always the answer that promises less.

[Note: names that are used in place]
The ledger reads a few private names of tensors and nodes for every saved tensor, thousands of times in a step, where a
call of Python more would be felt. `ledger/` uses these where it needs them:

    tensor._version, tensor._base, tensor._is_view()
    node._sequence_nr(), node._saved_<name>, node._raw_saved_<name>

Their check is `ledger_names_present`: if one of them is gone no region opens, and lean models run plain.
"""

import ast
import contextlib
import functools
import inspect
import itertools
import math
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from leangrad.switch import disabled


def reference_counts(tensor: Tensor) -> tuple[int, ...] | None:
    """Every count of who can see `tensor`: C++ and Python holders of it, of its storage and of its base; or None.

    The numbers include this call's own references, so they mean something only next to numbers that were taken by
    the same chain of calls.
    """
    try:
        storage, base = tensor.untyped_storage(), tensor._base
        counts = (
            tensor._use_count(),  # type: ignore[attr-defined]
            sys.getrefcount(tensor),
            weakref.getweakrefcount(tensor),
            torch._C._storage_Use_Count(storage._cdata),
            sys.getrefcount(storage),
        )
        if base is None:
            return counts
        return (*counts, base._use_count(), sys.getrefcount(base))  # type: ignore[attr-defined]
    except (AttributeError, NotImplementedError, RuntimeError):
        return None


def is_profiling() -> bool:
    """Whether torch's profiler is on, in this thread or another. A second one would end the first without a word."""
    ask = getattr(torch.autograd, "_profiler_enabled", None)
    return getattr(torch.autograd.profiler, "_is_profiler_enabled", False) or (ask is not None and bool(ask()))


@contextlib.contextmanager
def muted_kineto() -> Iterator[None]:
    """Keep torch 2.13's Kineto from writing two log lines per profile to stderr; it reads its level only once."""
    if "KINETO_LOG_LEVEL" in os.environ:
        yield
        return
    os.environ["KINETO_LOG_LEVEL"] = "99"  # above all of its levels
    try:
        yield
    finally:
        del os.environ["KINETO_LOG_LEVEL"]


def peak_bytes(profiler: Any) -> int:
    """The highest that the CPU memory made during a profile stood, in bytes; 0 where torch does not tell."""
    try:
        events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
        changes: list[int] = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    except AttributeError:
        return 0
    return max(itertools.accumulate(changes), default=0)


_CONVOLUTION = ("bias_sym_sizes_opt", "stride", "padding", "dilation", "transposed", "output_padding", "groups")


def convolution_settings(node: Any) -> tuple[Any, ...] | None:
    """What the node of a convolution knows beside its operands, in the order of `aten.convolution_backward`.

    None for any other node, and where torch calls them otherwise.
    """
    if node.name() != "ConvolutionBackward0":
        return None
    try:
        return tuple(getattr(node, "_saved_" + name) for name in _CONVOLUTION)
    except AttributeError:
        return None


_keeps_graph: Callable[[], bool] | None = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)


def graph_is_kept() -> bool:
    """Whether the backward that runs now may run again (`retain_graph=True`); True where torch does not tell."""
    return True if _keeps_graph is None else _keeps_graph()


_transforms_active: Callable[[], bool] | None = getattr(torch._C, "_are_functorch_transforms_active", None)


def transforms_active() -> bool:
    """Whether a `torch.func` transform (vmap, grad, jvp) is running; False where torch does not tell."""
    return False if _transforms_active is None else _transforms_active()


# A number for the backward pass that runs on this thread; -1 outside of one, or where torch does not tell.
graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def _stream_of(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _stream_of)


def raw_stream(device: torch.device) -> int:
    """The current CUDA stream of ``device`` as a number."""
    return _raw_stream(device.index)


def engine_reaches(node: object) -> bool | None:
    """Whether the backward that runs now will run `node`, an AccumulateGrad: None where its gradient is asked for.

    True: `.backward()`, which writes `.grad`. False: `node` is no part of this backward. None: `torch.autograd.grad`
    captures the gradient instead, or torch does not tell; then the gradient has to be returned.
    """
    ask = getattr(torch._C, "_will_engine_execute_node", None)
    if ask is None:
        return None
    try:
        return bool(ask(node))
    except RuntimeError:  # what torch raises for a leaf under `torch.autograd.grad`
        return None


def has_tensor_hooks(tensor: Tensor) -> bool:
    """Whether `tensor.register_hook` has live hooks, which must see every gradient; True where torch does not tell."""
    return bool(getattr(tensor, "_backward_hooks", True))


_top_hooks: Callable[[bool], Any] | None = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def saved_tensor_hooks_active() -> bool:
    """Whether saved-tensor hooks, such as those of checkpointing, are in force; True where torch does not tell."""
    return True if _top_hooks is None else _top_hooks(True) is not None


def only_saves_on_cpu() -> bool:
    """Whether the hooks in force are `torch.autograd.graph.save_on_cpu`'s, which leave CPU tensors as they are."""
    pack = innermost_pack_hook()
    return getattr(pack, "__module__", "") == torch.autograd.graph.__name__ and "save_on_cpu" in pack.__qualname__


def is_checkpointing() -> bool:
    """Whether the hooks in force are those of `torch.utils.checkpoint`, in forward or as it runs again."""
    return getattr(innermost_pack_hook(), "__module__", "") == "torch.utils.checkpoint"


_forward_ad: Any = torch.autograd.forward_ad


def forward_mode_active() -> bool:
    """Whether a forward-mode level is open; False where torch does not tell (then torch raises for a Function)."""
    level = getattr(_forward_ad, "_current_level", -1)
    return isinstance(level, int) and level >= 0


def output_facts(node: Any, nr: int = 0) -> Any:
    """What autograd knows of output `nr` of a node, to check gradients by: its `shape`, `dtype` and `device`.

    That takes some microseconds; a tensor at hand tells the same in a tenth of one.
    """
    return node._input_metadata[nr]


def output_nbytes(node: Any, nr: int) -> int:
    """The bytes of output `nr` of a node; 0 where autograd does not know it, as of a nested tensor."""
    known = node._input_metadata
    if nr >= len(known):
        return 0
    try:
        return int(math.prod(known[nr].shape) * known[nr].dtype.itemsize)
    except (AttributeError, RuntimeError):
        return 0


def outputs_nbytes(node: Any) -> int:
    """The bytes of all outputs of a node."""
    return sum(output_nbytes(node, nr) for nr in range(len(node._input_metadata)))


def packed(saved: Any) -> Any:
    """What the pack hook made of a saved tensor; the tensor itself if it passed no hook."""
    return saved.data


def passed_no_hook(saved: Any) -> bool:
    """Whether a saved tensor is as autograd saved it."""
    return saved.unpack_hook is None


def hook_of(name: str) -> Callable[[Any], Any]:
    """A function that gives the hook through which a node will unpack what it saved as `name`: None if there is none.

    It raises AttributeError for a node that has saved no such tensor.
    """
    return attrgetter(f"_raw_saved_{name}.unpack_hook")


def node_class(function: type[torch.autograd.Function]) -> type | None:
    """The class of the nodes that `function.apply` makes; None where torch does not tell."""
    return getattr(function, "_backward_cls", None)


def _hook_node() -> type | None:
    functions = getattr(torch.nn.modules, "_functions", None)
    function = getattr(functions, "BackwardHookFunction", None)
    return None if function is None else node_class(function)


# The class of the nodes that a module's full backward hooks put around it: each hands on all that it is given, output
# `nr` being input `nr`. None where torch does not tell.
HOOK_NODE: Any = _hook_node()


_HALF, _BYTE = torch.zeros((), dtype=torch.float16, device="cpu"), torch.zeros((), dtype=torch.int8, device="cpu")


def is_number(tensor: Tensor) -> bool:
    """Whether a tensor is a Python number that torch wrapped for an op: unlike a tensor's, its dtype gives way."""
    if tensor.dim() or not tensor.is_cpu:
        return False
    other = _HALF if tensor.dtype is torch.float64 else _BYTE if tensor.dtype is torch.int64 else None
    return other is not None and torch.result_type(other, tensor) is other.dtype


def softmax_backward(g: Tensor, y: Tensor) -> Tensor:
    """The gradient of the input of `y = torch.softmax(x, -1)`, differentiable; in float32 or better where torch can."""
    backward = getattr(torch, "_softmax_backward_data", None)
    if backward is None:
        return y * (g - (g * y).sum(-1, keepdim=True))
    dx: Tensor = backward(g, y, -1, y.dtype)
    return dx


_storage_use_count: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda _: sys.maxsize)


def storage_is_shared(tensor: Tensor) -> bool:
    """Whether a tensor other than this one and its base can see this memory; True where torch does not tell."""
    try:
        storage = tensor.untyped_storage()
        holders = 3 if tensor._base is not None else 2  # the storage object in our hand is one of them
        # Who holds it; and more than one hold a tensor that a node has saved.
        return _storage_use_count(storage._cdata) > holders or tensor._use_count() > 1  # type: ignore[attr-defined]
    except (AttributeError, NotImplementedError, RuntimeError):
        return True


def next_sequence_nr() -> int:
    """The number that the next node of this thread will get; a number above all where torch does not tell."""
    ask = getattr(torch._C._autograd, "_get_sequence_nr", None)
    return sys.maxsize if ask is None else int(ask())


def mutates(function: Any) -> bool:
    """Whether a function that leangrad has no table entry for may change its arguments in place."""
    schemas = [function] if hasattr(function, "_schema") else []
    if hasattr(function, "overloads"):
        schemas = [getattr(function, name) for name in function.overloads()]
    if schemas:  # an `out=` is looked for at each call
        written = [
            a for s in schemas for a in s._schema.arguments if a.alias_info is not None and a.alias_info.is_write
        ]
        return any(not a.is_out for a in written)
    name = getattr(function, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def saved_tensor_hooks_allowed() -> bool:
    """Whether saved-tensor hooks may be set here; inside a `torch.func` transform they may not."""
    ask = getattr(torch._C._autograd, "_saved_tensors_hooks_is_enabled", None)
    return True if ask is None else bool(ask())


def _are_ours(*hooks: dict[int, Any]) -> bool:
    """Whether all of these module hooks are leangrad's own, which do not look at what a module computes."""
    return all(getattr(hook, "is_leangrads", False) for some in hooks for hook in some.values())


def has_hooks_of_others(module: torch.nn.Module) -> bool:
    """Whether calling `module` does more than its `forward`, but for leangrad; True where torch does not tell."""
    try:
        forward, before = module._forward_hooks, module._forward_pre_hooks
        if module._backward_hooks or module._backward_pre_hooks:
            return True
        return bool((forward or before) and not _are_ours(forward, before))
    except AttributeError:
        return True


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether calling `module` does more than its `forward`; True where torch does not tell."""
    try:
        return bool(
            module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        )
    except AttributeError:
        return True


def has_global_hooks() -> bool:
    """Whether a hook is set on every module there is; True where torch does not tell."""
    try:
        hooks = torch.nn.modules.module
        return bool(
            hooks._global_forward_hooks
            or hooks._global_forward_pre_hooks
            or hooks._global_backward_hooks
            or hooks._global_backward_pre_hooks
        )
    except AttributeError:
        return True


def version(tensor: Tensor) -> int:
    """How often `tensor`, or anything that shares its memory by a view or a detach, was changed in place."""
    return tensor._version


def is_view(tensor: Tensor) -> bool:
    """Whether autograd knows `tensor` as a view of another one; True where torch does not tell."""
    ask = getattr(tensor, "_is_view", None)
    return True if ask is None else bool(ask())


@functools.cache
def keeps_output(kind: type) -> bool:
    """Whether autograd nodes of this type keep the tensor that they made: overwriting it would break their backward."""
    return any(name.startswith(("_saved_result", "_saved_output")) for name in dir(kind))


def direct(overload: Any) -> Any:
    """The C++ function behind `torch.ops.aten.name.overload`, a third cheaper to call; or the overload itself."""
    return getattr(overload, "_op", overload)


def private_names() -> dict[str, bool]:
    """Every private name that this file uses, and whether this torch has it.

    The names are read off the source, so the list cannot fall behind it. A name counts as there if any of the things
    that are asked for private names here has it. Names of CUDA are left out where torch was built without it.

    >>> private_names()["_version"]
    True
    """
    tensor = torch.ones(1, requires_grad=True) * 1
    owners: list[Any] = [torch, torch._C, torch._C._autograd, torch.autograd, torch.autograd.forward_ad]
    owners += [torch.autograd.profiler]
    owners += [torch.autograd.Variable, torch.autograd.graph, torch.autograd.Function, torch.nn.modules]
    owners += [torch.nn.Module(), torch.nn.modules.module, torch.ops.aten, torch.ops.aten.add.Tensor]
    owners += [tensor, tensor.untyped_storage(), tensor.grad_fn]
    owners += [torch.cuda, getattr(torch._C, "_StaticCudaLauncher", None), torch.utils, _python_dispatch]
    there = {name for owner in owners for name in dir(owner)}
    names = _private_names_in(ast.parse(inspect.getsource(sys.modules[__name__])))
    if not torch.backends.cuda.is_built():
        names = [name for name in names if "cuda" not in name.lower() and name != "_launch_kernel"]
    return {name: name in there for name in names}


def _private_names_in(source: ast.Module) -> list[str]:
    """Each `_name` of `x._name`, `getattr(x, "_name")` and `hasattr(x, "_name")`."""
    found: dict[str, None] = {}
    for node in ast.walk(source):
        match node:
            case ast.Attribute(value=ast.Name(id="sys")):  # Python's own
                continue
            case ast.Attribute(attr=str(name)):
                pass
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=str(name)), *_]):
                pass
            case _:
                continue
        if name.startswith("_") and not name.startswith("__"):
            found[name] = None
    return list(found)


def is_traced() -> bool:
    """Whether torch is recording this code instead of only running it: compile, export, jit.trace."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]


def forward_pre_hooks(module: torch.nn.Module) -> list[Any]:
    """The forward pre-hooks of this module, in order."""
    return list(module._forward_pre_hooks.values())


def remove_forward_hooks(module: torch.nn.Module, kinds: tuple[type, ...]) -> None:
    """Remove the forward hooks and pre-hooks of these classes, also from a copy, whose handles nobody holds."""
    for hooks, flags in (
        (module._forward_pre_hooks, ("_forward_pre_hooks_with_kwargs",)),
        (module._forward_hooks, ("_forward_hooks_with_kwargs", "_forward_hooks_always_called")),
    ):
        for key in [key for key, hook in hooks.items() if isinstance(hook, kinds)]:
            del hooks[key]
            for name in flags:
                getattr(module, name, {}).pop(key, None)


def after_backward(function: Any) -> bool:
    """Call ``function`` when the backward pass that runs now ends; False where that cannot be arranged."""
    engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
    if graph_task() < 0 or not hasattr(engine, "queue_callback"):
        return False
    engine.queue_callback(function)
    return True


def _missing_ledger_names() -> list[str]:
    """The names of [Note: names that are used in place], and those the ledger reads off nodes here, that are gone."""
    with torch.inference_mode(False), torch.enable_grad():
        tensor = torch.ones((), device="cpu", requires_grad=True) * torch.ones((), device="cpu", requires_grad=True)
    node: Any = tensor.grad_fn
    raw = getattr(node, "_raw_saved_self", None)
    wanted = {
        "Tensor": (tensor, ("_version", "_base", "_is_view")),
        "Node": (node, ("_sequence_nr", "_input_metadata", "metadata", "_saved_self", "_raw_saved_self")),
        "SavedTensor": (raw, ("data", "unpack_hook")),
    }
    return [f"{of}.{name}" for of, (owner, names) in wanted.items() for name in names if not hasattr(type(owner), name)]


_MISSING_LEDGER_NAMES = _missing_ledger_names()


@functools.cache
def ledger_names_present() -> bool:
    """Whether torch has every private name that the ledger cannot do without; if not, one warning says so."""
    if _MISSING_LEDGER_NAMES:
        warnings.warn(
            f"torch {torch.__version__} has no {', '.join(_MISSING_LEDGER_NAMES)}, which leangrad's ledger needs: "
            "lean models run plain, with the same gradients and no memory saved. Use a torch that leangrad knows.",
            stacklevel=2,
        )
    return not _MISSING_LEDGER_NAMES


def is_sharded(module: torch.nn.Module) -> bool:
    """Whether a part of this module gathers its parameters for forward and backward and frees them in between."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = tuple(getattr(fsdp, n) for n in ("FSDPModule", "FullyShardedDataParallel") if hasattr(fsdp, n))
    return bool(kinds) and any(isinstance(m, kinds) for m in module.modules())


def without_batches() -> Any:
    """A context in which a random op is not refused although gradients are batched (`is_grads_batched=True`)."""
    try:
        keys = torch._C.DispatchKeySet(torch._C._parse_dispatch_key("VmapMode"))  # type: ignore[arg-type]
        return torch._C._ExcludeDispatchKeyGuard(keys)
    except (AttributeError, RuntimeError, TypeError):
        return contextlib.nullcontext()


def norms(tensors: list[Tensor], order: float, dtype: torch.dtype) -> list[Tensor]:
    """The norm of each tensor, in `dtype`: in one call, where torch has it."""
    together = getattr(torch, "_foreach_norm", None)
    if together is None:
        return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]
    return list(together(tensors, order, dtype=dtype))


def scale_(tensors: list[Tensor], factor: Tensor | float) -> None:
    """Multiply each tensor by `factor`, in place: in one call, where torch has it."""
    together = getattr(torch, "_foreach_mul_", None)
    if together is not None:
        together(tensors, factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)


@functools.cache
def _has_fused_rms_norm(device_type: str) -> bool:
    """Whether torch has kernels of its own for both passes of an RMS norm there; on a CPU it composes other ops."""
    if device_type != "cuda":
        return False
    try:
        x = torch.ones(1, 8, device=device_type)
        _, rstd = torch.ops.aten._fused_rms_norm(x, [8], x[0], 1e-5)
        torch.ops.aten._fused_rms_norm_backward(x, x, [8], rstd, x[0], [True, True])
    except (AttributeError, RuntimeError):  # NotImplementedError is a RuntimeError
        return False
    return True


def fused_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor] | None:
    """An RMS norm over the last dimension and 1/rms of each row; None where torch has no kernel for it."""
    if not _has_fused_rms_norm(x.device.type):
        return None
    y, rstd = torch.ops.aten._fused_rms_norm(x, [x.shape[-1]], weight, eps)
    return y, rstd


def fused_rms_norm_backward(
    g: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, needs_dweight: bool
) -> tuple[Tensor, Tensor | None] | None:
    """The gradients of x and of the weight for `fused_rms_norm`; None where torch has no kernel for it."""
    if not _has_fused_rms_norm(x.device.type):
        return None
    dx, dweight = torch.ops.aten._fused_rms_norm_backward(g, x, [x.shape[-1]], rstd, weight, [True, needs_dweight])
    return dx, dweight if needs_dweight else None


# How many `TorchDispatchMode`s listen, to whom every op has to be shown; 0 where torch does not tell.
dispatch_modes_active: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)


def storage_holders(tensor: Tensor) -> int | None:
    """How many tensors see this memory, those that only C++ holds included; None where torch does not tell."""
    try:
        storage = tensor.untyped_storage()
        return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # without the storage object in our hand
    except (AttributeError, NotImplementedError, RuntimeError):
        return None


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor has memory of its own: one that stands for a batch (`is_grads_batched=True`) does not."""
    try:
        return tensor.untyped_storage() is not None
    except (NotImplementedError, RuntimeError):
        return False


def backward_elsewhere() -> bool:
    """Whether another thread is inside a backward pass; True, with other threads about, where torch does not tell."""
    if threading.active_count() == 1:
        return False
    enter = getattr(torch.autograd.graph, "_engine_run_backward", None)
    if enter is None:
        return True
    frames = sys._current_frames()
    del frames[threading.get_ident()]  # held by itself, ours would keep alive all that its callers hold
    for frame in frames.values():
        caller: FrameType | None = frame
        while caller is not None:
            if caller.f_code is enter.__code__:
                return True
            caller = caller.f_back
    return False


def innermost_pack_hook() -> Any:
    """The pack function of the saved-tensor hooks that are in force; None without any, or where torch does not tell."""
    hooks = None if _top_hooks is None else _top_hooks(True)
    return None if hooks is None else hooks[0]


def checkpoint_frame(pack: Any) -> Any:
    """What a checkpoint without reentrance knows of its segment, if ``pack`` is the pack hook of its forward.

    Its ``recompute_fn`` is what backward runs again, and may be replaced. None for other hooks, and where torch's
    checkpoints are not what they were.
    """
    if not _is_hook_of(pack, "_checkpoint_hook"):
        return None
    for cell in pack.__closure__ or ():
        if callable(getattr(cell.cell_contents, "recompute_fn", None)):
            return cell.cell_contents
    return None


def reentrant_checkpoint(tensor: Tensor) -> Any:
    """The node of the reentrant checkpoint that made ``tensor``, or None.

    Its ``run_function`` is what backward runs again, and may be replaced.
    """
    node = tensor.grad_fn if tensor._base is None else tensor._base.grad_fn
    is_one = type(node).__name__ == "CheckpointFunctionBackward" and callable(getattr(node, "run_function", None))
    return node if is_one else None


def is_checkpoint(pack: Any) -> bool:
    """Whether ``pack`` is the pack hook of a checkpoint's forward."""
    return _is_hook_of(pack, "_checkpoint_hook")


def is_recomputation(pack: Any) -> bool:
    """Whether ``pack`` is the hook under which a checkpoint runs its function again."""
    return _is_hook_of(pack, "_recomputation_hook")


def _is_hook_of(pack: Any, name: str) -> bool:
    return getattr(pack, "__module__", "") == CHECKPOINTS and pack.__qualname__.startswith(name)


CHECKPOINTS = "torch.utils.checkpoint"


def tensor_without_memory(kind: type[Tensor], like: Tensor) -> Any:
    """A tensor of class ``kind`` with the shape, strides, dtype and device of ``like``, and no memory."""
    return Tensor._make_wrapper_subclass(
        kind, like.shape, strides=like.stride(), dtype=like.dtype, layout=like.layout, device=like.device
    )


# The `__torch_function__` of a class whose calls no override sees, if torch has it.
no_override: Any = getattr(torch._C, "_disabled_torch_function_impl", Tensor.__torch_function__)


_python_dispatch: Any = getattr(torch.utils, "_python_dispatch", None)


def is_selective() -> bool:
    """Whether a selective checkpoint counts the ops that run now: it must see none that is not the model's."""
    if not dispatch_modes_active():
        return False
    modes: list[Any] = getattr(_python_dispatch, "_get_current_dispatch_mode_stack", list)()
    return any(type(mode).__module__ == CHECKPOINTS for mode in modes)


def unseen() -> Any:
    """A context in which a selective checkpoint does not see what runs."""
    if not is_selective():
        return contextlib.nullcontext()
    return getattr(_python_dispatch, "_disable_current_modes", contextlib.nullcontext)()


def copy_unseen(tensor: Tensor) -> Tensor:
    """A copy, which a selective checkpoint does not see."""
    if not dispatch_modes_active():
        return tensor.clone()
    with unseen():
        return tensor.clone()


def compile_kernel(code: str, name: str, types: str, warps: int) -> Callable[..., None] | None:
    """`launch(blocks, stream, *arguments)` of a CUDA kernel, from its C++, on the current device; or None.

    `types` has a letter for each argument: O for an address, l for a long. None where torch has no compiler at run
    time, or no way to start what it made.
    """
    build = getattr(torch.cuda, "_compile_kernel", None)
    start = getattr(getattr(torch._C, "_StaticCudaLauncher", None), "_launch_kernel", None)
    if build is None or start is None:
        return None
    try:
        kernel = build(code, name)
        function = int(kernel.func.value)
    except (AttributeError, ImportError, OSError, RuntimeError, TypeError):
        return None

    def launch(blocks: int, stream: int, *arguments: int) -> None:
        start(function, blocks, 1, 1, warps, 0, types, arguments, stream)

    launch.kernel = kernel  # type: ignore[attr-defined]  # its module must live as long
    return launch


def bare_modules(modules: Iterable[torch.nn.Module]) -> list[tuple[torch.nn.Module, dict[str, Any]]] | None:
    """Each module and its parameters by name; None if calling one does more than its `forward`, or torch does not tell.

    In one call for all of them, and without the failed lookup that comes before `module.weight` is found. Hooks that
    are leangrad's own do not count.
    """
    found = []
    try:
        for module in modules:
            own = module.__dict__
            forward, before = own["_forward_hooks"], own["_forward_pre_hooks"]
            if (forward or before) and not _are_ours(forward, before):
                return None
            if own["_backward_hooks"] or own["_backward_pre_hooks"]:
                return None
            found.append((module, own["_parameters"]))
    except (AttributeError, KeyError):
        return None
    return None if has_global_hooks() else found


_is_tracing: Callable[[], bool] = getattr(torch._C, "_is_tracing", torch.jit.is_tracing)  # type: ignore[attr-defined]


def is_watched() -> bool:
    """Whether somebody must see torch's own ops: a compiler, a tracer, a `torch.func` transform, forward mode, a user.

    A user says so by `LEANGRAD_DISABLE=1`.
    """
    if torch.compiler.is_compiling() or _is_tracing() or transforms_active() or forward_mode_active():
        return True
    return disabled()


def norm_tensors(norm: torch.nn.Module) -> tuple[Tensor | None, ...]:
    """Weight, bias, running mean and variance and the number of batches of a batch norm, without five slow lookups."""
    try:
        parameters, buffers = norm._parameters, norm._buffers
        running = buffers["running_mean"], buffers["running_var"], buffers["num_batches_tracked"]
        return (parameters["weight"], parameters["bias"], *running)
    except (AttributeError, KeyError):  # parametrized, or a torch that keeps them elsewhere
        names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        return tuple(getattr(norm, name) for name in names)


# Whether autocast is on for some kind of device; True where torch does not tell.
autocast_may_be_on: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def registries(module: torch.nn.Module) -> list[dict[str, Any]] | None:
    """The dictionaries that a module keeps its parameters and its children in; None where torch has none."""
    try:
        return [module._parameters, module._modules]
    except AttributeError:
        return None


# The index of the current CUDA device, and whether a graph is being captured on the current stream: what `torch.cuda`
# asks in the end, without a call of Python before it. Only where CUDA has been used.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
is_capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)


def versions(a: Tensor, b: Tensor) -> tuple[int, int]:
    """The versions of two tensors."""
    return a._version, b._version


_push_hooks: Any = getattr(torch._C._autograd, "_push_saved_tensors_default_hooks", None)
_pop_hooks: Any = getattr(torch._C._autograd, "_pop_saved_tensors_default_hooks", None)


def saved_tensor_hooks(pack: Callable[..., Any], unpack: Callable[..., Any]) -> tuple[Callable[[], None], ...]:
    """What sets a pair of saved-tensor hooks, and what takes back the pair that was set last: both may be called often.

    The same as to enter and to leave `torch.autograd.graph.saved_tensors_hooks(pack, unpack)`, with no frame of Python.
    """
    if _push_hooks is None or _pop_hooks is None:
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        return hooks.__enter__, hooks.__exit__
    return functools.partial(_push_hooks, pack, unpack), _pop_hooks
