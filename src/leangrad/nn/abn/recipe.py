"""Recipes that rebuild the output of an activated batch norm that kept its input, for the ops that read the output.

The next convolution would keep the output of such a layer as a second map. Inside `rebuilding()` it keeps a recipe
instead: the layer's input and vectors, from which one cheap pass computes the output.

[Note: chains] The output of a residual block depends on the block's input, which is the output of the block before, and
so on: to rebuild the last output of a stage, the outputs of the whole stage have to be rebuilt. Backward reads the
other ones soon after, when it reaches their blocks. If they are held until then, each is rebuilt only once. But held
maps raise the peak, unless backward has released as many bytes before. So a session counts the bytes that its backward
has released, and holds at most that many, less those that are allocated in their place: the gradients of all weights,
and two maps, since maps grow towards the front of a network. If the weights are large or not known, it holds at most a
quarter of the released bytes.

[Note: outside the ledger] A ledger's region around a converted model can do the same by `rule`. That was measured: a
step of ResNet-50 on an H200 took 1.19 times as long (39.9 instead of 33.6 ms, and the difference is host time), at a
peak of 4.28 instead of 4.21 GiB (the last row of `versions_h200.json`). So a converted model that is not lean uses the
recipes of this file.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from leangrad._torch import (
    HOOK_NODE,
    forward_pre_hooks,
    innermost_pack_hook,
    is_checkpointing,
    is_traced,
    only_saves_on_cpu,
    saved_tensor_hooks_active,
    transforms_active,
    version,
)
from leangrad.errors import ChangedError
from leangrad.ledger import MIN_BYTES, Ledger, Region
from leangrad.ledger.observe.active_region import open_region
from leangrad.ops import abn as ops
from leangrad.switch import disabled

__all__ = ["Recipe", "Session", "behind_hooks", "note_region", "rebuilding", "recipe_of"]

# Longest chain of recipes, each the residual of the next one; see `Recipe`. The longest chain of ResNet-50 is 6.
MAX_DEPTH = 8


class Session:
    """The state of one `rebuilding()`: the bytes that its backward has released, and those held; see [Note: chains]."""

    __slots__ = ("held_bytes", "meets_region", "model", "released_bytes")

    def __init__(self, model: nn.Module | None) -> None:
        self.model = model
        self.meets_region = False  # a layer ran inside a ledger's region: a part of the model is lean
        self.released_bytes = 0  # of inputs whose recipes backward has dropped
        self.held_bytes = 0  # of rebuilt maps that are held for later readers

    @staticmethod
    def here() -> Session | None:
        """Returns the session whose hooks are the innermost ones, or None; only innermost hooks see saved tensors."""
        owner = getattr(innermost_pack_hook(), "__self__", None)
        return owner if isinstance(owner, Session) else None

    def pack(self, t: Tensor) -> Recipe | tuple[Tensor, int]:
        """The pack hook: returns the recipe of `t`, or else `t`, detached, and its version."""
        recipe = recipe_of(t)
        if recipe is None:
            return t.detach(), version(t)  # detached: a node that saves its own output must not keep itself alive
        recipe.readers += 1
        return recipe

    def may_hold(self, n_bytes: int) -> bool:
        """Whether `n_bytes` more may be held for later readers; see [Note: chains]."""
        room = self.released_bytes // 4
        if self.model is not None:
            room = max(room, self.released_bytes - _gradient_bytes(self.model) - 2 * n_bytes)
        return self.held_bytes + n_bytes <= room


_gradient_bytes_of: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def _gradient_bytes(model: nn.Module) -> int:
    """Returns the bytes of all gradients, counted once per model. An estimate suffices: it only limits what is held."""
    if model not in _gradient_bytes_of:
        _gradient_bytes_of[model] = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return _gradient_bytes_of[model]


class Recipe:
    """How to rebuild a layer's output: its kept input, its vectors, and its residual (a tensor or another recipe).

    The rebuilt output has the bits of the forward. It is held until its last reader has read it, so an output with two
    consumers is rebuilt once. No recipe is made with a chain longer than MAX_DEPTH: that output is kept, and so ends
    the chain.
    """

    __slots__ = (
        "activation", "depth", "held_bytes", "layer", "readers", "residual", "residual_version", "session", "value",
        "vectors", "x", "x_version", "z_version",
    )  # fmt: skip

    def __init__(
        self, x: Tensor, vectors: Tensor, residual: Tensor | Recipe | None, activation: ops.Activation, session: Session
    ) -> None:
        self.x, self.x_version = x.detach(), version(x)
        self.z_version = 0
        self.layer: Any = None  # the kernels of the forward; None: `ops` ran it
        self.vectors, self.activation, self.session = vectors, activation, session
        self.residual = residual
        self.residual_version = version(residual) if isinstance(residual, Tensor) else 0
        self.depth: int = 1 + (residual.depth if isinstance(residual, Recipe) else 0)
        self.readers = 0  # reads to come: one per pack, and one by each layer that added the output as its residual
        self.value: Tensor | None = None  # the rebuilt output, while it is held
        self.held_bytes = 0  # bytes that the session counts for `value`

    @staticmethod
    def of(
        x: Tensor, vectors: Tensor, residual: Tensor | None, z: Tensor, activation: ops.Activation, layer: Any
    ) -> Recipe | None:
        """Returns a recipe for z; None if no session's hooks are the innermost ones, or the chain would be too long."""
        session = Session.here()
        if session is None:
            return None
        source: Tensor | Recipe | None = residual
        if residual is not None:
            source = recipe_of(residual) or residual.detach()
        recipe = Recipe(x, vectors, source, activation, session)
        recipe.z_version, recipe.layer = version(z), layer
        if recipe.depth > MAX_DEPTH:
            return None
        if isinstance(source, Recipe) and activation.name != "identity":
            source.readers += 1  # the layer's own backward reads it, in `inputs`
        return recipe

    def inputs(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the vectors, the input, and the residual; None for a residual that the derivative does not need."""
        if version(self.x) != self.x_version:
            raise _changed(self.x, "the input of an activated batch norm")
        if self.activation.name == "identity" or self.residual is None:
            return self.vectors, self.x, None
        if isinstance(self.residual, Recipe):
            return self.vectors, self.x, self.residual.read()
        if version(self.residual) != self.residual_version:
            raise _changed(self.residual, "the residual of an activated batch norm")
        return self.vectors, self.x, self.residual

    def read(self) -> Tensor:
        """Returns the output, for one of its readers; rebuilds it if it is not held."""
        z = self.rebuild() if self.value is None else self.value
        self.readers -= 1
        if self.readers > 0:
            self.value = z
        else:
            self.value = None
            self.session.held_bytes -= self.held_bytes
            self.held_bytes = 0
        return z

    def rebuild(self) -> Tensor:
        """Returns the output, rebuilt in a buffer that nothing else uses."""
        if version(self.x) != self.x_version:
            raise _changed(self.x, "the input of an activated batch norm")
        residual, out = self.residual, None
        if isinstance(residual, Recipe):
            residual, out = residual.lend()
        elif residual is not None and version(residual) != self.residual_version:
            raise _changed(residual, "the residual of an activated batch norm")
        out = torch.empty_like(self.x) if out is None else out
        if self.layer is not None:
            self.layer.normalize(self.x, self.vectors, residual, out)
            return out
        with torch.no_grad():
            return ops.normalize(self.x, self.vectors, self.activation, residual=residual, out=out)

    def lend(self) -> tuple[Tensor, Tensor | None]:
        """Returns the output, and a buffer to overwrite: the output again, or None if its own readers still need it."""
        if self.value is not None:
            return self.value, None
        size = self.x.nbytes
        if self.readers <= 0 or not self.session.may_hold(size):
            z = self.rebuild()
            return z, z
        self.held_bytes = size
        self.session.held_bytes += size
        self.value = self.rebuild()
        return self.value, None


def recipe_of(t: Tensor) -> Recipe | None:
    """Returns the recipe of `t`; None unless `t` is an unchanged output of `ABNFunction` that has one."""
    node: Any = t.grad_fn
    if type(node) is HOOK_NODE:  # the node of a module's backward hooks, whose outputs are its inputs
        node = behind_hooks(node, t.output_nr)
    recipe = getattr(node, "recipe", None)
    return recipe if isinstance(recipe, Recipe) and version(t) == recipe.z_version else None


def behind_hooks(node: Any, nr: int) -> Any:
    """Returns the node that made output `nr` of `node`, skipping nodes of modules' backward hooks."""
    while type(node) is HOOK_NODE:
        node, nr = node.next_functions[nr]
    return node


@contextmanager
def rebuilding(model: nn.Module | None = None, *, in_region: bool = False) -> Iterator[None]:
    """Let every op inside that saves the output of an activated batch norm keep a recipe for it instead.

    model: the model that runs inside. The size of its weights limits how much may be held in backward: [Note: chains].

    Does nothing if other saved-tensor hooks are in force (offloading from a GPU), inside a ledger's region, which
    rebuilds these outputs itself (`rule.py`), under torch.compile, and with `LEANGRAD_DISABLE=1`. In three cases the
    model runs in a ledger's region instead: with `in_region`, because its code may write to tensors past their version
    counters, which a recipe would not notice; inside `torch.utils.checkpoint`, as a lean model does there; and, if a
    part of it is lean, from its second step on, because the region of that part alone would keep the tensors that pass
    through it.

    >>> from leangrad.nn.abn import ABN
    >>> abn, conv = ABN(4, activation="relu"), torch.nn.Conv2d(4, 4, 1)
    >>> with rebuilding():
    ...     y = conv(abn(torch.randn(2, 4, 8, 8, requires_grad=True)))
    >>> y.sum().backward()  # the convolution's input is rebuilt here
    """
    watched = is_traced() or transforms_active() or torch.is_inference_mode_enabled()
    if watched or disabled() or open_region() is not None:
        yield
        return
    others = _others_save(model)
    if others or in_region or (model is not None and model in _partly_lean):
        region = None if model is None else _region_of(model, others, in_region)
        if region is not None:
            with region:
                yield
            return
    if others:
        yield
        return
    session = Session(model)
    _sessions.innermost, outer = session, getattr(_sessions, "innermost", None)
    try:
        with torch.autograd.graph.saved_tensors_hooks(session.pack, _unpack):
            yield
    finally:
        _sessions.innermost = outer
    if session.meets_region and model is not None:
        _partly_lean.add(model)


def _others_save(model: nn.Module | None) -> bool:
    """Whether hooks of others handle saved tensors; those of `save_on_cpu` do nothing if the model is on the CPU."""
    if not saved_tensor_hooks_active():
        return False
    parameter = None if model is None else next(model.parameters(), None)
    return parameter is None or not parameter.is_cpu or not only_saves_on_cpu()


_sessions = threading.local()  # `innermost`: the session that is open in this thread
_partly_lean: WeakSet[nn.Module] = WeakSet()  # models of which a part was lean when they last ran
_ledgers: WeakKeyDictionary[nn.Module, Ledger] = WeakKeyDictionary()  # of models that run in a region as a whole


def _region_of(model: nn.Module, others: bool, always: bool) -> Region | None:
    """Returns the region for a model inside a checkpoint, or for one of which a part is still lean; else None.

    others: saved-tensor hooks of others are in force; these must then be those of a checkpoint. always: the model runs
        in a region if no others are.
    """
    if not others and not always and not any(isinstance(getattr(h, "ledger", None), Ledger) for h in _pre_hooks(model)):
        _partly_lean.discard(model)
        return None
    if others and not is_checkpointing():
        return None
    ledger = _ledgers.get(model)
    if ledger is None:
        ledger = _ledgers[model] = Ledger(residual_depth="auto", min_bytes=MIN_BYTES)
    return ledger.region(model)


def _pre_hooks(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        yield from forward_pre_hooks(module)


def note_region() -> None:
    """Note that a layer runs inside a ledger's region: if a session is open too, a part of its model is lean."""
    session: Session | None = getattr(_sessions, "innermost", None)
    if session is not None:
        session.meets_region = True


def _unpack(packed: Recipe | tuple[Tensor, int]) -> Tensor:
    if isinstance(packed, Recipe):
        return packed.read()
    t, at_pack = packed
    if version(t) != at_pack:
        raise _changed(t, "a tensor that backward needs")
    return t


def _changed(t: Tensor, what: str) -> ChangedError:
    return ChangedError(
        f"{what}, of shape {tuple(t.shape)} and {t.dtype}, was changed in place after it was kept; "
        "write the change out of place, or clone the tensor before it"
    )
