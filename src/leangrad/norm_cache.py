"""`cached_norm`: the norm of a parameter, computed again only after the parameter has changed.

[Note: what counts as a change] A cached norm is used again only if all of this is unchanged:

    version     every in-place op of torch increments it, through views and `detach` too, with and without grad mode
    memory      `p.data = ...`, `.to()` and `set_` give a parameter another storage, or another shape on the same one
    optimizers  a fused optimizer writes without incrementing the version (measured on CPU, torch 2.13), so a global
                hook of `torch.optim` removes the norms of an optimizer's parameters after each of its steps
    stream      on CUDA a norm is used only on the stream that computed it
    result      the cached tensor itself has not been changed

A norm is cached only if no other tensor uses the parameter's memory at that moment: another tensor, such as the flat
buffer that the parameter was cut from, may have a version counter of its own. A tensor that is made from the parameter
later is a view, which shares its counter, or `p.data`, which does not.

A write that increments no counter is not detected: through `p.data`, NumPy or a custom kernel on the raw memory, a
collective on `p.data`, FSDP's gathering, the replay of a CUDA graph. Call `forget_norm` after those.

[Note: no lock] An entry is immutable, and one assignment puts it into a dict. The state that an entry is compared by is
read before the norm is computed, so a change during the computation makes the entry invalid, not wrong. The optimizer
hook first renews the token and then removes entries; `cached_norm` compares the token after it has stored an entry, and
removes the entry if the token was renewed.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from leangrad._torch import forward_mode_active, is_traced, storage_holders, stream_of, transforms_active, version

__all__ = ["cached_norm", "forget_norm"]


def cached_norm(parameter: Tensor) -> Tensor:
    """Return the 2-norm of a parameter, computed again only when the parameter has changed in place.

    Equals `torch.linalg.vector_norm(parameter.detach())`, in float32 for half precision. The result is a constant with
    no dimensions, on the parameter's device: no gradient flows through it, computing it does not synchronize with the
    GPU, and the same tensor is returned until the parameter changes. [Note: what counts as a change] lists the changes,
    and the few writes that cannot be detected. Several threads may call it at once. Keeps one number for each
    parameter, as long as the parameter lives, and nothing for backward.

    >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> cached_norm(weight), cached_norm(weight) is cached_norm(weight)
    (tensor(5.), True)
    >>> with torch.no_grad():
    ...     _ = weight.mul_(2)
    >>> cached_norm(weight)
    tensor(10.)
    """
    if not _may_cache(parameter):
        return _norm(parameter)
    key = id(parameter)
    entry = _entries.get(key)
    state = _state(parameter)
    if entry is not None and entry.owner() is parameter and entry.is_valid(state):
        return entry.norm
    if storage_holders(parameter) != 1:
        _entries.pop(key, None)
        return _norm(parameter)
    if not _hooked:
        _watch_optimizers()
    token = _token
    storage = weakref.ref(parameter.untyped_storage())
    norm = _norm(parameter)
    owner = weakref.ref(parameter, lambda ref: _forget_owner(key, ref))
    _entries[key] = _Entry(owner, storage, state, norm, version(norm))
    if token is not _token:
        _entries.pop(key, None)
    return norm


def forget_norm(parameter: Tensor) -> None:
    """Let the next `cached_norm` of this parameter compute the norm again.

    Needed only after a write that increments no counter; see [Note: what counts as a change]. It also removes the weak
    reference to the parameter, with which `torch.utils.swap_tensors` would refuse the parameter.

    >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> norm = cached_norm(weight)
    >>> weight.data *= 2
    >>> forget_norm(weight)
    >>> cached_norm(weight)
    tensor(10.)
    """
    _entries.pop(id(parameter), None)


class _Entry(NamedTuple):
    owner: weakref.ref[Tensor]
    storage: weakref.ref[torch.UntypedStorage]
    state: tuple[Any, ...]
    norm: Tensor
    norm_version: int

    def is_valid(self, state: tuple[Any, ...]) -> bool:
        parameter = self.owner()
        return (
            parameter is not None
            and self.state == state
            # By identity: another storage may reuse the address, but not the object of a storage that is alive.
            and self.storage() is parameter.untyped_storage()
            and version(self.norm) == self.norm_version
        )


_entries: dict[int, _Entry] = {}
_token = object()  # renewed at every step of every optimizer
_hooked = False
_hook_lock = threading.RLock()


def _may_cache(parameter: Tensor) -> bool:
    """Whether this is a plain tensor with a usable version counter, in code that is not traced or captured."""
    if is_traced() or transforms_active() or forward_mode_active():
        return False
    if type(parameter) not in (Tensor, torch.nn.Parameter) or parameter.layout is not torch.strided:
        return False
    if parameter.is_inference() or parameter.is_meta:
        return False
    return not parameter.is_cuda or not torch.cuda.is_current_stream_capturing()


def _state(parameter: Tensor) -> tuple[Any, ...]:
    """Return the state by which an entry is compared: an in-place change of data or tensor changes part of it."""
    stream = stream_of(parameter)
    place = (parameter.dtype, parameter.shape, parameter.stride(), parameter.storage_offset())
    return version(parameter), parameter.data_ptr(), stream, *place


def _norm(parameter: Tensor) -> Tensor:
    # A norm that was computed in inference mode could not be used in a graph later.
    with torch.inference_mode(False), torch.no_grad():
        half = parameter.is_floating_point() and parameter.dtype.itemsize < 4
        norm: Tensor = torch.linalg.vector_norm(parameter.detach(), dtype=torch.float32 if half else None)
        return norm


def _forget_owner(key: int, owner: weakref.ref[Tensor]) -> None:
    entry = _entries.get(key)
    if entry is not None and entry.owner is owner:  # the id may be another tensor's by now
        _entries.pop(key, None)


def _watch_optimizers() -> None:
    global _hooked
    with _hook_lock:
        if not _hooked:
            register_optimizer_step_post_hook(_forget_stepped)
            _hooked = True


def _forget_stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Remove the norms of the optimizer's parameters after its step; see [Note: no lock]."""
    global _token
    if torch.compiler.is_compiling():  # a compiled step increments the versions
        return
    _token = object()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            _entries.pop(id(parameter), None)
