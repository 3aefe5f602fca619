"""The activations of the table as PyTorch writes them."""

import torch
import torch.nn.functional as F


def gated(function, a, b):
    return function(a) * b


PLAIN = {
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "hardswish": F.hardswish,
    "mish": F.mish,
    "softmax": lambda x: torch.softmax(x, -1),
    "swiglu": lambda x: gated(F.silu, *x.chunk(2, -1)),  # one chunk: of two the gradients would be added, -0.0 to 0.0
    "geglu": lambda x: gated(F.gelu, *x.chunk(2, -1)),
}
