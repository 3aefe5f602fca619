"""Private facts of FSDP and DTensor. FSDP gathers parameters for forward and backward and frees them in between."""

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Shard(NamedTuple):
    """A parameter that FSDP2 shards."""

    whole: Tensor  # the gathered parameter: one tensor for all steps; freeing its memory does not change its version
    part: Tensor  # this rank's part of it, which the optimizer changes
    group: Any  # FSDP2's group of the parameters that are gathered together with it


GROUPS = ("_fsdp_param_groups", "_fsdp_param_group")  # where a module's state has its groups; torch 2.11: one

# The methods of a process group that write into tensors: into their first argument, a tensor or lists of them.
WRITING_COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "recv", "recv_anysource", "gather", "scatter"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
)


def has_process_groups() -> bool:
    """Whether `torch.distributed` is initialized, so that this process may be one of several."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _kinds(*names: str) -> tuple[type, ...]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return tuple(getattr(fsdp, name) for name in names if hasattr(fsdp, name))


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP shards a part of this module: gathers parameters for forward and backward, frees them in between."""
    kinds = _kinds("FSDPModule", "FullyShardedDataParallel")
    return bool(kinds) and any(isinstance(m, kinds) for m in module.modules())


def is_flat(module: nn.Module | None) -> bool:
    """Whether FSDP1 shards a part of this module, or FSDP2 if torch lacks the names to inspect it."""
    if module is None or not _kinds("FSDPModule", "FullyShardedDataParallel"):
        return False
    kinds = _kinds("FullyShardedDataParallel") + (() if _tells() else _kinds("FSDPModule"))
    return any(isinstance(m, kinds) for m in module.modules())


def is_gathered(weight: Tensor) -> bool:
    """Whether FSDP2 has gathered this parameter and will free it; True where torch lacks a name."""
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    states, kind = _states(), _kinds("FSDPModule")
    if states is None or not kind or not _tells():
        return True
    memory = weight.untyped_storage()._cdata
    sharded: list[Any] = [module for module in list(states) if isinstance(module, kind)]
    return any(s.whole.untyped_storage()._cdata == memory for module in sharded for s in shards_of(module))


def _states() -> Any:
    """Return torch's mapping from modules to states of `fully_shard` and similar functions; None if it is missing."""
    from torch.distributed import _composable_state

    return getattr(_composable_state, "_module_state_mapping", None)


def count_states() -> int:
    """Return a number that changes when a module of this process is sharded; 0 if there is none, or torch lacks it."""
    states = _states() if "torch.distributed.fsdp" in sys.modules else None
    return 0 if states is None else len(states)


def sharding_modules(module: nn.Module | None) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the modules that FSDP2 gathers: those inside ``module``, itself included, and those around it.

    With ``module`` None all such modules of the process count as inside. Both lists are empty where torch lacks a name.
    """
    kind = _kinds("FSDPModule")
    if not kind or not _tells():
        return [], []
    known: list[Any] = [m for m in list(_states() or ()) if isinstance(m, kind)]
    if module is None:
        return known, []
    inside = [m for m in module.modules() if isinstance(m, kind)]
    around = [m for m in known if m not in inside and any(part is module for part in m.modules())]
    return inside, around


def shards_of(module: nn.Module) -> list[Shard]:
    """Return the parameters that FSDP2 gathers for this module itself, as far as it has gathered them at least once."""
    found = []
    for group in _groups(module):
        for parameter in group.fsdp_params:
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is not None:
                found.append(Shard(whole, parameter.sharded_param, group))
    return found


def shard_versions(part: Tensor) -> tuple[int, int]:
    """Return the versions of a sharded parameter and of the tensor that it wraps, which can be changed separately."""
    local = getattr(part, "_local_tensor", part)
    return part._version, local._version


def _groups(module: nn.Module) -> list[Any]:
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    for name in GROUPS:
        found = getattr(state, name, None)
        if found is not None:
            return list(found) if isinstance(found, list | tuple) else [found]
    return []


def is_at_work(group: Any) -> bool:
    """Whether ``group``, a module's group of parameters, is gathered when backward reads a tensor that is saved now.

    That is the case if the forward or backward of the module is running. Its parameters are gathered when the gradient
    of its output arrives, before any node of its forward runs, and freed when the gradient of its input is computed.
    """
    return group._training_state.name in ("FORWARD", "PRE_BACKWARD") and getattr(group, "unshard_in_backward", True)


@functools.cache
def _tells() -> bool:
    """Whether this torch has the private names that this file needs to inspect FSDP2's parameters."""
    wanted = {"_get_fsdp_state", "_unsharded_param", "_training_state", "fsdp_params", "sharded_param"}
    names = sharding_names()
    return wanted <= names and not names.isdisjoint(GROUPS)


def sharding_names() -> set[str]:
    """Return the names that the classes of FSDP2 and DTensor define, or use in their methods."""
    if not torch.distributed.is_available():
        return set()
    home = "torch.distributed.fsdp._fully_shard."
    kinds: list[Any] = []
    for module, kind in (
        ("torch.distributed.fsdp", "FSDPModule"),
        (home + "_fsdp_state", "FSDPState"),
        (home + "_fsdp_param", "FSDPParam"),
        (home + "_fsdp_param_group", "FSDPParamGroup"),
        ("torch.distributed.tensor", "DTensor"),
    ):
        with contextlib.suppress(ImportError, AttributeError):
            kinds.append(getattr(importlib.import_module(module), kind))
    codes = [getattr(function, "__code__", None) for kind in kinds for function in vars(kind).values()]
    used = {name for code in codes if code is not None for name in code.co_names}
    return used.union(*map(dir, kinds))


class Part(NamedTuple):
    """The local part of a DTensor, and the tensor of the autograd graph that it is, or is a view of."""

    local: Tensor
    whole: Tensor  # that tensor, detached
    node: Any  # the node that made it, as its first output
    wrap: Callable[[Tensor], Tensor]  # makes a DTensor of such a local part


def part_of(tensor: Tensor) -> Part | None:
    """Return the local part of a saved DTensor that `DTensor.from_local` made of a tensor of the graph; else None.

    A layer of tensor parallelism saves its input as such a DTensor. If the DTensor was viewed after `from_local`, its
    local part counts as the same view of the graph's tensor, provided both share memory and are contiguous.
    """
    kind: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if kind is None or type(tensor) is not kind:
        return None
    node: Any = tensor.grad_fn
    while type(node).__name__ in ("ViewBackward0", "UnsafeViewBackward0"):
        node = node.next_functions[0][0]
    if type(node).__name__ != "_FromTorchTensorBackward":
        return None
    source, nr = node.next_functions[0]
    base: Any = tensor if tensor._base is None else tensor._base
    local, whole = getattr(tensor, "_local_tensor", None), getattr(base, "_local_tensor", None)
    if source is None or nr != 0 or type(local) is not Tensor or type(whole) is not Tensor:
        return None
    if base.grad_fn is not node or local.untyped_storage()._cdata != whole.untyped_storage()._cdata:
        return None
    if not (local.is_contiguous() and whole.is_contiguous() and local.numel() == whole.numel()):
        return None
    if local.storage_offset() != whole.storage_offset() or tuple(source._input_metadata[0].shape) != tuple(whole.shape):
        return None
    facts: Any = tensor
    placed = {"device_mesh": facts.device_mesh, "placements": facts.placements, "run_check": False}
    wrap = functools.partial(facts.from_local, **placed, shape=facts.shape, stride=facts.stride())
    return Part(local, whole.detach(), source, wrap)


def gathering_node() -> type | None:
    """Return the class of the nodes by which FSDP2 detects the end of a module's backward; they pass their inputs on.

    None if FSDP2 is not in use, or torch lacks the names.
    """
    group = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    function = getattr(group, "RegisterPostBackwardFunction", None)
    return getattr(function, "_backward_cls", None)


def gathering_hooks(module: nn.Module) -> list[tuple[dict[int, Any], int, bool]]:
    """Return FSDP2's hooks of this module: the dictionary, the key in it, and whether the hook gathers or frees.

    True: the hook gathers the parameters before forward. False: it frees them after forward.
    """
    return [
        (hooks, key, gathers)
        for hooks, gathers in ((module._forward_pre_hooks, True), (module._forward_hooks, False))
        for key, hook in hooks.items()
        if str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp")
    ]
