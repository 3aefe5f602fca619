"""The attention context in plain PyTorch, and how near to it ours must be."""

import torch

# How far from the plain form, relative to the largest value.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def plain(x, context, strength):
    return x + strength / x.shape[-1] * (x @ context)


def close(found, expected, dtype):
    assert found.dtype == expected.dtype
    assert (found - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
