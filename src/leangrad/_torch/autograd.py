"""Nodes, backward passes and saved-tensor hooks."""

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


# A number for the backward pass that runs on this thread; -1 outside of one, or where torch does not tell.
graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


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


def next_sequence_nr() -> int:
    """The number that the next node of this thread will get; a number above all where torch does not tell."""
    ask = getattr(torch._C._autograd, "_get_sequence_nr", None)
    return sys.maxsize if ask is None else int(ask())


def saved_tensor_hooks_allowed() -> bool:
    """Whether saved-tensor hooks may be set here; inside a `torch.func` transform they may not."""
    ask = getattr(torch._C._autograd, "_saved_tensors_hooks_is_enabled", None)
    return True if ask is None else bool(ask())


@functools.cache
def keeps_output(kind: type) -> bool:
    """Whether autograd nodes of this type keep the tensor that they made: overwriting it would break their backward."""
    return any(name.startswith(("_saved_result", "_saved_output")) for name in dir(kind))


def after_backward(function: Any) -> bool:
    """Call ``function`` when the backward pass that runs now ends; False where that cannot be arranged."""
    engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
    if graph_task() < 0 or not hasattr(engine, "queue_callback"):
        return False
    engine.queue_callback(function)
    return True


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
