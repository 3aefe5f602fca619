"""How the output of an activated batch norm that kept its input is rebuilt for others: recipes.

The output of such a layer is what the next convolution would keep as a second map. Inside `rebuilding()` it keeps a
recipe instead: the layer's input and vectors, one cheap pass away from the output.

[Note: chains] The output of a residual block rests on its input, which is the output of the block before, and so on:
the last one of a stage takes the whole stage to rebuild. What is made on the way is needed soon after, when backward
comes to those blocks. Held until then, each is made once; but held maps raise the peak, if backward has not released
as much before. So a session counts what its backward has released, and holds no more than that, less what comes to
stand in the same place: the gradients of all weights, and two maps, since maps grow on the way back. Where weights are
large or not known it holds a quarter.

[Note: outside the ledger] A region of the ledger around a converted model can do the same by `rule`, and was tried: a
step of ResNet-50 took 1.19 times as long on an H200 (39.9 ms for 33.6, all of it the host's), at 4.28 GiB for 4.21
(the last row of `versions_h200.json`). So a converted model that is not lean has these recipes of its own.
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
    only_saves_on_cpu,
    saved_tensor_hooks_active,
    version,
)
from leangrad.errors import ChangedError
from leangrad.ledger import MIN_BYTES, Ledger, Region
from leangrad.ledger.observe.active_region import open_region
from leangrad.ops import abn as ops
from leangrad.switch import disabled

__all__ = ["Recipe", "Session", "behind_hooks", "note_region", "rebuilding", "recipe_of"]

# A recipe may rest on the recipe of its residual, and so on. ResNet-50's longest chain is 6; see Recipe.
MAX_DEPTH = 8


class Session:
    """One `rebuilding()`: what its backward has released so far, and what is held for later; see [Note: chains]."""

    __slots__ = ("held_bytes", "meets_region", "model", "released_bytes")

    def __init__(self, model: nn.Module | None) -> None:
        self.model = model
        self.meets_region = False  # a part of the model is lean
        self.released_bytes = 0
        self.held_bytes = 0

    @staticmethod
    def here() -> Session | None:
        """The session whose hooks are the innermost ones: only those see what is saved."""
        owner = getattr(innermost_pack_hook(), "__self__", None)
        return owner if isinstance(owner, Session) else None

    def pack(self, t: Tensor) -> Recipe | tuple[Tensor, int]:
        """What autograd keeps in the place of `t`."""
        recipe = recipe_of(t)
        if recipe is None:
            return t.detach(), version(t)  # detached: a node that keeps its own output must not keep itself alive
        recipe.readers += 1
        return recipe

    def may_hold(self, n_bytes: int) -> bool:
        """Whether so much more may be held."""
        room = self.released_bytes // 4
        if self.model is not None:
            room = max(room, self.released_bytes - _gradient_bytes(self.model) - 2 * n_bytes)
        return self.held_bytes + n_bytes <= room


_gradient_bytes_of: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def _gradient_bytes(model: nn.Module) -> int:
    """The bytes of all gradients, counted once: a guess that is good enough, for it only decides what is held."""
    if model not in _gradient_bytes_of:
        _gradient_bytes_of[model] = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return _gradient_bytes_of[model]


class Recipe:
    """How to make a layer's output again: its kept input, its vectors, and its residual (a tensor or another recipe).

    The bits are those of the forward. A rebuilt map is held until its last reader has read it, so an output with two
    consumers is rebuilt once. A recipe deeper than MAX_DEPTH is not made: that output is kept, and ends the chain.
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
        self.layer: Any = None  # the kernels of the forward, if there were any
        self.vectors, self.activation, self.session = vectors, activation, session
        self.residual = residual
        self.residual_version = version(residual) if isinstance(residual, Tensor) else 0
        self.depth: int = 1 + (residual.depth if isinstance(residual, Recipe) else 0)
        self.readers = 0
        self.value: Tensor | None = None
        self.held_bytes = 0  # what the session counts for `value`

    @staticmethod
    def of(
        x: Tensor, vectors: Tensor, residual: Tensor | None, z: Tensor, activation: ops.Activation, layer: Any
    ) -> Recipe | None:
        """A recipe for z, or None where the chain would become too deep, or nobody would ask for it."""
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
            source.readers += 1  # the layer's own backward; see `inputs`
        return recipe

    def inputs(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The vectors, the input, and the residual, if the activation's derivative needs that."""
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
        """The output, for one of the readers that packed it."""
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
        """The output, in a buffer of its own."""
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
        """The output, and again the output if it may be overwritten: if it is not held for its own readers."""
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
    """The recipe of a tensor that is an unchanged output of ABNFunction."""
    node: Any = t.grad_fn
    if type(node) is HOOK_NODE:  # a module's backward hooks, which hand on what they were given
        node = behind_hooks(node, t.output_nr)
    recipe = getattr(node, "recipe", None)
    return recipe if isinstance(recipe, Recipe) and version(t) == recipe.z_version else None


def behind_hooks(node: Any, nr: int) -> Any:
    """The node that made output `nr` of `node`, where that is only a module's backward hooks."""
    while type(node) is HOOK_NODE:
        node, nr = node.next_functions[nr]
    return node


@contextmanager
def rebuilding(model: nn.Module | None = None) -> Iterator[None]:
    """Inside, whatever would keep the output of an activated batch norm keeps a recipe for it instead.

    `model` is what is run inside; how large its weights are says how much may be held in backward. See [Note: chains].
    Does nothing where other saved-tensor hooks are in force (offloading from a GPU), inside a ledger's region, which
    rebuilds these outputs itself (`rule.py`), and under torch.compile. Inside `torch.utils.checkpoint` the model is
    run in such a region, as a lean model is there; so is a model of which a part is lean, from its second step on: a
    region of that part would keep what flows through.

    >>> from leangrad.nn.abn import ABN
    >>> abn, conv = ABN(4, activation="relu"), torch.nn.Conv2d(4, 4, 1)
    >>> with rebuilding():
    ...     y = conv(abn(torch.randn(2, 4, 8, 8, requires_grad=True)))
    >>> y.sum().backward()  # the convolution's input is rebuilt here
    """
    if torch.compiler.is_compiling() or disabled() or open_region() is not None:
        yield
        return
    others = _others_save(model)
    if others or (model is not None and model in _partly_lean):
        region = None if model is None else _region_of(model, others)
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
    """Whether there are hooks of others that want what is saved: those of `save_on_cpu` do not, if it is there."""
    if not saved_tensor_hooks_active():
        return False
    parameter = None if model is None else next(model.parameters(), None)
    return parameter is None or not parameter.is_cpu or not only_saves_on_cpu()


_sessions = threading.local()
_partly_lean: WeakSet[nn.Module] = WeakSet()
_ledgers: WeakKeyDictionary[nn.Module, Ledger] = WeakKeyDictionary()  # of models that run in a region as a whole


def _region_of(model: nn.Module, others: bool) -> Region | None:
    """The region of a model inside hooks of `others`, or of which a part is lean; None if no part is so any more."""
    if not others and not any(isinstance(getattr(h, "ledger", None), Ledger) for h in _pre_hooks(model)):
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
    """An activated batch norm runs inside a ledger's region, maybe that of a part of a model that is being rebuilt."""
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
