"""What a tensor and its memory do not tell in public: who holds them, versions, views; kernels without public names."""

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

_P = ParamSpec("_P")
_T = TypeVar("_T")


def called_through_c(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """`function` as a `functools.partial`, so that a call holds its arguments equally often whoever evaluates frames.

    Python hands arguments over from frame to frame. Any other evaluator of frames is called from C, which holds them
    once more; and while a compiled function runs in any thread, Dynamo evaluates the frames of all of them (after a
    compile that raised, for the rest of the process: torch 2.13). A `partial` is called through C in both states.
    """
    return functools.update_wrapper(functools.partial(function), function)


def is_python_evaluating() -> bool:
    """Whether Python itself evaluates frames: it then hands an argument over, where all others hold it once more."""
    held = object()
    return _held(held) < _held_through_c(held)


def _held(one: object) -> int:
    return sys.getrefcount(one)


_held_through_c = called_through_c(_held)


@called_through_c
def reference_counts(tensor: Tensor) -> tuple[int, ...] | None:
    """Every count of who can see `tensor`: C++ and Python holders of it, of its storage and of its base; or None.

    The numbers include this call's own references, so they mean something only next to numbers that were taken by
    the same chain of calls.
    """
    try:
        storage, base = tensor.untyped_storage(), tensor._base
        counts = (
            tensor._use_count(),  # type: ignore[attr-defined]
            sys.getrefcount(tensor),
            weakref.getweakrefcount(tensor),
            torch._C._storage_Use_Count(storage._cdata),
            sys.getrefcount(storage),
        )
        if base is None:
            return counts
        return (*counts, base._use_count(), sys.getrefcount(base))  # type: ignore[attr-defined]
    except (AttributeError, NotImplementedError, RuntimeError):
        return None


_HALF, _BYTE = torch.zeros((), dtype=torch.float16, device="cpu"), torch.zeros((), dtype=torch.int8, device="cpu")


def is_number(tensor: Tensor) -> bool:
    """Whether a tensor is a Python number that torch wrapped for an op: unlike a tensor's, its dtype gives way."""
    if tensor.dim() or not tensor.is_cpu:
        return False
    other = _HALF if tensor.dtype is torch.float64 else _BYTE if tensor.dtype is torch.int64 else None
    return other is not None and torch.result_type(other, tensor) is other.dtype


def softmax_backward(g: Tensor, y: Tensor) -> Tensor:
    """The gradient of the input of `y = torch.softmax(x, -1)`, differentiable; in float32 or better where torch can."""
    backward = getattr(torch, "_softmax_backward_data", None)
    if backward is None:
        return y * (g - (g * y).sum(-1, keepdim=True))
    dx: Tensor = backward(g, y, -1, y.dtype)
    return dx


_storage_use_count: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda _: sys.maxsize)


def storage_is_shared(tensor: Tensor) -> bool:
    """Whether a tensor other than this one and its base can see this memory; True where torch does not tell."""
    try:
        storage = tensor.untyped_storage()
        holders = 3 if tensor._base is not None else 2  # the storage object in our hand is one of them
        # Who holds it; and more than one hold a tensor that a node has saved.
        return _storage_use_count(storage._cdata) > holders or tensor._use_count() > 1  # type: ignore[attr-defined]
    except (AttributeError, NotImplementedError, RuntimeError):
        return True


def mutates(function: Any) -> bool:
    """Whether a function that leangrad has no table entry for may change its arguments in place."""
    schemas = [function] if hasattr(function, "_schema") else []
    if hasattr(function, "overloads"):
        schemas = [getattr(function, name) for name in function.overloads()]
    if schemas:  # an `out=` is looked for at each call
        written = [
            a for s in schemas for a in s._schema.arguments if a.alias_info is not None and a.alias_info.is_write
        ]
        return any(not a.is_out for a in written)
    name = getattr(function, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def version(tensor: Tensor) -> int:
    """How often `tensor`, or anything that shares its memory by a view or a detach, was changed in place."""
    return tensor._version


def is_view(tensor: Tensor) -> bool:
    """Whether autograd knows `tensor` as a view of another one; True where torch does not tell."""
    ask = getattr(tensor, "_is_view", None)
    return True if ask is None else bool(ask())


def direct(overload: Any) -> Any:
    """The C++ function behind `torch.ops.aten.name.overload`, a third cheaper to call; or the overload itself."""
    return getattr(overload, "_op", overload)


def without_batches() -> Any:
    """A context in which a random op is not refused although gradients are batched (`is_grads_batched=True`)."""
    try:
        keys = torch._C.DispatchKeySet(torch._C._parse_dispatch_key("VmapMode"))  # type: ignore[arg-type]
        return torch._C._ExcludeDispatchKeyGuard(keys)
    except (AttributeError, RuntimeError, TypeError):
        return contextlib.nullcontext()


def norms(tensors: list[Tensor], order: float, dtype: torch.dtype) -> list[Tensor]:
    """The norm of each tensor, in `dtype`: in one call, where torch has it."""
    together = getattr(torch, "_foreach_norm", None)
    if together is None:
        return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]
    return list(together(tensors, order, dtype=dtype))


def scale_(tensors: list[Tensor], factor: Tensor | float) -> None:
    """Multiply each tensor by `factor`, in place: in one call, where torch has it."""
    together = getattr(torch, "_foreach_mul_", None)
    if together is not None:
        together(tensors, factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)


@functools.cache
def _has_fused_rms_norm(device_type: str) -> bool:
    """Whether torch has kernels of its own for both passes of an RMS norm there; on a CPU it composes other ops."""
    if device_type != "cuda":
        return False
    try:
        x = torch.ones(1, 8, device=device_type)
        _, rstd = torch.ops.aten._fused_rms_norm(x, [8], x[0], 1e-5)
        torch.ops.aten._fused_rms_norm_backward(x, x, [8], rstd, x[0], [True, True])
    except (AttributeError, RuntimeError):  # NotImplementedError is a RuntimeError
        return False
    return True


def fused_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor] | None:
    """An RMS norm over the last dimension and 1/rms of each row; None where torch has no kernel for it."""
    if not _has_fused_rms_norm(x.device.type):
        return None
    y, rstd = torch.ops.aten._fused_rms_norm(x, [x.shape[-1]], weight, eps)
    return y, rstd


def fused_rms_norm_backward(
    g: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, needs_dweight: bool
) -> tuple[Tensor, Tensor | None] | None:
    """The gradients of x and of the weight for `fused_rms_norm`; None where torch has no kernel for it."""
    if not _has_fused_rms_norm(x.device.type):
        return None
    dx, dweight = torch.ops.aten._fused_rms_norm_backward(g, x, [x.shape[-1]], rstd, weight, [True, needs_dweight])
    return dx, dweight if needs_dweight else None


def storage_holders(tensor: Tensor) -> int | None:
    """How many tensors see this memory, those that only C++ holds included; None where torch does not tell."""
    try:
        storage = tensor.untyped_storage()
        return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # without the storage object in our hand
    except (AttributeError, NotImplementedError, RuntimeError):
        return None


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor has memory of its own: one that stands for a batch (`is_grads_batched=True`) does not."""
    try:
        return tensor.untyped_storage() is not None
    except (NotImplementedError, RuntimeError):
        return False


def wrapped_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors that a tensor of a wrapper's class is made of, as DTensor is: it has no memory of its own."""
    flatten = None if type(tensor) in (Tensor, torch.nn.Parameter) else getattr(tensor, "__tensor_flatten__", None)
    parts = [] if flatten is None else [getattr(tensor, name) for name in flatten()[0]]
    return [part for part in parts if isinstance(part, Tensor)]  # a DTensor names its mesh too


def tensor_without_memory(kind: type[Tensor], like: Tensor) -> Any:
    """A tensor of class ``kind`` with the shape, strides, dtype and device of ``like``, and no memory."""
    return Tensor._make_wrapper_subclass(
        kind, like.shape, strides=like.stride(), dtype=like.dtype, layout=like.layout, device=like.device
    )


def versions(a: Tensor, b: Tensor) -> tuple[int, int]:
    """The versions of two tensors."""
    return a._version, b._version


def assert_on_device(condition: Tensor, message: str) -> None:
    """Fail with `message` if a tensor of one truth is false: at once on a CPU, by an assertion on a GPU, unwaited for.

    Does nothing where torch has no such assertion.
    """
    check = getattr(torch, "_assert_async", None)
    if check is not None:
        check(condition, message)
