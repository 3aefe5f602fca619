"""Checkpoints inside models of transformers."""

from typing import Any


def checkpoint_blocks(model: Any, *, use_reentrant: bool) -> None:
    """Let the model checkpoint each of its blocks; before transformers 5.23 the method had another name."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})
