"""Private facts of autograd: nodes, backward passes and saved-tensor hooks."""

import functools
import math
import sys
import threading
from collections.abc import Callable
from operator import attrgetter
from types import FrameType
from typing import Any

import torch
from torch import Tensor

_CONVOLUTION = ("bias_sym_sizes_opt", "stride", "padding", "dilation", "transposed", "output_padding", "groups")


def convolution_settings(node: Any) -> tuple[Any, ...] | None:
    """Return the settings that a convolution's node saved, in the order of `aten.convolution_backward`.

    None for any other node, and where torch names them differently.
    """
    if node.name() != "ConvolutionBackward0":
        return None
    try:
        return tuple(getattr(node, "_saved_" + name) for name in _CONVOLUTION)
    except AttributeError:
        return None


_keeps_graph: Callable[[], bool] | None = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)


def graph_is_kept() -> bool:
    """Whether the running backward pass keeps its graph (`retain_graph=True`); True where torch lacks the name."""
    return True if _keeps_graph is None else _keeps_graph()


# Returns the id of the backward pass that runs on this thread; -1 outside of one, or where torch lacks the name.
graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def engine_reaches(node: object) -> bool | None:
    """Whether the running backward pass will run `node`, an AccumulateGrad; None if it returns the gradient instead.

    True: `.backward()`, which writes `.grad`. False: `node` is not part of this backward pass. None:
    `torch.autograd.grad` captures the gradient instead, or torch lacks the name; then the gradient has to be returned.
    """
    ask = getattr(torch._C, "_will_engine_execute_node", None)
    if ask is None:
        return None
    try:
        return bool(ask(node))
    except RuntimeError:  # torch raises it for a leaf under `torch.autograd.grad`
        return None


def has_tensor_hooks(tensor: Tensor) -> bool:
    """Whether `tensor` has hooks of `register_hook`, which must see every gradient; True where torch lacks the name."""
    return bool(getattr(tensor, "_backward_hooks", True))


_top_hooks: Callable[[bool], Any] | None = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def saved_tensor_hooks_active() -> bool:
    """Whether saved-tensor hooks, such as those of checkpointing, are set; True where torch lacks the name."""
    return True if _top_hooks is None else _top_hooks(True) is not None


def only_saves_on_cpu() -> bool:
    """Whether the innermost hooks are those of `torch.autograd.graph.save_on_cpu`, which do not change CPU tensors."""
    pack = innermost_pack_hook()
    return getattr(pack, "__module__", "") == torch.autograd.graph.__name__ and "save_on_cpu" in pack.__qualname__


def output_facts(node: Any, nr: int = 0) -> Any:
    """Return autograd's metadata of output `nr` of a node: the `shape`, `dtype` and `device` that a gradient must have.

    Reading them takes some microseconds; reading them from the tensor takes a tenth of a microsecond.
    """
    return node._input_metadata[nr]


def output_nbytes(node: Any, nr: int) -> int:
    """Return the bytes of output `nr` of a node; 0 if autograd has no shape for it, as for a nested tensor."""
    known = node._input_metadata
    if nr >= len(known):
        return 0
    try:
        return int(math.prod(known[nr].shape) * known[nr].dtype.itemsize)
    except (AttributeError, RuntimeError):
        return 0


def outputs_nbytes(node: Any) -> int:
    """Return the bytes of all outputs of a node."""
    return sum(output_nbytes(node, nr) for nr in range(len(node._input_metadata)))


def packed(saved: Any) -> Any:
    """Return what the pack hook returned for ``saved``, a node's saved tensor; without a hook, the tensor itself."""
    return saved.data


def passed_no_hook(saved: Any) -> bool:
    """Whether autograd saved ``saved``, a node's saved tensor, without a saved-tensor hook."""
    return saved.unpack_hook is None


def hook_of(name: str) -> Callable[[Any], Any]:
    """Return a function that returns the unpack hook of a node's saved tensor `name`, or None if it has no hook.

    The function raises AttributeError for a node that has no such saved tensor.
    """
    return attrgetter(f"_raw_saved_{name}.unpack_hook")


def node_class(function: type[torch.autograd.Function]) -> type | None:
    """Return the class of the nodes that `function.apply` makes; None where torch lacks the name."""
    return getattr(function, "_backward_cls", None)


def _hook_node() -> type | None:
    functions = getattr(torch.nn.modules, "_functions", None)
    function = getattr(functions, "BackwardHookFunction", None)
    return None if function is None else node_class(function)


# The class of the nodes that a module's full backward hooks put around it. Such a node passes its inputs on unchanged:
# output `nr` is input `nr`. None where torch lacks the name.
HOOK_NODE: Any = _hook_node()


def next_sequence_nr() -> int:
    """Return the sequence number of this thread's next node; `sys.maxsize`, above all, where torch lacks the name."""
    ask = getattr(torch._C._autograd, "_get_sequence_nr", None)
    return sys.maxsize if ask is None else int(ask())


def saved_tensor_hooks_allowed() -> bool:
    """Whether saved-tensor hooks may be set here, which `torch.func` forbids; True where torch lacks the name."""
    ask = getattr(torch._C._autograd, "_saved_tensors_hooks_is_enabled", None)
    return True if ask is None else bool(ask())


@functools.cache
def keeps_output(kind: type) -> bool:
    """Whether autograd nodes of class `kind` save their own output; to overwrite it would break their backward."""
    return any(name.startswith(("_saved_result", "_saved_output")) for name in dir(kind))


def after_backward(function: Any) -> bool:
    """Call ``function`` when the running backward pass ends; False if none is running, or torch lacks the names."""
    engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
    if graph_task() < 0 or not hasattr(engine, "queue_callback"):
        return False
    engine.queue_callback(function)
    return True


def backward_elsewhere() -> bool:
    """Whether another thread runs a backward pass; where torch lacks the name, True if there are other threads."""
    if threading.active_count() == 1:
        return False
    enter = getattr(torch.autograd.graph, "_engine_run_backward", None)
    if enter is None:
        return True
    frames = sys._current_frames()
    del frames[threading.get_ident()]  # a frame that refers to itself keeps alive the locals of all its callers
    for frame in frames.values():
        caller: FrameType | None = frame
        while caller is not None:
            if caller.f_code is enter.__code__:
                return True
            caller = caller.f_back
    return False


def innermost_pack_hook() -> Any:
    """Return the pack hook of the innermost saved-tensor hooks; None if there are none, or torch lacks the name."""
    hooks = None if _top_hooks is None else _top_hooks(True)
    return None if hooks is None else hooks[0]


_push_hooks: Any = getattr(torch._C._autograd, "_push_saved_tensors_default_hooks", None)


_pop_hooks: Any = getattr(torch._C._autograd, "_pop_saved_tensors_default_hooks", None)


def saved_tensor_hooks(pack: Callable[..., Any], unpack: Callable[..., Any]) -> tuple[Callable[[], None], ...]:
    """Return a function that sets this pair of saved-tensor hooks, and one that removes the pair that was set last.

    Both may be called any number of times. They do the same as entering and leaving
    `torch.autograd.graph.saved_tensors_hooks(pack, unpack)`, without a Python frame.
    """
    if _push_hooks is None or _pop_hooks is None:
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        return hooks.__enter__, hooks.__exit__
    return functools.partial(_push_hooks, pack, unpack), _pop_hooks
