"""Parameters that FSDP2 shards: what recipes read of them.

[Note: recipes that read sharded parameters]
FSDP2 gathers the parameters of a module before its forward and frees them after it, and again in backward: when the
gradient of the module's output comes, and when that of its input is there. The gathered parameter is one tensor in all
steps, whose memory comes and goes below its version counter. So a recipe reads it in one of two ways.

A copy       Of a vector up to ``COPIED_BYTES``, made while the module's forward runs: the weights of norms, scales,
             biases. Backward of a linear layer asks for the output of the norm before it, which may be another
             module's, or the block's before: its parameters are not there yet. A copy is what forward has read,
             whatever happens to the shards.
In place     All others, if what is rebuilt is saved while the forward of the parameter's own module runs: the node
             that saves it runs in the backward of that module, with the parameter at hand. The value says which
             modules have to be gathered for it (``Value.gathers``). When it is read, it has to be there, and the
             optimizer must not have changed it since. What is saved elsewhere is rebuilt from a copy if the parameter
             is small, and else kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from leangrad import _torch
from leangrad._torch import Shard
from leangrad.errors import ChangedError
from leangrad.ledger.origins.functions import NoRecipeError
from leangrad.ledger.values.value import Value, is_there, leaf_value

COPIED_BYTES = 64 * 1024  # operands up to this size are copied


class Shards:
    """The sharded parameters of one region that were gathered so far."""

    def __init__(self, wanted: set[int] | None) -> None:
        """``wanted``: the ids of those that recipes have read in earlier steps, if any were run."""
        self.read: set[int] = set()  # the ids of those of which recipes read a copy
        self._wanted = wanted
        self._whole: dict[int, Shard] = {}  # by the id of the gathered parameter, which FSDP2 holds
        self._memory: dict[int, Shard] = {}  # by the address of its storage
        self._copies: dict[int, Value] = {}  # by the same id
        self._in_place: dict[int, Value] = {}
        self._checks: dict[int, _Unchanged] = {}

    def gathered(self, shards: Iterable[Shard]) -> bool:
        """These parameters are there now: copy the small ones, before they are gone.

        Gives back whether one of them has changed since it was there before: no recipe may reach back beyond this.
        """
        has_changed = False
        for shard in shards:
            whole = shard.whole
            if type(whole) not in (torch.nn.Parameter, Tensor):
                continue
            last = self._checks.get(id(whole))
            if last is None:
                self._whole[id(whole)] = shard
                self._memory[_torch.storage_address(whole)] = shard
            elif last.has_changed():
                has_changed = True
            self._checks[id(whole)] = _Unchanged(shard.part)
            self._copies.pop(id(whole), None)
            self._in_place.pop(id(whole), None)
            is_wanted = self._wanted is None or id(whole) in self._wanted
            if is_wanted and whole.nbytes <= COPIED_BYTES and is_there(whole):
                self._copy(whole)
        return has_changed

    def __contains__(self, variable: Tensor) -> bool:
        """Whether it is one of them."""
        return id(variable) in self._whole

    def leaf(self, variable: Tensor) -> Value | None:
        """What a recipe reads of ``variable``; None: it is not sharded. NoRecipeError: it is gone by then."""
        shard = self._whole.get(id(variable))
        if shard is None:
            return None
        is_small = variable.nbytes <= COPIED_BYTES
        if _torch.is_at_work(shard.group) and (variable.dim() > 1 or not is_small) and is_there(variable):
            value = self._in_place.get(id(variable))
            if value is None or value.before is not None or value.version != variable._version:
                value = self._in_place[id(variable)] = leaf_value(variable, variable._version)
                value.gathers, value.check = (shard.group,), self._checks[id(variable)]
            return value
        if not is_small:
            raise NoRecipeError("a sharded parameter that is not gathered when it is read")
        self.read.add(id(variable))
        return self._copy(variable)

    def of(self, tensor: Tensor) -> Tensor | None:
        """The sharded parameter in whose memory ``tensor`` lies; None: it lies in other memory."""
        if tensor.layout is not torch.strided or not self._memory:
            return None
        shard = self._memory.get(_torch.storage_address(tensor))
        return None if shard is None else shard.whole

    def anchor(self, tensor: Tensor) -> Value | None:
        """The same as `leaf`, for a tensor that may be such a parameter without its gradient, or a view of one."""
        whole = self.of(tensor)
        if whole is None:
            return None
        if (tensor.shape, tensor.stride(), tensor.dtype) != (whole.shape, whole.stride(), whole.dtype):
            raise NoRecipeError("a view of a sharded parameter")
        return self.leaf(whole)

    def are_at_work(self, groups: Iterable[Any]) -> bool:
        """Whether what is saved now is read while the parameters of ``groups`` are there."""
        return all(map(_torch.is_at_work, groups))

    def _copy(self, whole: Tensor) -> Value:
        value = self._copies.get(id(whole))
        if value is None or value.before is not None or value.source != whole._version:
            if not is_there(whole):
                raise NoRecipeError("a sharded parameter that is gone by now")
            value = self._copies[id(whole)] = Value("operand")
            value.keep(_torch.copy_unseen(whole.detach()))
            value.free, value.source = True, whole._version
        return value


# ------------------------------------------------------------------------------- has the optimizer changed a parameter?


class _Unchanged:
    """Raises an error if a shard was changed after forward: what is gathered then is not what forward has read.

    Some steps of optimizers move no version counter of a DTensor, so these are counted too.
    """

    __slots__ = ("part", "step", "versions")

    def __init__(self, part: Tensor) -> None:
        self.part, self.versions, self.step = part, _torch.shard_versions(part), _steps.count

    def has_changed(self) -> bool:
        """Whether it was."""
        if _torch.shard_versions(self.part) != self.versions:
            return True
        return self.step != _steps.count and _steps.hit(self.part, self.step)

    def __call__(self) -> None:
        if self.has_changed():
            raise ChangedError(
                f"a sharded parameter, {self.part.dtype} {list(self.part.shape)}, was changed between forward and "
                "backward, by an optimizer for instance, and a tensor that backward reads has to be rebuilt from it. "
                "To mend it, run backward before the change, or run this model plain: leangrad.plain(model)."
            )


class _Steps:
    """The steps that optimizers of this process have made, since the first sharded model ran lean."""

    def __init__(self) -> None:
        self.count = 0
        self._last: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._is_listening = False

    def listen(self) -> None:
        """Count from now on."""
        if not self._is_listening:
            self._is_listening = True
            register_optimizer_step_post_hook(self._count)

    def _count(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.count += 1
        self._last[optimizer] = self.count

    def hit(self, part: Tensor, since: int) -> bool:
        """Whether an optimizer that has ``part`` has made a step after ``since``."""
        return any(
            parameter is part
            for optimizer, last in list(self._last.items())
            if last > since
            for group in optimizer.param_groups
            for parameter in group["params"]
        )


_steps = _Steps()
listen = _steps.listen
