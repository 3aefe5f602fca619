"""Our autograd Functions as calls that function modes see, as they see torch's own functions.

`Function.apply` passes every `TorchFunctionMode` by, while the ops inside its forward do not. A ledger needs it the
other way round: what the call saves belongs to the call, and what happens inside, with gradients off and in scratch
memory, is nobody else's business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import handle_torch_function, has_torch_function_unary

__all__ = ["is_product", "overridable"]


def overridable(apply: Callable[..., Any], *, product: bool = False) -> Callable[..., Any]:
    """`apply` as one call, which the function modes that are on are asked for first.

    product: a matrix product, a scan or the like, which is never computed twice.

    >>> double = overridable(lambda x: 2 * x)
    >>> double(3)
    6
    """

    def call(*args: Any) -> Any:
        if has_torch_function_unary(None):  # a mode is on; it calls this very function again, itself set aside
            return handle_torch_function(call, (), *args)
        return apply(*args)

    call.is_product = product  # type: ignore[attr-defined]
    return call


def is_product(function: Any) -> bool:
    """Whether `function` is a call of ours that is never computed twice."""
    return getattr(function, "is_product", False) is True
