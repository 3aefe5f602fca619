"""Changes in place: what autograd does not record, and what would change under a recipe.

A change that autograd did not record would make every recipe through that tensor wrong. The node is marked opaque, and
everything made so far is fenced off, because the change may have come through an alias. Before any change, recorded or
not, anchors that plain PyTorch would not have kept move to memory of their own.
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
from leangrad.ledger.observe.call_args import Handler, argument, constants_of, leave_note
from leangrad.ledger.observe.function_mode import FunctionMode, ObservedRegion
from leangrad.ledger.origins.rules import PRODUCTS
from leangrad.ledger.values.cast import Anchor
from leangrad.ledger.values.node_metadata import NOTE, OPAQUE, VALUES
from leangrad.ledger.values.value import Value


def before_change(book: ObservedRegion, target: Any) -> None:
    """Anchors that plain PyTorch would not have kept move to memory of their own before it changes.

    So do all others where autograd will not record the change, if the memory has other names than ``target``.
    """
    if isinstance(target, Tensor):
        for inner in _torch.wrapped_tensors(target):
            before_change(book, inner)
        unrecorded = not (target.requires_grad and is_grad_enabled())
        if unrecorded and is_private(target):
            return
        node = None if unrecorded else _node_of(target)
        book.changes(-1 if node is None else node._sequence_nr())
        if book.watched_parameters:
            base = target._base
            _move(book.watched_parameters.pop(id(target if base is None else base), ()))
        if unrecorded:
            _watch_all(book)
            book.rewritten[_memory_of(target)] = _torch.next_sequence_nr()
        if book.watched_memory:
            _move(book.watched_memory.pop(_memory_of(target), ()))
    elif isinstance(target, list | tuple):
        for t in target:
            before_change(book, t)


def tell(tensor: Tensor | None) -> None:
    """A Function of ours is about to change ``tensor`` in place, where the function override does not see it."""
    region = open_region()
    if region is not None and tensor is not None:
        before_change(region, tensor)


def _move(anchors: Iterable[weakref.ref[Anchor]]) -> None:
    for ref in anchors:
        value = ref()
        if value is not None and value.tensor is not None:
            if value.tensor._version != value.version:  # too late: a recorded change came first, and reading it raises
                continue
            tensor = _copy(value.tensor.detach())
            if type(value) is Value:
                if value.before is not None:
                    continue
                value.before = tensor
                if value.readers:  # plain hands out what has become of it
                    continue
            value.tensor, value.version = tensor, tensor._version


def _copy(tensor: Tensor) -> Tensor:
    """A copy with the same strides: over others a sum may have other bits, and a fused kernel reads other places."""
    with _torch.unseen():
        return _copy_strided(tensor)


def _copy_strided(tensor: Tensor) -> Tensor:
    copy = tensor.clone()
    if tensor.layout is not torch.strided or copy.stride() == tensor.stride() or tensor.is_conj() or tensor.is_neg():
        return copy
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,)).clone().as_strided(tensor.shape, tensor.stride()) if copy.numel() else copy


def _watch_all(book: ObservedRegion) -> None:
    """Watch the memory of whatever recipes read: no version tells of a change through an alias."""
    watched = book.watched_memory
    refs: list[Any] = [*book.anchors]
    for some in book.watched_parameters.values():
        refs += some
    book.anchors.clear()
    book.watched_parameters.clear()
    for ref in refs:
        value = ref()
        if value is not None and value.tensor is not None:
            watched.setdefault(_memory_of(value.tensor), []).append(ref)


def after_change(book: ObservedRegion, target: Any) -> None:
    """``target`` was changed in place and autograd did not record it: what was made so far may not be what it was."""
    if isinstance(target, list | tuple):
        for t in target:
            after_change(book, t)
    elif isinstance(target, Tensor) and not is_private(target):
        node = _node_of(target)
        if node is not None:
            node.metadata[OPAQUE] = True
        book.fence = _torch.next_sequence_nr()


def is_private(tensor: Tensor) -> bool:
    """Whether no parameter and no tensor of the graph can lie in this memory."""
    if tensor.requires_grad:
        return False
    base = tensor._base
    return (base is None or not base.requires_grad) and not _torch.storage_is_shared(tensor)


def _is_nobodys(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a change of ``target`` concerns no recipe: a counter of batches, which half of all changes are.

    No gradient flows into it, and nobody else sees its memory; what a recipe reads is seen by the recipe.
    """
    if not isinstance(target, Tensor) or target.requires_grad:
        return False
    if _needs_gradient(args) or (kwargs and _needs_gradient(kwargs.values())):
        return False
    return is_private(target)


def _node_of(tensor: Any) -> Any:
    """The node of a tensor, or of the base of a view.

    A view is never asked: autograd renews its node when somebody does, a younger node runs earlier in backward, and
    gradients are then summed in another order.
    """
    if not isinstance(tensor, Tensor):
        return None
    owner = tensor._base
    return tensor.grad_fn if owner is None else owner.grad_fn


def _memory_of(tensor: Any) -> int:
    strided = isinstance(tensor, Tensor) and tensor.layout is torch.strided
    return tensor.untyped_storage().data_ptr() if strided and not _torch.wrapped_tensors(tensor) else 0


def swapped(notes: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x.data = y``: other memory, and no new version."""
    before_change(notes.book, args[0])
    node = _node_of(args[0])
    if node is not None and not args[0]._is_view():
        node.metadata.pop(VALUES[args[0].output_nr], None)
    result = func(*args, **kwargs)
    after_change(notes.book, args[0])
    return result


def aliased(notes: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``w.data`` and ``w.detach()``: from now on a change may come from elsewhere, so the memory is watched itself."""
    anchors = notes.book.watched_parameters.pop(id(args[0]), None) if args else None
    if anchors is not None:
        notes.book.watched_memory.setdefault(_memory_of(args[0]), []).extend(anchors)
    return func(*args, **kwargs)


def leaked(notes: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The bare memory of a tensor leaves torch: it may be written at any time, and nobody will tell."""
    if args and isinstance(args[0], Tensor) and not is_private(args[0]):
        before_change(notes.book, args[0])
        notes.book.fence = sys.maxsize
    return func(*args, **kwargs)


def _overlaps(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operand lies in the memory of the tensor that is about to change: it is not what it was afterwards."""
    others = [a for a in (*args[1:], *kwargs.values()) if isinstance(a, Tensor)]
    return bool(others) and _memory_of(target) in map(_memory_of, others)


# The nodes of functions whose results are contiguous, but for the form that writes into its input.
_CONTIGUOUS = "Cumprod Cumsum IndexAdd IndexCopy MaskedFill MaskedScatter Scatter ScatterAdd Tril Triu"
CONTIGUOUS = frozenset(f"{name}Backward{n}" for name in _CONTIGUOUS.split() for n in (0, 1))


def _has_own_strides(target: Any, node: Any) -> bool:
    """Whether ``target``, changed by ``node``, has other strides than a recipe would give it: a sum may differ."""
    return type(node).__name__ in CONTIGUOUS and isinstance(target, Tensor) and not target.is_contiguous()


def mutating(names: str = "", choose: str | None = None) -> Handler:
    """A function that changes its first argument; always, or where its argument ``choose`` says so.

    ``names``: its arguments, if its node forgets their constants.
    """
    names_ = tuple(names.split())

    def handler(notes: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if choose is not None and not argument(func, args, kwargs, choose):
            out = func(*args, **kwargs)
            if names_:
                leave_note(out, names_, args, kwargs)
            return out
        target = args[0] if args else next((kwargs[k] for k in ("input", "tensor", "self") if k in kwargs), None)
        if _is_nobodys(target, args, kwargs):
            return func(*args, **kwargs)
        before_change(notes.book, target)
        overlaps = _overlaps(target, args, kwargs)
        note = constants_of(names_, args, kwargs) if names_ and not overlaps and _needs_gradient(args) else None
        before = _node_of(target)
        notes.book.changing = target
        try:
            out = func(*args, **kwargs)
        finally:
            notes.book.changing = None
        node = _node_of(target)
        if node is before:  # autograd did not record it
            after_change(notes.book, target)
        elif (
            overlaps or _has_own_strides(target, node) or (notes.book.max_products and type(node).__name__ in PRODUCTS)
        ):
            # A product that was written into a tensor may have gone by a kernel for the strides of that one.
            node.metadata[OPAQUE] = True
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


def write_out(notes: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function with ``out=``: autograd records none of these."""
    before_change(notes.book, kwargs["out"])
    result = func(*args, **kwargs)
    after_change(notes.book, kwargs["out"])
    return result
