"""leangrad's own errors. Each message says what was expected, what was found, and what to do instead."""

__all__ = ["BudgetError", "ChangedError", "ConsumedError", "LeangradError", "StaleError"]


class LeangradError(RuntimeError):
    """The base of every error that leangrad raises about itself.

    >>> issubclass(LeangradError, RuntimeError)
    True
    """


class ConsumedError(LeangradError):
    """A buffer that backward had already moved out was asked for a second time."""


class ChangedError(LeangradError):
    """A tensor that backward needs was changed in place after it was kept."""


class StaleError(LeangradError):
    """A buffer that was borrowed from a workspace was touched after it was given back."""


class BudgetError(LeangradError):
    """A step does not fit into the budget that was given; ``smallest`` is the least that it takes."""

    def __init__(self, message: str, smallest: int = 0) -> None:
        super().__init__(message)
        self.smallest = smallest
