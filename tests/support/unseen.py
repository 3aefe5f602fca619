"""A function in a module of a package, which writes a tensor past its version."""

from torch import Tensor


def write(weight: Tensor) -> None:
    """Change ``weight`` so that no version tells."""
    weight.data.add_(1)
