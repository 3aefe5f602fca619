"""What tests share and no test owns: how bits are compared."""

from tests.support.bits import assert_same_bits, same_bits

__all__ = ["assert_same_bits", "same_bits"]
