"""Hooks and parameters of modules."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


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


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether `torch.compile` was called on this very module, or its own `compile`; False where torch does not tell."""
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None


def is_replica(module: torch.nn.Module) -> bool:
    """Whether DataParallel made this module for one forward: its hooks are those of the module that it stands for."""
    return bool(getattr(module, "_is_replica", False))


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


def norm_tensors(norm: torch.nn.Module) -> tuple[Tensor | None, ...]:
    """Weight, bias, running mean and variance and the number of batches of a batch norm, without five slow lookups."""
    try:
        parameters, buffers = norm._parameters, norm._buffers
        running = buffers["running_mean"], buffers["running_var"], buffers["num_batches_tracked"]
        return (parameters["weight"], parameters["bias"], *running)
    except (AttributeError, KeyError):  # parametrized, or a torch that keeps them elsewhere
        names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        return tuple(getattr(norm, name) for name in names)


def registries(module: torch.nn.Module) -> list[dict[str, Any]] | None:
    """The dictionaries that a module keeps its parameters and its children in; None where torch has none."""
    try:
        return [module._parameters, module._modules]
    except AttributeError:
        return None
