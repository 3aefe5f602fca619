"""Saves the state that a run may change, and restores it."""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from leangrad.verify.comparison import difference
from leangrad.verify.generators import generator_restorer, global_restorer

__all__ = ["Memory"]

_DICTS = (dict, OrderedDict, defaultdict, Counter)


class Memory:
    """The state of a model, a batch and the random generators when this object is made; `restore` restores it.

    [Note: What is put back]
    These are saved and restored: all tensors (values, `requires_grad`, and which object `.grad` is); the attributes of
    modules, and the contents of dicts, lists, sets and deques among them, at any depth, so that a step counter, a cache
    or a running mean in a module is restored; generators of torch, NumPy and Python's `random` among them; and the
    global generators of torch (CPU and CUDA), Python and NumPy. State in objects of other classes, in closures or in
    files is not restored, because it may not be safe to copy. If it changes the numbers, the plain runs differ too, and
    `Verification.noise` shows it. A value is written back only if it changed, so that no tensor changes in a graph that
    the user still holds.
    """

    def __init__(self, *roots: object) -> None:
        self._seen: dict[int, object] = {}  # by id; holds the objects, so that no id is used again
        # Each tensor, a copy of its values, its `requires_grad` and its `.grad`.
        self._tensors: list[tuple[Tensor, Tensor, bool, Tensor | None]] = []
        self._put_back: list[Callable[[], None]] = []
        self._restore_generators = global_restorer()
        for root in roots:
            self._remember(root)

    def restore(self) -> None:
        """Restore everything that was saved."""
        for put_back in self._put_back:
            put_back()
        for tensor, value, requires_grad, grad in self._tensors:
            _restore_tensor(tensor, value, requires_grad, grad)
        self._restore_generators()

    def clear_gradients(self) -> None:
        """Set `.grad` of all saved tensors to None; `restore` restores them."""
        for tensor, _, _, _ in self._tensors:
            if tensor.is_leaf and tensor.grad is not None:
                tensor.grad = None

    def _remember(self, root: object) -> None:
        waiting = [root]  # a list, not recursion: a structure may be deeper than Python's stack
        while waiting:
            value = waiting.pop()
            if id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            if isinstance(value, Tensor):
                self._remember_tensor(value)
            elif (restorer := generator_restorer(value)) is not None:
                self._put_back.append(restorer)
            elif isinstance(value, nn.Module):
                waiting += [vars(value), *value.parameters(recurse=False), *value.buffers(recurse=False)]
            elif type(value) in _DICTS:
                self._put_back.append(_dict_restorer(value))  # type: ignore[arg-type]
                waiting += value.values()  # type: ignore[attr-defined]
            elif type(value) in (list, deque, set):
                self._put_back.append(_collection_restorer(value))
                waiting += value  # type: ignore[arg-type]
            elif isinstance(value, tuple):
                waiting += value

    def _remember_tensor(self, tensor: Tensor) -> None:
        if tensor.is_meta:
            return
        if tensor.is_nested:
            tensor = tensor.detach().values()  # the memory of all its parts, which may be changed in place
        grad = tensor.grad if tensor.is_leaf else None
        # Copied to the CPU, so that a model that fills its GPU can still be verified.
        self._tensors.append((tensor, tensor.detach().to("cpu", copy=True), tensor.requires_grad, grad))


def _restore_tensor(tensor: Tensor, value: Tensor, requires_grad: bool, grad: Tensor | None) -> None:
    with torch.no_grad():
        if tensor.shape != value.shape or tensor.dtype != value.dtype:
            tensor.data = value.to(tensor.device, copy=True)
        elif difference(value, tensor.detach().cpu()) is not None:
            tensor.copy_(value)
    if not tensor.is_leaf:
        return
    if tensor.requires_grad != requires_grad:
        tensor.requires_grad_(requires_grad)
    if tensor.grad is not grad:
        tensor.grad = grad


def _dict_restorer(value: dict[Any, Any]) -> Callable[[], None]:
    items = list(value.items())

    def restore() -> None:
        now = list(value.items())
        if len(now) != len(items) or any(a[0] is not b[0] or a[1] is not b[1] for a, b in zip(now, items, strict=True)):
            value.clear()
            for key, content in items:  # not update(): in a Counter it adds
                value[key] = content

    return restore


def _collection_restorer(value: Any) -> Callable[[], None]:
    items = list(value)

    def restore() -> None:
        now = list(value)
        if len(now) != len(items) or any(a is not b for a, b in zip(now, items, strict=True)):
            value.clear()
            (value.update if isinstance(value, set) else value.extend)(items)

    return restore
