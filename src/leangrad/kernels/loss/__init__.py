"""Kernels of the loss: they turn the logits of some tokens into losses and the gradient of the logits."""
