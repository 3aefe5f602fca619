"""Makes leangrad's autograd Functions visible to function modes as one call each, like torch's own functions.

A `TorchFunctionMode` does not see `Function.apply`, but sees the ops inside its forward. A ledger needs the opposite:
the tensors that the call saves belong to the call, and the ops inside, which run with gradients off and in scratch
memory, do not concern the ledger.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import handle_torch_function, has_torch_function_unary

__all__ = ["is_product", "overridable"]


def overridable(apply: Callable[..., Any], *, product: bool = False) -> Callable[..., Any]:
    """Return a function that calls `apply`, and that active function modes see as one call.

    product: whether it is a matrix product, a scan or the like, which is never computed twice.

    >>> double = overridable(lambda x: 2 * x)
    >>> double(3)
    6
    """

    def call(*args: Any) -> Any:
        if has_torch_function_unary(None):  # a mode is active; it calls `call` again, with itself disabled
            return handle_torch_function(call, (), *args)
        return apply(*args)

    call.is_product = product  # type: ignore[attr-defined]
    return call


def is_product(function: Any) -> bool:
    """Whether `function` was made by `overridable(..., product=True)`, so that it is never computed twice."""
    return getattr(function, "is_product", False) is True
