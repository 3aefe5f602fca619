"""Bfloat16 on a CPU that has no instructions for it, fast enough to test with."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
PRODUCTS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
    aten.convolution_backward.default,
    ATTENTION,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}


class FastBFloat16(TorchDispatchMode):
    """Compute bfloat16 products, convolutions and attention in float32 and round the result.

    Where the CPU lacks bfloat16, PyTorch's own loops take 10 s where a small GPT takes 0.2 s in float32, and the first
    large product switches oneDNN off for the process: float32 steps before and after it differ in their last bits.
    The mode sits below autograd and autocast: every dtype that a model, a hook or a gradient sees stays the same.

    >>> with FastBFloat16(), torch.autocast("cpu", torch.bfloat16):
    ...     print(torch.nn.Linear(3, 2)(torch.randn(4, 3)).dtype)
    torch.bfloat16
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in PRODUCTS or args[0].dtype != torch.bfloat16:
            return func(*args, **kwargs)
        wide = [arg.float() if isinstance(arg, Tensor) else arg for arg in args]
        result = func(*wide, **kwargs)
        if isinstance(result, Tensor):
            return result.bfloat16()
        if func is ATTENTION:  # the second is the logarithm of the sums, float32 always
            return result[0].bfloat16(), result[1]
        return tuple(None if one is None else one.bfloat16() for one in result)
