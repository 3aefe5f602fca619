"""Train the same model, with the same gradients, in a fraction of the memory."""

__version__ = "0.1.0.dev0"
