"""In-place changes: those that autograd does not record, and those of memory that recipes read.

A change that autograd did not record would make every recipe through that tensor wrong. So the tensor's node is marked
opaque, and ``trusted_from`` moves past all nodes made so far, because the change may have come through an alias. Before
any change, recorded or not, anchors in that memory that plain PyTorch would not have kept are copied to memory of their
own.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from leangrad import _torch
from leangrad.ledger.observe.active_region import open_region
from leangrad.ledger.observe.call_args import Handler, argument, constants_of, leave_note, notes_need
from leangrad.ledger.observe.function_mode import FunctionMode, ObservedRegion
from leangrad.ledger.origins.rules import PRODUCTS
from leangrad.ledger.values.cast import Anchor
from leangrad.ledger.values.node_metadata import NOTE, OPAQUE, VALUES
from leangrad.ledger.values.value import Value


def before_change(region: ObservedRegion, target: Any) -> None:
    """Copy the anchors in the memory of ``target`` that plain PyTorch would not have kept, before that memory changes.

    All other anchors in that memory are copied too if autograd will not record the change and other tensors may share
    the memory.

    target: tensor that is about to change in place, or a list or tuple of such tensors; anything else is ignored.
    """
    if isinstance(target, Tensor):
        target = _torch.unwrapped(target)
        for inner in _torch.wrapped_tensors(target):
            before_change(region, inner)
        unrecorded = not (target.requires_grad and is_grad_enabled())
        if unrecorded and is_private(target):
            return
        unrecorded = unrecorded or _is_part(region, target)
        node = None if unrecorded else _node_of(target)
        region.changes(-1 if node is None else node._sequence_nr())
        if node is None or VALUES[(target if target._base is None else target._base).output_nr] in node.metadata:
            region.needs_mode()  # a recipe may read what is there before the change
        if region.watched_parameters:
            base = target._base
            _move(region.watched_parameters.pop(id(target if base is None else base), ()))
        if unrecorded:
            _watch_all(region)
            region.rewritten[_memory_of(target)] = _torch.next_sequence_nr()
        if region.watched_memory:
            _move(region.watched_memory.pop(_memory_of(target), ()))
    elif isinstance(target, list | tuple):
        for t in target:
            before_change(region, t)


def report_change(tensor: Tensor | None) -> None:
    """Report that an autograd Function of leangrad will change ``tensor`` in place, unseen by the function mode."""
    region = open_region()
    if region is not None and tensor is not None:
        before_change(region, tensor)


def _move(anchors: Iterable[weakref.ref[Anchor]]) -> None:
    for ref in anchors:
        value = ref()
        if value is not None and value.tensor is not None:
            if value.tensor._version != value.version:  # a recorded change came first: reading raises an error
                continue
            tensor = _copy(value.tensor.detach())
            if type(value) is Value:
                if value.recipe_tensor is not None:
                    continue
                value.recipe_tensor = tensor
                if value.readers and value.plain_keeps_it:  # backward reads the changed tensor, as in plain PyTorch
                    continue
            value.tensor, value.version = tensor, tensor._version


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides.

    With other strides a sum may have other bits, and a fused kernel would read other addresses.
    """
    with _torch.unseen(), torch.inference_mode(False):  # an inference tensor has no version counter
        return _copy_strided(tensor)


def _copy_strided(tensor: Tensor) -> Tensor:
    copy = tensor.clone()
    if tensor.layout is not torch.strided or copy.stride() == tensor.stride() or tensor.is_conj() or tensor.is_neg():
        return copy
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,)).clone().as_strided(tensor.shape, tensor.stride()) if copy.numel() else copy


def _watch_all(region: ObservedRegion) -> None:
    """Watch all anchors by the address of their memory: a change through an alias may move no version counter."""
    watched = region.watched_memory
    refs: list[Any] = [*region.anchors]
    for some in region.watched_parameters.values():
        refs += some
    region.anchors.clear()
    region.watched_parameters.clear()
    for ref in refs:
        value = ref()
        if value is not None and value.tensor is not None:
            watched.setdefault(_memory_of(value.tensor), []).append(ref)


def after_change(region: ObservedRegion, target: Any) -> None:
    """Let no recipe rely on what was made before an in-place change of ``target`` that autograd did not record.

    target: tensor that was changed, or a list or tuple of such tensors; anything else is ignored.
    """
    if isinstance(target, list | tuple):
        for t in target:
            after_change(region, t)
    elif isinstance(target, Tensor) and not is_private(target := _torch.unwrapped(target)):
        node = _node_of(target)
        if node is not None:
            node.metadata[OPAQUE] = True
        region.distrust()


def is_private(tensor: Tensor) -> bool:
    """Whether no parameter and no tensor of the autograd graph can share the memory of ``tensor``."""
    if tensor.requires_grad:
        return False
    base = tensor._base
    return (base is None or not base.requires_grad) and not _torch.storage_is_shared(tensor)


def _concerns_no_recipe(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an in-place change of ``target`` concerns no recipe, as that of a counter of batches.

    Half of all in-place changes are of such counters. True if no gradient flows into ``target`` and no other tensor
    shares its memory; a tensor that a recipe reads is shared with the recipe.
    """
    if not isinstance(target, Tensor) or target.requires_grad:
        return False
    if _needs_gradient(args) or (kwargs and _needs_gradient(kwargs.values())):
        return False
    return is_private(_torch.unwrapped(target))


def _node_of(tensor: Any) -> Any:
    """Return the autograd node of a tensor, or of the base of a view; None if there is none.

    ``grad_fn`` of a view is never read: reading it may make autograd renew the view's node. A younger node runs earlier
    in backward, and gradients are then summed in another order.
    """
    if not isinstance(tensor, Tensor):
        return None
    owner = tensor._base
    return tensor.grad_fn if owner is None else owner.grad_fn


def _memory_of(tensor: Any) -> int:
    if isinstance(tensor, Tensor):
        tensor = _torch.unwrapped(tensor)
    strided = isinstance(tensor, Tensor) and tensor.layout is torch.strided
    return tensor.untyped_storage().data_ptr() if strided and not _torch.wrapped_tensors(tensor) else 0


def handle_data_set(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle ``x.data = y``: ``x`` gets other memory, and its version counter does not move."""
    before_change(mode.region, args[0])
    node = _node_of(args[0])
    if node is not None and not args[0]._is_view():
        node.metadata.pop(VALUES[args[0].output_nr], None)
    result = func(*args, **kwargs)
    after_change(mode.region, args[0])
    return result


@notes_need
def handle_alias(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle ``w.data`` and ``w.detach()``: a change may now come through an alias, so ``w`` is watched by memory."""
    anchors = mode.region.watched_parameters.pop(id(args[0]), None) if args else None
    if anchors is not None:
        mode.region.watched_memory.setdefault(_memory_of(args[0]), []).extend(anchors)
    return func(*args, **kwargs)


def handle_exposed_memory(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle calls that expose the memory of a tensor outside torch: it may then be written at any time, unseen."""
    if args and isinstance(args[0], Tensor) and not is_private(args[0]):
        before_change(mode.region, args[0])
        # FSDP of the first kind asks for the storage of parameters in each forward; no recipe reads these.
        is_made = _node_of(args[0]) is not None or not mode.region.sharded
        mode.region.distrust(sys.maxsize if is_made else None)
    return func(*args, **kwargs)


def handle_unsafe_split(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle a split whose parts lie in the memory of its input and are no views of it.

    Autograd records a change of a part for that part alone, and it moves no version of the input.
    """
    out = func(*args, **kwargs)
    memory = _memory_of(args[0] if args else kwargs.get("input", kwargs.get("tensor")))
    if memory:
        mode.region.split_memory.add(memory)
    return out


def _overlaps(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operand lies in the memory of ``target``, and so will be changed with it."""
    others = [a for a in (*args[1:], *kwargs.values()) if isinstance(a, Tensor)]
    return bool(others) and _memory_of(target) in map(_memory_of, others)


def _is_part(region: ObservedRegion, target: Any) -> bool:
    """Whether ``target`` is a part of an unsafe split, or that which was split: see `handle_unsafe_split`."""
    return bool(region.split_memory) and _memory_of(target) in region.split_memory


def _is_alias(target: Any) -> bool:
    """Whether ``target`` is no view that autograd knows, and yet shares its memory: ``x.data``, ``x.detach()``."""
    return isinstance(target, Tensor) and target._base is None and not is_private(_torch.unwrapped(target))


# The nodes of functions whose results are contiguous, except for the in-place form.
_CONTIGUOUS = "Cumprod Cumsum IndexAdd IndexCopy MaskedFill MaskedScatter Scatter ScatterAdd Tril Triu"
CONTIGUOUS = frozenset(f"{name}Backward{n}" for name in _CONTIGUOUS.split() for n in (0, 1))


def _has_own_strides(target: Any, node: Any) -> bool:
    """Whether a recipe would give ``target``, changed in place by ``node``, other strides; sums over it may differ."""
    return type(node).__name__ in CONTIGUOUS and isinstance(target, Tensor) and not target.is_contiguous()


def mutating(names: str = "", choose: str | None = None) -> Handler:
    """Return a handler for a function that changes its first argument in place.

    names: names of its arguments, if its node does not store constants; else empty.
    choose: name of the argument that says whether it changes its first argument; None if it always does.
    """
    names_ = tuple(names.split())

    @notes_need
    def handler(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if choose is not None and not argument(func, args, kwargs, choose):
            out = func(*args, **kwargs)
            if names_:
                leave_note(out, names_, args, kwargs)
            return out
        target = args[0] if args else next((kwargs[k] for k in ("input", "tensor", "self") if k in kwargs), None)
        if _concerns_no_recipe(target, args, kwargs):
            return func(*args, **kwargs)
        before_change(mode.region, target)
        overlaps = _overlaps(target, args, kwargs)
        note = constants_of(names_, args, kwargs) if names_ and not overlaps and _needs_gradient(args) else None
        before = _node_of(target)
        is_alias = before is None and _is_alias(target)
        mode.region.changing = target
        try:
            out = func(*args, **kwargs)
        finally:
            mode.region.changing = None
        node = _node_of(target)
        # Autograd did not record it, or only for an alias such as ``x.data``, or only for a part of an unsafe split.
        if node is before or is_alias or _is_part(mode.region, target):
            after_change(mode.region, target)
        elif (
            overlaps or _has_own_strides(target, node) or (mode.region.max_products and type(node).__name__ in PRODUCTS)
        ):
            # The strides of the tensor that a product is written into may have chosen its kernel.
            node.metadata[OPAQUE] = True
            mode.region.needs_mode()
        elif note is not None and isinstance(target, Tensor) and not target._is_view():
            node.metadata[NOTE] = note
        return out

    return handler


def _needs_gradient(args: Iterable[Any]) -> bool:
    if is_grad_enabled():
        for a in args:
            if isinstance(a, Tensor) and a.requires_grad:
                return True
    return False


def write_out(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle a call with ``out=``: autograd does not record it."""
    before_change(mode.region, kwargs["out"])
    result = func(*args, **kwargs)
    after_change(mode.region, kwargs["out"])
    return result
