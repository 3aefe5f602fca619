"""Private facts of tensors and storages: reference counts, versions, views; and kernels without public names."""

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
    """Return `function` as a `functools.partial`, so that its arguments' reference counts do not depend on Dynamo.

    Python passes arguments from frame to frame without a further reference. Any other frame evaluator is called from C,
    which holds one more reference to each argument. While a compiled function runs in any thread, Dynamo evaluates the
    frames of all threads (after a compile that raised, for the rest of the process: torch 2.13). A `partial` is called
    through C in both states, so the counts are the same.
    """
    return functools.update_wrapper(functools.partial(function), function)


def is_python_evaluating() -> bool:
    """Whether Python itself evaluates frames: any other evaluator holds one more reference to a call's arguments."""
    held = object()
    return _held(held) < _held_through_c(held)


def _held(one: object) -> int:
    return sys.getrefcount(one)


_held_through_c = called_through_c(_held)


@called_through_c
def reference_counts(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the reference counts of `tensor`, its storage and its base, in C++ and Python; None where torch has none.

    The counts include the references of this call, so they can be compared only with counts that were taken by the same
    chain of calls.
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
    """Whether `tensor` is a Python number that torch wrapped for an op.

    Type promotion shows it: the dtype of a wrapped number yields to that of a tensor of the same kind.
    """
    if tensor.dim() or not tensor.is_cpu:
        return False
    other = _HALF if tensor.dtype is torch.float64 else _BYTE if tensor.dtype is torch.int64 else None
    return other is not None and torch.result_type(other, tensor) is other.dtype


def softmax_backward(g: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of the input of `y = torch.softmax(x, -1)`, by differentiable ops.

    torch's own kernel computes in float32 or better; where torch lacks its name, the formula runs in y's dtype.
    """
    backward = getattr(torch, "_softmax_backward_data", None)
    if backward is None:
        return y * (g - (g * y).sum(-1, keepdim=True))
    dx: Tensor = backward(g, y, -1, y.dtype)
    return dx


_storage_use_count: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda _: sys.maxsize)


def storage_is_shared(tensor: Tensor) -> bool:
    """Whether a tensor other than `tensor` and its base shares its memory; True where torch lacks the counts."""
    try:
        # A node that saved the tensor is a second holder of it.
        return has_aliases(tensor) or tensor._use_count() > 1  # type: ignore[attr-defined]
    except (AttributeError, NotImplementedError, RuntimeError):
        return True


def same_storage(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors lie in the same memory, also if they are empty.

    False where torch lacks the name, and for tensors without a storage, such as sparse ones.

    >>> x = torch.zeros(3)
    >>> same_storage(x[:0], x[1:]), same_storage(x[:0], torch.zeros(0))
    (True, False)
    """
    try:
        return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False


def has_aliases(tensor: Tensor) -> bool:
    """Whether a tensor object other than `tensor` and its base lies in its memory; True where torch lacks the count.

    >>> x = torch.zeros(3)
    >>> has_aliases(x), has_aliases(x[:2])
    (False, False)
    >>> y = x.detach()
    >>> has_aliases(x)
    True
    """
    try:
        storage = tensor.untyped_storage()
        holders = 3 if tensor._base is not None else 2  # one of them is `storage`, the Python object
        return _storage_use_count(storage._cdata) > holders
    except (AttributeError, NotImplementedError, RuntimeError):
        return True


def mutates(function: Any) -> bool:
    """Whether a function that is in no table of leangrad may change its arguments in place.

    The schemas of an op decide, without their `out=` arguments; for any other function, an underscore at the end of its
    name.
    """
    schemas = [function] if hasattr(function, "_schema") else []
    if hasattr(function, "overloads"):
        schemas = [getattr(function, name) for name in function.overloads()]
    if schemas:  # `out=` is looked for at each call instead
        written = [
            a for s in schemas for a in s._schema.arguments if a.alias_info is not None and a.alias_info.is_write
        ]
        return any(not a.is_out for a in written)
    name = getattr(function, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def version(tensor: Tensor) -> int:
    """Return the version counter of `tensor`: in-place changes of it and of tensors that share it by view or detach."""
    return tensor._version


def is_view(tensor: Tensor) -> bool:
    """Whether `tensor` is a view of another tensor for autograd; True where torch lacks the name."""
    ask = getattr(tensor, "_is_view", None)
    return True if ask is None else bool(ask())


def direct(overload: Any) -> Any:
    """Return the C++ function behind `torch.ops.aten.name.overload`, which is a third cheaper to call.

    Returns the overload itself where torch lacks the name.
    """
    return getattr(overload, "_op", overload)


def without_batches() -> Any:
    """Return a context in which a random op may run although gradients are batched (`is_grads_batched=True`).

    The context has no effect where torch lacks the names.
    """
    try:
        keys = torch._C.DispatchKeySet(torch._C._parse_dispatch_key("VmapMode"))  # type: ignore[arg-type]
        return torch._C._ExcludeDispatchKeyGuard(keys)
    except (AttributeError, RuntimeError, TypeError):
        return contextlib.nullcontext()


def norms(tensors: list[Tensor], order: float, dtype: torch.dtype) -> list[Tensor]:
    """Return the norm of each tensor, in `dtype`: in one call where torch has `_foreach_norm`, else one per tensor."""
    together = getattr(torch, "_foreach_norm", None)
    if together is None:
        return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]
    return list(together(tensors, order, dtype=dtype))


def scale_(tensors: list[Tensor], factor: Tensor | float) -> None:
    """Multiply each tensor by `factor` in place: in one call where torch has `_foreach_mul_`, else one per tensor."""
    together = getattr(torch, "_foreach_mul_", None)
    if together is not None:
        together(tensors, factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)


@functools.cache
def _has_fused_rms_norm(device_type: str) -> bool:
    """Whether torch has fused kernels for forward and backward of an RMS norm; on a CPU it composes other ops."""
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
    """Return the RMS norm over the last dimension and 1/rms of each row; None where torch has no fused kernel."""
    if not _has_fused_rms_norm(x.device.type):
        return None
    y, rstd = torch.ops.aten._fused_rms_norm(x, [x.shape[-1]], weight, eps)
    return y, rstd


def fused_rms_norm_backward(
    g: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, needs_dweight: bool
) -> tuple[Tensor, Tensor | None] | None:
    """Return the gradients of x and of the weight for `fused_rms_norm`; None where torch has no fused kernel."""
    if not _has_fused_rms_norm(x.device.type):
        return None
    dx, dweight = torch.ops.aten._fused_rms_norm_backward(g, x, [x.shape[-1]], rstd, weight, [True, needs_dweight])
    return dx, dweight if needs_dweight else None


def storage_holders(tensor: Tensor) -> int | None:
    """Return how many tensors share the storage of `tensor`, also those held only in C++; None if torch lacks it."""
    try:
        storage = tensor.untyped_storage()
        return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # without `storage`, the Python object
    except (AttributeError, NotImplementedError, RuntimeError):
        return None


def has_memory(tensor: Tensor) -> bool:
    """Whether `tensor` has a storage; one that stands for a batch of gradients (`is_grads_batched=True`) has not."""
    try:
        return tensor.untyped_storage() is not None
    except (NotImplementedError, RuntimeError):
        return False


def wrapped_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that a wrapper subclass such as DTensor consists of; empty for any other tensor."""
    if type(tensor) is Tensor or type(tensor) is torch.nn.Parameter:
        return []
    flatten = getattr(tensor, "__tensor_flatten__", None)
    parts = [] if flatten is None else [getattr(tensor, name) for name in flatten()[0]]
    return [part for part in parts if isinstance(part, Tensor)]  # a DTensor lists its mesh too


def tensor_without_memory(kind: type[Tensor], like: Tensor) -> Any:
    """Return a tensor of class ``kind`` with the shape, strides, dtype and device of ``like``, without memory."""
    return Tensor._make_wrapper_subclass(
        kind, like.shape, strides=like.stride(), dtype=like.dtype, layout=like.layout, device=like.device
    )


def versions(a: Tensor, b: Tensor) -> tuple[int, int]:
    """Return the version counters of two tensors."""
    return a._version, b._version


def assert_on_device(condition: Tensor, message: str) -> None:
    """Fail with `message` if `condition`, a bool tensor of one element, is false.

    On a CPU it raises at once; on a GPU the kernel asserts, and the host does not wait for it. Does nothing where torch
    lacks the name.
    """
    check = getattr(torch, "_assert_async", None)
    if check is not None:
        check(condition, message)
