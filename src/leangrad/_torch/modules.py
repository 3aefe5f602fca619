"""Private facts of modules: their hooks, parameters, buffers and children."""

from collections.abc import Iterable
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor


def _are_ours(*hooks: dict[int, Any]) -> bool:
    """Whether all of these module hooks are leangrad's own, which ignore the values that a module computes."""
    return all(getattr(hook, "is_leangrads", False) for some in hooks for hook in some.values())


def has_hooks_of_others(module: torch.nn.Module) -> bool:
    """Whether calling `module` runs hooks that are not leangrad's own; True where torch lacks a name."""
    try:
        forward, before = module._forward_hooks, module._forward_pre_hooks
        if module._backward_hooks or module._backward_pre_hooks:
            return True
        return bool((forward or before) and not _are_ours(forward, before))
    except AttributeError:
        return True


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether calling `module` runs hooks besides its `forward`; True where torch lacks a name."""
    try:
        return bool(
            module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        )
    except AttributeError:
        return True


def has_global_hooks() -> bool:
    """Whether a global hook is set, which runs for every module; True where torch lacks a name."""
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


def hooks_and_children(modules: Iterable[torch.nn.Module]) -> tuple[list[Any], ...] | None:
    """Return what to compare: of the forward hooks, children, classes, names and training modes of these modules.

    Torch never uses the key of a hook again; a method that one module has for itself is one more name. This runs in
    every step, on models of perhaps a thousand modules, so it loops over them in C. None where torch lacks a name.
    """
    try:
        modules = list(modules)
        every = list(map(vars, modules))
        children = list(map(_children_of, every))
        return (
            list(chain.from_iterable(map(_hooks_of, every))),
            list(chain.from_iterable(map(_pre_hooks_of, every))),
            list(map(id, chain.from_iterable(map(dict.values, children)))),
            list(map(len, children)),
            list(map(len, every)),
            list(map(_training_of, every)),
            list(map(type, modules)),
        )
    except (AttributeError, KeyError, TypeError):
        return None


_hooks_of, _pre_hooks_of = itemgetter("_forward_hooks"), itemgetter("_forward_pre_hooks")
_children_of, _training_of = itemgetter("_modules"), itemgetter("training")


def forward_pre_hooks(module: torch.nn.Module) -> list[Any]:
    """Return the forward pre-hooks of this module, in order."""
    return list(module._forward_pre_hooks.values())


def remove_forward_hooks(module: torch.nn.Module, kinds: tuple[type, ...]) -> None:
    """Remove the forward hooks and pre-hooks of these classes from a module.

    Unlike removal by handles, this works for a copied module too.
    """
    for hooks, flags in (
        (module._forward_pre_hooks, ("_forward_pre_hooks_with_kwargs",)),
        (module._forward_hooks, ("_forward_hooks_with_kwargs", "_forward_hooks_always_called")),
    ):
        for key in [key for key, hook in hooks.items() if isinstance(hook, kinds)]:
            del hooks[key]
            for name in flags:
                getattr(module, name, {}).pop(key, None)


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether `torch.compile`, or its own `compile`, was called on this module itself; False where torch lacks it."""
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None


def is_replica(module: torch.nn.Module) -> bool:
    """Whether DataParallel made this module as a replica for one forward; it shares the hooks of the original."""
    return bool(getattr(module, "_is_replica", False))


def has_own_forward(module: torch.nn.Module) -> bool:
    """Whether the instance has a forward of its own; that of `pack_gradients` does not count: it computes the same."""
    forward = module.__dict__.get("forward")
    return forward is not None and not getattr(forward, "__module__", "").startswith("leangrad.packed")


def runs_only_its_forward(module: torch.nn.Module) -> bool:
    """Whether calling `module` runs the forward of its class, and no hooks but leangrad's own."""
    own = module.__dict__
    try:
        hooks = own["_forward_hooks"] or own["_forward_pre_hooks"]
        if not (hooks or own["_backward_hooks"] or own["_backward_pre_hooks"] or "forward" in own):
            return True
    except KeyError:
        return False
    return not has_hooks_of_others(module) and not has_own_forward(module)


def bare_modules(modules: Iterable[torch.nn.Module]) -> list[tuple[torch.nn.Module, dict[str, Any]]] | None:
    """Return each module with its parameters by name; None if calling one runs hooks, or a forward of the instance.

    None too where torch lacks a name.

    One call reads all modules, without the failed attribute lookup that precedes each `module.weight`. leangrad's own
    hooks are ignored.
    """
    found = []
    try:
        for module in modules:
            own = module.__dict__
            forward, before = own["_forward_hooks"], own["_forward_pre_hooks"]
            if (forward or before) and not _are_ours(forward, before):
                return None
            if own["_backward_hooks"] or own["_backward_pre_hooks"] or has_own_forward(module):
                return None
            found.append((module, own["_parameters"]))
    except (AttributeError, KeyError):
        return None
    return None if has_global_hooks() else found


def norm_tensors(norm: torch.nn.Module) -> tuple[Tensor | None, ...]:
    """Return a batch norm's weight, bias, running mean and variance, and number of batches, without slow lookups."""
    try:
        parameters, buffers = norm._parameters, norm._buffers
        running = buffers["running_mean"], buffers["running_var"], buffers["num_batches_tracked"]
        return (parameters["weight"], parameters["bias"], *running)
    except (AttributeError, KeyError):  # parametrized, or a torch that keeps them elsewhere
        names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        return tuple(getattr(norm, name) for name in names)


def registries(module: torch.nn.Module) -> list[dict[str, Any]] | None:
    """Return the dictionaries of a module's parameters and of its children; None where torch lacks a name."""
    try:
        return [module._parameters, module._modules]
    except AttributeError:
        return None
