"""Suspends the open region during FSDP2's hooks, which gather and free parameters, and records what they gather.

In these hooks FSDP2 writes into buffers in place and resizes storages, and nothing says whose memory they are. The
region would take all of that for changes of the model's tensors that autograd did not record, and end every recipe.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any

import torch
from torch import nn

from leangrad import _torch
from leangrad.ledger.observe.active_region import open_region
from leangrad.ledger.origins.functions import register_identity
from leangrad.ledger.origins.shards import Shards, listen

Swap = tuple[dict[int, Any], int, Any]  # the dict of a module's hooks, the key of one hook, and that hook


class Gathers:
    """The FSDP2 modules in and around the module of a ledger; lasts from step to step."""

    def __init__(self) -> None:
        self.is_flat = False  # FSDP1, or FSDP2 in a torch without the expected names: no recipe reads parameters
        self._count = 0  # sharding states in this process when ``look`` searched last
        self._of: weakref.ref[nn.Module] | None = None  # the module that it searched; None: the whole process
        self._inside: list[weakref.ref[nn.Module]] = []  # sharded modules inside that module, itself included
        self._around: list[weakref.ref[nn.Module]] = []  # sharded modules that contain it
        # Ids of the parameters of which recipes have read a copy; None before the first region has ended.
        self._wanted: set[int] | None = None
        # By the id of the hook, which stays valid because the SuspendedHook holds the hook. They serve all steps: a new
        # object in each would make Dynamo compile a compiled module anew.
        self._stand_ins: dict[int, SuspendedHook] = {}

    def look(self, module: nn.Module | None) -> None:
        """Find the sharded modules in ``module`` and around it, if there may be new ones.

        Called before a region is opened. ``module`` None: all sharded modules of the process count as inside.
        """
        count = _torch.count_states()
        is_known = module is None if self._of is None else self._of() is module
        if count == self._count and is_known:
            return
        self._count, self._of = count, None if module is None else weakref.ref(module)
        inside, around = _torch.sharding_modules(module)
        self._inside, self._around = [*map(weakref.ref, inside)], [*map(weakref.ref, around)]
        self._wanted = None
        self._stand_ins.clear()
        if inside or around:
            listen()
            register_identity(_torch.gathering_node())

    def shards(self, *, is_recorded: bool) -> Shards | None:
        """Return the record of the parameters that are gathered while one region runs; None if none are sharded.

        is_recorded: the step is recorded, and it is not known yet which parameters recipes read. The ledger of a
            checkpointed segment shares this object but records a first step of its own.
        """
        if not self._inside and not self._around:
            return None
        return Shards(None if is_recorded else self._wanted)

    def begin(self, shards: Shards, swapped: list[Swap]) -> None:
        """Replace FSDP2's hooks in the sharded modules before a region begins; the originals are added to ``swapped``.

        The parameters that FSDP2 has gathered so far are entered into ``shards``.
        """
        try:
            self._stand_in(swapped)
            for ref in (*self._inside, *self._around):  # the module itself is gathered before its region begins
                module = ref()
                if module is not None:
                    shards.gathered(_torch.shards_of(module))
        except BaseException:
            self.end(shards, swapped)
            raise

    def _stand_in(self, swapped: list[Swap]) -> None:
        for ref in self._inside:
            module = ref()
            if module is not None:
                for hooks, key, gathers in _torch.gathering_hooks(module):
                    hook = hooks[key]
                    stand_in = self._stand_ins.get(id(hook))
                    if stand_in is None:
                        stand_in = self._stand_ins[id(hook)] = SuspendedHook(hook, gathers=gathers)
                    swapped.append((hooks, key, hook))
                    hooks[key] = stand_in

    def end(self, shards: Shards, swapped: list[Swap]) -> None:
        """Put the hooks in ``swapped`` back when the region has ended, and note which copies recipes have read."""
        for hooks, key, hook in swapped:
            if isinstance(hooks.get(key), SuspendedHook):
                hooks[key] = hook
        self._wanted = shards.read | (self._wanted or set())


class SuspendedHook:
    """Replaces a hook of FSDP2 while a region is open: the region ignores what the hook does."""

    is_leangrads = True

    def __init__(self, hook: Any, *, gathers: bool) -> None:
        self._hook, self._gathers = hook, gathers
        self._run = _run_undisturbed() if "torch._dynamo" in sys.modules else _run

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call the hook with the open region suspended; in a compiled module Dynamo does not trace the call."""
        return self._run(self._hook, self._gathers, module, *args, **kwargs)


def _run(hook: Any, gathers: bool, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    region = open_region()
    if region is None or region.shards is None:
        return hook(module, *args, **kwargs)
    with region.suspended():
        result = hook(module, *args, **kwargs)
        if gathers and region.shards.gathered(_torch.shards_of(module)):
            region.distrust()
    return result


@functools.cache
def _run_undisturbed() -> Any:
    """Return ``_run``, hidden from Dynamo: one function for all hooks.

    To disable a method of each SuspendedHook would make a reference cycle of the hook and the function that Dynamo
    makes of the method.
    """
    return torch.compiler.disable(_run)
