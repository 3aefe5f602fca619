"""The hooks by which FSDP2 gathers parameters: the region does not look at what they do, and takes what they gather.

In these hooks FSDP2 writes into buffers in place and resizes storages, where nobody tells whose memory they are. All of
it would pass for changes of the model's tensors behind autograd's back, and end every recipe.
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
from leangrad.ledger.origins.functions import hands_on
from leangrad.ledger.origins.shards import Shards, listen

Swap = tuple[dict[int, Any], int, Any]  # the hooks of a module, the key of one, and that one


class Gathers:
    """The modules of a ledger that FSDP2 shards, from step to step."""

    def __init__(self) -> None:
        self.is_flat = False  # FSDP of the first kind: nothing is known of its parameters, and no recipe reads any
        self._count = 0  # of sharded modules in this process, when they were looked for
        self._of: weakref.ref[nn.Module] | None = None
        self._inside: list[weakref.ref[nn.Module]] = []
        self._around: list[weakref.ref[nn.Module]] = []
        self._wanted: set[int] | None = None  # the ids of the parameters that recipes have read
        # By the id of a hook, which its stand-in holds. One for all steps, or a compiled module is compiled anew.
        self._stand_ins: dict[int, Aside] = {}

    def look(self, module: nn.Module | None) -> None:
        """A region is about to be opened: find the sharded modules in ``module`` and around it, if some may be new."""
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
            hands_on(_torch.gathering_node())

    def shards(self, *, is_recorded: bool) -> Shards | None:
        """For one region: the parameters that are gathered while it runs; None: there are none.

        is_recorded: which of them recipes will read is not known yet. A checkpointed segment has these gathers too, and
        its own first step.
        """
        if not self._inside and not self._around:
            return None
        return Shards(None if is_recorded else self._wanted)

    def begin(self, shards: Shards, swapped: list[Swap]) -> None:
        """A region is about to begin: stand in for the hooks that gather, which go into ``swapped``."""
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
                        stand_in = self._stand_ins[id(hook)] = Aside(hook, gathers=gathers)
                    swapped.append((hooks, key, hook))
                    hooks[key] = stand_in

    def end(self, shards: Shards, swapped: list[Swap]) -> None:
        """The region has ended: put the hooks back, and remember what recipes have read."""
        for hooks, key, hook in swapped:
            if isinstance(hooks.get(key), Aside):
                hooks[key] = hook
        self._wanted = shards.read | (self._wanted or set())


class Aside:
    """Stands for a hook of FSDP2 while a region is open."""

    is_leangrads = True

    def __init__(self, hook: Any, *, gathers: bool) -> None:
        self._hook, self._gathers = hook, gathers
        self._run = _run_undisturbed() if "torch._dynamo" in sys.modules else _run

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call the hook; in a compiled module, where Dynamo does not look either."""
        return self._run(self._hook, self._gathers, module, *args, **kwargs)


def _run(hook: Any, gathers: bool, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    region = open_region()
    if region is None or region.shards is None:
        return hook(module, *args, **kwargs)
    with region.aside():
        result = hook(module, *args, **kwargs)
        if gathers and region.shards.gathered(_torch.shards_of(module)):
            region.fence = _torch.next_sequence_nr()
    return result


@functools.cache
def _run_undisturbed() -> Any:
    """One for all: of a method of each stand-in Dynamo would make a function that holds it, which it would hold."""
    return torch.compiler.disable(_run)
