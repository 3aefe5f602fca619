"""leangrad's own errors. Each message says what was expected, what was found, and what to do instead."""

__all__ = ["BudgetError", "ChangedError", "ConsumedError", "LeangradError", "StaleError"]


class LeangradError(RuntimeError):
    """The base of every error that leangrad raises about itself.

    >>> issubclass(LeangradError, RuntimeError)
    True
    """


class ConsumedError(LeangradError):
    """A buffer that backward had already moved out was asked for a second time.

    >>> import torch
    >>> from leangrad.tape import Tape
    >>> tape = Tape()
    >>> x = tape.watch(torch.ones(2))
    >>> y = tape.mul(x, x)
    >>> tape.backward(y)
    >>> tape.backward(y)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    leangrad.errors.ConsumedError: ...
    """


class ChangedError(LeangradError):
    """A tensor that backward needs was changed in place after it was kept.

    >>> import torch, leangrad
    >>> x = torch.ones(128, 128, requires_grad=True)
    >>> with leangrad.saving():
    ...     product = x @ x
    ...     loss = torch.nn.functional.gelu(product).sin().sum()
    >>> _ = product.detach().zero_()
    >>> loss.backward()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    leangrad.errors.ChangedError: one of the variables needed for gradient computation has been modified by ...
    """


class StaleError(LeangradError):
    """A buffer that was borrowed from a workspace was touched after it was given back.

    >>> from leangrad.workspace import Workspace
    >>> borrowed = Workspace().borrow("row", (5,))
    >>> borrowed.release()
    >>> borrowed.tensor  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    leangrad.errors.StaleError: ...
    """


class BudgetError(LeangradError):
    """A step does not fit into the budget that was given; ``smallest`` is the least that it takes.

    >>> BudgetError("a budget of 1 GB cannot be met", smallest=2 * 10**9).smallest
    2000000000
    """

    def __init__(self, message: str, smallest: int = 0) -> None:
        super().__init__(message)
        self.smallest = smallest
