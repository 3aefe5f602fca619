"""A stand-in for `leangrad.lean` that knows exactly which budgets it can meet."""

from collections.abc import Callable
from typing import Any

from torch import nn

from leangrad.errors import BudgetError
from leangrad.lean import lean

__all__ = ["lean_down_to"]


def lean_down_to(smallest: int, then: int | None = None) -> Callable[..., nn.Module]:
    """The floor for every budget of at least `smallest`; for a lower one forward raises a BudgetError.

    With `then` the error names `smallest` at first, and once that is asked for, `then`.
    """

    def stand_in(model: nn.Module, *, budget: int | None = None) -> nn.Module:
        if budget is not None and budget < (then or smallest):
            named = smallest if then is None or budget < smallest else then

            def refuse(module: nn.Module, args: Any) -> None:
                raise BudgetError(f"the budget of {budget} bytes cannot be met", named)

            model.register_forward_pre_hook(refuse)
            return model
        return lean(model)

    return stand_in
