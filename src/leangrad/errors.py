"""leangrad's own errors. Each message says what was expected, what was found, and what to do instead."""

__all__ = ["ChangedError", "ConsumedError", "LeangradError", "StaleError"]


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
