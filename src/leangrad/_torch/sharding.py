"""FSDP: modules that gather their parameters for forward and for backward, and free them in between."""

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

    whole: Tensor  # gathered: the same tensor in every step, whose memory comes and goes below its version
    part: Tensor  # what this rank owns of it, and the optimizer changes
    group: Any  # the parameters that are gathered with it


GROUPS = ("_fsdp_param_groups", "_fsdp_param_group")  # what the state of a module calls them; torch 2.11 has one

# The methods of a process group that write into tensors: into their first argument, a tensor or lists of them.
WRITING_COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "recv", "recv_anysource", "gather", "scatter"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
)


def has_process_groups() -> bool:
    """Whether this process is one of several that know each other, or may be."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _kinds(*names: str) -> tuple[type, ...]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return tuple(getattr(fsdp, name) for name in names if hasattr(fsdp, name))


def is_sharded(module: nn.Module) -> bool:
    """Whether a part of this module gathers its parameters for forward and backward and frees them in between."""
    kinds = _kinds("FSDPModule", "FullyShardedDataParallel")
    return bool(kinds) and any(isinstance(m, kinds) for m in module.modules())


def is_flat(module: nn.Module | None) -> bool:
    """Whether a part of this module is of FSDP's first kind, or of the second and torch does not tell about it."""
    if module is None or not _kinds("FSDPModule", "FullyShardedDataParallel"):
        return False
    kinds = _kinds("FullyShardedDataParallel") + (() if _tells() else _kinds("FSDPModule"))
    return any(isinstance(m, kinds) for m in module.modules())


def is_gathered(weight: Tensor) -> bool:
    """Whether FSDP2 has gathered this parameter and will free it; True where torch does not tell."""
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    states, kind = _states(), _kinds("FSDPModule")
    if states is None or not kind or not _tells():
        return True
    memory = weight.untyped_storage()._cdata
    sharded: list[Any] = [module for module in list(states) if isinstance(module, kind)]
    return any(s.whole.untyped_storage()._cdata == memory for module in sharded for s in shards_of(module))


def _states() -> Any:
    """By module: what was made of it by `fully_shard` and its kin. None where torch does not tell."""
    from torch.distributed import _composable_state

    return getattr(_composable_state, "_module_state_mapping", None)


def count_states() -> int:
    """A number that changes when a module of this process is sharded; 0 while there is none."""
    states = _states() if "torch.distributed.fsdp" in sys.modules else None
    return 0 if states is None else len(states)


def sharding_modules(module: nn.Module | None) -> tuple[list[nn.Module], list[nn.Module]]:
    """The modules inside ``module``, itself included, that FSDP2 gathers, and those around it; None: all there are."""
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
    """The parameters that FSDP2 gathers for this very module, once it has."""
    found = []
    for group in _groups(module):
        for parameter in group.fsdp_params:
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is not None:
                found.append(Shard(whole, parameter.sharded_param, group))
    return found


def shard_versions(part: Tensor) -> tuple[int, int]:
    """The versions of a sharded parameter, and of the tensor that it wraps, which may be changed by itself."""
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
    """Whether the forward of the module of ``group`` runs, or its backward: what is saved now finds it in backward.

    Its parameters are gathered when the gradient of its output comes, before any node that its forward has made runs,
    and freed when that of its input is there.
    """
    return group._training_state.name in ("FORWARD", "PRE_BACKWARD") and getattr(group, "unshard_in_backward", True)


@functools.cache
def _tells() -> bool:
    """Whether this torch has the names that tell of a sharded parameter."""
    wanted = {"_get_fsdp_state", "_unsharded_param", "_training_state", "fsdp_params", "sharded_param"}
    names = sharding_names()
    return wanted <= names and not names.isdisjoint(GROUPS)


def sharding_names() -> set[str]:
    """The names that FSDP2 and DTensor use of themselves."""
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
    """What the local part of a DTensor is: all of a tensor of the graph, or a view of it."""

    local: Tensor
    whole: Tensor  # that tensor, without its gradient
    node: Any  # which made it, as its first output
    wrap: Callable[[Tensor], Tensor]  # makes a DTensor of such a local part


def part_of(tensor: Tensor) -> Part | None:
    """The local part of a saved DTensor, if `DTensor.from_local` made it of a tensor of the graph; else None.

    That is what a layer of tensor parallelism saves of its input. A view of it on the way is one of the local part too,
    if that lies in the same memory and is contiguous.
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
    """The class of the nodes that FSDP2 puts before a module to see the end of its backward: they hand on their inputs.

    None where FSDP2 is not used, or torch does not tell.
    """
    group = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    function = getattr(group, "RegisterPostBackwardFunction", None)
    return getattr(function, "_backward_cls", None)


def gathering_hooks(module: nn.Module) -> list[tuple[dict[int, Any], int, bool]]:
    """The hooks of this module that gather its parameters (True) and free them: by dictionary, and their key there."""
    return [
        (hooks, key, gathers)
        for hooks, gathers in ((module._forward_pre_hooks, True), (module._forward_hooks, False))
        for key, hook in hooks.items()
        if str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp")
    ]
