"""Tells whether a buffer may be overwritten (`owned`, `held_alone`), and moves attributes out of their holder (`take`).

[Note: signature] PyTorch has no function that tells whether a gradient is exclusive, so that nothing but the running
backward can see it. What can be read are reference counts: of the tensor (in C++, in Python, weak), of its storage and,
for a view, of its base. An exclusive gradient has a known row of counts, and every way to share it (a second branch, a
hook, a held view, storage or numpy array, a capture by `autograd.grad`) raises at least one of them. The row depends on
the torch build, on the Python version and on the number of calls between the engine and the place where the counts are
read. So it is not written down here but measured: the first call of `owned` sends known-exclusive gradients through the
engine, at the same call depth, and notes their rows. Then it sends known-shared ones; if a single one of them has an
exclusive row, `owned` always returns False.

[Note: first use] The rows are measured in the first call of `owned`, not at import. A backward pass at import would
start the engine's threads on a machine with GPUs, and a process that forks after that can no longer run backward in its
children. The measurement runs in a thread of its own, which no mode, hook or default device of the caller affects.

[Note: frame evaluator] While Dynamo evaluates frames instead of Python, a call from Python to Python holds its
arguments once more. If rows of one state were compared with rows of the other, a shared gradient could look exclusive.
So every function on the way from backward to the counts is called through C (`leangrad._torch.called_through_c`). One
call is left, torch's own call of backward. From Python 3.12 on it too holds its arguments once more while Dynamo
evaluates frames. There the rows are measured only while Python evaluates frames. These rows are the lowest: a gradient
that has one of them is exclusive in either state, and while Dynamo evaluates frames nothing is owned.
"""

import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from leangrad._torch import called_through_c, dispatch_modes_active, is_python_evaluating, raw_stream, reference_counts
from leangrad.errors import ConsumedError

__all__ = ["fills_storage", "held_alone", "owned", "take"]


@called_through_c
def owned(grad: Tensor) -> bool:
    """Whether nothing but the running backward can see `grad`, so that it may overwrite `grad`.

    Call it as `owned(grad)` in the body of `backward(ctx, grad, ...)` itself, on an argument of that backward: not in a
    function that backward calls, not under a decorator such as `once_differentiable`. The counts are compared at
    exactly that call depth; from anywhere else the result is False. It is also False under `torch.compile`, with grad
    mode on (`create_graph=True`), for tensor subclasses, for expanded or overlapping gradients, for a gradient whose
    storage is larger than itself or is not torch's own memory (numpy, shared memory), and for work on a side stream.

    True means that no other reference exists. It does not cover a kernel on another CUDA stream that still reads the
    gradient after its reference was dropped; a model that runs branches on side streams by hand should not overwrite.

    >>> class Double(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, x):
    ...         return 2 * x
    ...     @staticmethod
    ...     def backward(ctx, grad):
    ...         return grad.mul_(2) if owned(grad) else 2 * grad
    >>> x = torch.ones(3, requires_grad=True)
    >>> Double.apply(x).square().sum().backward()
    >>> x.grad
    tensor([8., 8., 8.])
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    if type(grad) is not Tensor or grad.requires_grad:
        return False
    exclusive = _exclusive if _exclusive is not None else _calibrate()
    if not exclusive or _signature(grad) not in exclusive or not fills_storage(grad):
        return False
    return not grad.is_cuda or raw_stream(grad.device) == 0  # 0 is the default stream of every device


def held_alone(tensors: list[Tensor]) -> list[bool]:
    """For each tensor of a list, whether only the list refers to it: no variable, hook, view or autograd node does.

    >>> name = torch.ones(2)
    >>> held_alone([name, torch.ones(2)])
    [False, True]
    """
    if dispatch_modes_active():  # such a mode may hold the tensor that is made here for comparison
        return [False] * len(tensors)
    alone = _counts([torch.empty(1, device="cpu")], 0)
    return [alone is not None and _counts(tensors, i) == alone for i in range(len(tensors))]


def _counts(tensors: list[Tensor], i: int) -> tuple[int, ...] | None:
    return reference_counts(tensors[i])


def take(holder: object, name: str, *, keep: str) -> Any:
    """Returns `holder.name` and sets the attribute to None; a second `take` raises ConsumedError.

    `keep` ends the error's message: it tells the user how to run backward a second time. Equals
    `value, holder.name = holder.name, None` with the check.

    >>> from types import SimpleNamespace
    >>> cache = SimpleNamespace(x="map")
    >>> take(cache, "x", keep="pass retain_graph=True to the first backward"), cache.x
    ('map', None)
    """
    value = getattr(holder, name)
    if value is None:
        raise ConsumedError(f"{type(holder).__name__}.{name} was already moved out by an earlier backward; {keep}")
    setattr(holder, name, None)
    return value


def fills_storage(tensor: Tensor) -> bool:
    """Whether `tensor` is strided, in memory of torch's own, and covers every byte of its storage exactly once."""
    if tensor.layout is not torch.strided or tensor.is_neg() or tensor.is_conj():
        return False
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a tensor for a batch of gradients has no storage
        return False
    # Memory from elsewhere (`from_numpy`, shared memory) cannot be resized, and may be visible outside torch.
    if storage.nbytes() != tensor.nbytes or not storage.resizable():
        return False
    if tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last):
        return True  # almost all tensors: saves the loop over the strides, 3 µs of Python
    expected_stride = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected_stride:
                return False
            expected_stride *= size
    return True


@called_through_c
def _signature(grad: Tensor) -> tuple[int, ...] | None:
    """Returns the row of counts of `grad`, or None if `owned` was not called by a backward that the engine called."""
    try:
        caller = sys._getframe(3).f_code  # 0: here, 1: owned, 2: backward, 3: torch's own call of backward
    except ValueError:
        return None
    return reference_counts(grad) if caller is _backward_caller else None


_exclusive: frozenset[tuple[int, ...]] | None = None  # None: not measured yet. Empty: nothing is ever owned.
_backward_caller: CodeType | None = None  # torch's function that calls backward; None: not measured yet
_calibration_lock = threading.Lock()


def _calibrate() -> frozenset[tuple[int, ...]]:
    """Returns the rows of counts that mean "exclusive", measured once; see [Note: signature] and [Note: first use]."""
    global _exclusive
    with _calibration_lock:
        if _exclusive is None:
            if not _can_calibrate():
                return frozenset()
            _Look.disturbances = 0
            rows: list[frozenset[tuple[int, ...]]] = []
            thread = threading.Thread(target=lambda: rows.append(_measure_exclusive_rows()), name="leangrad-calibrate")
            thread.start()
            thread.join()
            if _Look.disturbances:  # a compiled function ran meanwhile: the next call measures again
                return frozenset()
            _exclusive = rows[0] if rows else frozenset()
            if not _exclusive:
                warnings.warn(
                    "leangrad cannot tell exclusive gradients from shared ones on this build of Python "
                    f"{sys.version.split()[0]} and torch {torch.__version__}; every gradient will be copied instead "
                    "of overwritten: results are the same, memory is not saved",
                    RuntimeWarning,
                    stacklevel=3,
                )
    return _exclusive


def _can_calibrate() -> bool:
    """Whether rows that are measured now are the lowest: see [Note: frame evaluator]."""
    return sys.version_info < (3, 12) or is_python_evaluating()


def _measure_exclusive_rows() -> frozenset[tuple[int, ...]]:
    """Returns the rows of exclusive gradients, or an empty set if they cannot be told from those of shared ones."""
    # A Python-level trace function makes every frame hold its locals once more: rows measured so would be too high.
    sys.settrace(None)
    sys.setprofile(None)
    # Without the GIL a reference count is split between threads and may be read too low.
    if sysconfig.get_config_var("Py_GIL_DISABLED") or not hasattr(sys, "getrefcount"):
        return frozenset()
    try:
        rows = {_row_of(_plain_gradient), _row_of(_viewed_gradient)}
        if None in rows or rows != {_row_of(_plain_gradient), _row_of(_viewed_gradient)}:
            return frozenset()
        if any(_row_of(share) in rows for share in _KNOWN_SHARED):
            return frozenset()
    except Exception:  # this torch does not run these few lines as expected: nothing is ever owned
        return frozenset()
    return frozenset(row for row in rows if row is not None)


class _Look(torch.autograd.Function):
    """Identity whose backward notes the row of its gradient, at the call depth of `owned`."""

    rows: list[tuple[int, ...] | None]
    disturbances = 0  # how often `_can_calibrate()` was False right before or after a measurement

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        _look(grad)
        return grad * 1


@called_through_c
def _look(grad: Tensor) -> None:
    global _backward_caller
    if _backward_caller is None:
        _backward_caller = sys._getframe(2).f_code
    _Look.rows.append(_signature(grad))


def _row_of(build: Callable[[Tensor, list[object]], Tensor]) -> tuple[int, ...] | None:
    """Run `build` and its backward, and return the row that `_Look` noted in it."""
    held: list[object] = []
    _Look.rows = []
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(4, 4, device="cpu", requires_grad=True)
        _Look.disturbances += not _can_calibrate()
        build(x, held).sum().backward()
        _Look.disturbances += not _can_calibrate()
    return _Look.rows[0]


def _identity(x: Tensor) -> Tensor:
    y: Tensor = _Look.apply(x)
    return y


def _plain_gradient(x: Tensor, held: list[object]) -> Tensor:
    return _identity(x) * 2


def _viewed_gradient(x: Tensor, held: list[object]) -> Tensor:
    return _identity(x).reshape(-1) * 2


def _held_by_hook(what: Callable[[Tensor], object], *, viewed: bool) -> Callable[[Tensor, list[object]], Tensor]:
    def build(x: Tensor, held: list[object]) -> Tensor:
        y = _identity(x)
        y.register_hook(lambda grad: held.append(what(grad)))
        return (y.reshape(-1) if viewed else y) * 2

    return build


def _held_by_branch(x: Tensor, held: list[object]) -> Tensor:
    h = x * 1
    return (h + _identity(h)) * 2


def _held_by_node_hook(x: Tensor, held: list[object]) -> Tensor:
    y = _identity(x)
    if y.grad_fn is not None:
        y.grad_fn.register_hook(lambda inputs, outputs: None)
    return y * 2


def _held_as_root(x: Tensor, held: list[object]) -> Tensor:
    return _identity(x)  # an expanded gradient, whose base the engine still holds


_KNOWN_SHARED: tuple[Callable[[Tensor, list[object]], Tensor], ...] = (
    *(
        _held_by_hook(what, viewed=viewed)
        for what in (lambda g: g, lambda g: g.detach(), lambda g: g.view(-1), lambda g: g.untyped_storage())
        for viewed in (False, True)
    ),
    _held_by_branch,
    _held_by_node_hook,
    _held_as_root,
)
