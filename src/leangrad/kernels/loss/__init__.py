"""Kernels of the loss: what turns the logits of some tokens into losses and the logits' gradient."""
