"""A loop over a bound that a kernel was given: run under `TRITON_INTERPRET=1` to see whether the interpreter works.

Triton 3.6's does not with NumPy 2.4 and later, which no longer makes a number of an array with one element.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def count(out, n):
    total = 0
    for i in range(tl.program_id(0), n):
        total += i
    tl.store(out, total)


if __name__ == "__main__":
    found = torch.zeros(1, dtype=torch.int32)
    count[(1,)](found, 5)
    assert found.item() == 10
