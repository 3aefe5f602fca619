"""How recipes read parameters that FSDP2 shards: in place, or from a copy.

[Note: recipes that read sharded parameters]
FSDP2 gathers the parameters of a module before its forward and frees them after it. In backward it gathers them when
the gradient of the module's output arrives, and frees them when the gradient of its input is computed. The gathered
parameter is the same tensor in all steps; its memory is allocated and freed without a change of its version counter. So
a recipe reads it in one of two ways.

A copy       Used for a vector of up to ``COPIED_BYTES`` (the weight of a norm, a scale, a bias), and made while the
             module's forward runs. Backward of a linear layer reads the output of the norm before it. That norm may
             belong to another module, such as the block before, whose parameters are not gathered at that time. The
             copy stays what forward has read, whatever happens to the shards.
In place     Used for all others, if the rebuilt tensor is saved while the forward of the parameter's own module runs:
             the node that saves it then runs in the backward of that module, while the parameter is gathered. The value
             lists the parameter groups that have to be gathered for it (``Value.gathers``). When it is read, the
             parameter has to be gathered, and the optimizer must not have changed it since forward. A tensor that is
             saved elsewhere is rebuilt from a copy of the parameter if that is small, and kept otherwise.
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

COPIED_BYTES = 64 * 1024  # parameters and unsaved inputs up to this size are copied


class Shards:
    """The sharded parameters of one region that were gathered so far."""

    def __init__(self, wanted: set[int] | None) -> None:
        """``wanted``: ids of the parameters of which recipes of earlier steps read a copy; None: not known yet."""
        self.read: set[int] = set()  # ids of the parameters of which recipes of this region read a copy
        self._wanted = wanted
        # By the id of the gathered parameter, which FSDP2 holds: the shard; by the address of its storage: the same.
        self._whole: dict[int, Shard] = {}
        self._memory: dict[int, Shard] = {}
        # By the id of the gathered parameter: the value of its copy, its value in place, and the check for changes.
        self._copies: dict[int, Value] = {}
        self._in_place: dict[int, Value] = {}
        self._checks: dict[int, _Unchanged] = {}

    def gathered(self, shards: Iterable[Shard]) -> bool:
        """Note the parameters that FSDP2 has gathered now, and copy the small ones before it frees them.

        Returns whether one of them has changed since it was gathered before in this region: then no recipe may read
        outputs of nodes that were made before this.
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
        """Whether ``variable`` is a sharded parameter that was gathered in this region."""
        return id(variable) in self._whole

    def leaf(self, variable: Tensor) -> Value | None:
        """Returns the value by which a recipe reads the parameter ``variable``; None: it is not sharded.

        Raises NoRecipeError if the parameter will not be gathered when the recipe runs.
        """
        shard = self._whole.get(id(variable))
        if shard is None:
            return None
        is_small = variable.nbytes <= COPIED_BYTES
        if _torch.is_at_work(shard.group) and (variable.dim() > 1 or not is_small) and is_there(variable):
            value = self._in_place.get(id(variable))
            if value is None or value.recipe_tensor is not None or value.version != variable._version:
                value = self._in_place[id(variable)] = leaf_value(variable, variable._version)
                value.gathers, value.check = (shard.group,), self._checks[id(variable)]
            return value
        if not is_small:
            raise NoRecipeError("a sharded parameter that is not gathered when it is read")
        self.read.add(id(variable))
        return self._copy(variable)

    def of(self, tensor: Tensor) -> Tensor | None:
        """Returns the gathered parameter in whose memory ``tensor`` lies; None: it lies in other memory."""
        if tensor.layout is not torch.strided or not self._memory:
            return None
        shard = self._memory.get(_torch.storage_address(tensor))
        return None if shard is None else shard.whole

    def anchor(self, tensor: Tensor) -> Value | None:
        """Returns what `leaf` does, for a ``tensor`` that may be a detached sharded parameter; None: it is none.

        Raises NoRecipeError if it is a view of one, with another shape, strides or dtype.
        """
        whole = self.of(tensor)
        if whole is None:
            return None
        if (tensor.shape, tensor.stride(), tensor.dtype) != (whole.shape, whole.stride(), whole.dtype):
            raise NoRecipeError("a view of a sharded parameter")
        return self.leaf(whole)

    def are_at_work(self, groups: Iterable[Any]) -> bool:
        """Whether a tensor that is saved now is read in backward while the parameters of ``groups`` are gathered."""
        return all(map(_torch.is_at_work, groups))

    def _copy(self, whole: Tensor) -> Value:
        value = self._copies.get(id(whole))
        if value is None or value.recipe_tensor is not None or value.copied_version != whole._version:
            if not is_there(whole):
                raise NoRecipeError("a sharded parameter that is gone by now")
            value = self._copies[id(whole)] = Value("operand")
            value.keep(_torch.copy_unseen(whole.detach()))
            value.free, value.copied_version = True, whole._version
        return value


# ------------------------------------------------------------------------------- has the optimizer changed a parameter?


class _Unchanged:
    """Called in backward: raises an error if a shard was changed since it was gathered in forward.

    The parameter that backward gathers is then not the one that forward has read. The step of some optimizers changes
    no version counter of a DTensor, so the steps of optimizers are counted too.
    """

    __slots__ = ("part", "step", "versions")

    def __init__(self, part: Tensor) -> None:
        self.part, self.versions, self.step = part, _torch.shard_versions(part), _steps.count

    def has_changed(self) -> bool:
        """Whether the shard was changed since this object was made."""
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
    """Counts the steps of all optimizers of this process, from the first sharded model that ran lean."""

    def __init__(self) -> None:
        self.count = 0
        self._last: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._is_listening = False

    def listen(self) -> None:
        """Begin to count, if this is the first call."""
        if not self._is_listening:
            self._is_listening = True
            register_optimizer_step_post_hook(self._count)

    def _count(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.count += 1
        self._last[optimizer] = self.count

    def hit(self, part: Tensor, since: int) -> bool:
        """Whether an optimizer with the parameter ``part`` has made a step after the count was ``since``."""
        return any(
            parameter is part
            for optimizer, last in list(self._last.items())
            if last > since
            for group in optimizer.param_groups
            for parameter in group["params"]
        )


_steps = _Steps()
listen = _steps.listen
