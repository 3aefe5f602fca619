"""leangrad's own errors. Each message says what was expected, what was found, and what to do instead."""

__all__ = ["BudgetError", "ChangedError", "ConsumedError", "LeangradError", "StaleError"]


class LeangradError(RuntimeError):
    """The base class of leangrad's own errors.

    >>> issubclass(LeangradError, RuntimeError)
    True
    """


class ConsumedError(LeangradError):
    """A buffer that backward had already moved out was requested a second time.

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
    """A buffer that was borrowed from a workspace was used after it was given back.

    >>> from leangrad.workspace import Workspace
    >>> borrowed = Workspace().borrow("row", (5,))
    >>> borrowed.release()
    >>> borrowed.tensor  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    leangrad.errors.StaleError: ...
    """


class BudgetError(LeangradError):
    """A step does not fit into the given budget; ``smallest`` is the least memory that it uses, in bytes.

    >>> BudgetError("a budget of 1 GB cannot be met", smallest=2 * 10**9).smallest
    2000000000
    """

    def __init__(self, message: str, smallest: int = 0) -> None:
        super().__init__(message)
        self.smallest = smallest
