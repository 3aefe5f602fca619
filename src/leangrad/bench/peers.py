"""The alternatives to leangrad, each a function that changes a model in place.

Each function raises `NotForThisError`, with a sentence that says why, if it does not apply to the model.
"""

import importlib
import importlib.util
import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from leangrad.frontier.repeated import describe_repeated, repeated_modules

__all__ = [
    "NotForThisError",
    "apply_cce",
    "apply_inplace_abn",
    "apply_liger",
    "checkpoint_selectively",
    "find_language_model",
    "save_on_host",
]

# The ops whose outputs a selective checkpoint keeps: names in `torch.ops.aten`, as users of it list them.
HEAVY = (
    "mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)  # fmt: skip


class NotForThisError(Exception):
    """A way does not apply to this model or to this device; the message says why."""


def checkpoint_selectively(model: nn.Module) -> str:
    """Put a checkpoint around each block that keeps matmuls, convolutions and attention; return a note on the blocks.

    The blocks are the repeated modules of the model.
    """
    blocks = repeated_modules(model)
    if not blocks:
        raise NotForThisError("found no repeated modules to put a checkpoint around")
    heavy = {getattr(torch.ops.aten, name).default for name in HEAVY if hasattr(torch.ops.aten, name)}

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in heavy else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    for block in blocks.values():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
    return f"around {describe_repeated(blocks)}"


def save_on_host(model: nn.Module) -> None:
    """Move every tensor that autograd saves in forward to pinned host memory until backward reads it."""
    plain = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return plain(*args, **kwargs)

    model.forward = forward


def apply_liger(model: nn.Module) -> None:
    """Apply Liger's kernels to a transformers model."""
    _apply_to_language_model(
        model, "liger_kernel.transformers", lambda liger, one: liger._apply_liger_kernel_to_instance(model=one)
    )


def apply_cce(model: nn.Module) -> None:
    """Replace the loss of a transformers language model by Apple's cut cross entropy.

    Uses the package's own patch. A release without one (25.1.1) has only the function, which is then called.
    """
    if importlib.util.find_spec("cut_cross_entropy.transformers") is not None:
        _apply_to_language_model(model, "cut_cross_entropy.transformers", lambda cce, one: cce.cce_patch(one))
    else:
        _apply_to_language_model(model, "cut_cross_entropy", _call_cce)


def _call_cce(package: Any, model: Any) -> None:
    """Make a causal language model compute its loss by ``package.linear_cross_entropy``, without logits."""
    head = model.get_output_embeddings()
    if not type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")) or not isinstance(head, nn.Linear):
        raise ValueError("it is no causal language model with a linear head")

    def forward(input_ids: torch.Tensor, labels: torch.Tensor, **others: Any) -> Any:
        hidden = model.base_model(input_ids, **others).last_hidden_state
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        loss = package.linear_cross_entropy(hidden.to(dtype), head.weight.to(dtype), labels, shift=True)
        return SimpleNamespace(loss=loss, logits=None)

    model.forward = forward


def find_language_model(package: str, model: nn.Module) -> nn.Module:
    """Return the transformers model in ``model``, itself or one of its submodules; ``package`` supports no others.

    Raises `NotForThisError`, which names ``package``, if there is none.
    """
    found = next((one for one in model.modules() if type(one).__module__.startswith("transformers.models.")), None)
    if found is None:
        raise NotForThisError(f"{package} knows models of transformers only")
    return found


def _apply_to_language_model(model: nn.Module, package: str, apply: Any) -> None:
    """Import ``package`` and call ``apply`` with it and with the transformers model in ``model``.

    Raises `NotForThisError` if the package refuses the architecture, or if no module's forward has changed.
    """
    found = find_language_model(package.partition(".")[0], model)
    before = [id(getattr(one.forward, "__func__", one.forward)) for one in found.modules()]
    try:
        apply(importlib.import_module(package), found)
    except (RuntimeError, ValueError, KeyError) as error:  # the packages raise these for an unsupported architecture
        raise NotForThisError(f"{package.partition('.')[0]} refuses {type(found).__name__}: {error}") from error
    after = [id(getattr(one.forward, "__func__", one.forward)) for one in found.modules()]
    if before == after:
        raise NotForThisError(f"{package.partition('.')[0]} has changed nothing in {type(found).__name__}")


def apply_inplace_abn(model: nn.Module) -> None:
    """Replace each batch norm that is followed by a leaky ReLU in an `nn.Sequential` by inplace_abn's layer.

    The layer computes both. The package itself has no function that converts an existing model.
    """
    layer = importlib.import_module("inplace_abn").InPlaceABN
    replaced = 0
    for part in [one for one in model.modules() if type(one) is nn.Sequential]:
        children = list(part.named_children())
        for (name, norm), (activation_name, activation) in itertools.pairwise(children):
            if type(norm) is nn.BatchNorm2d and type(activation) is nn.LeakyReLU:
                made = layer(
                    norm.num_features,
                    eps=norm.eps,
                    momentum=norm.momentum,
                    activation="leaky_relu",
                    activation_param=activation.negative_slope,
                )
                made.weight, made.bias = norm.weight, norm.bias
                made.running_mean, made.running_var = norm.running_mean, norm.running_var
                setattr(part, name, made.train(norm.training))
                setattr(part, activation_name, nn.Identity())
                replaced += 1
    if not replaced:
        raise NotForThisError(
            "inplace_abn inverts a leaky ReLU, and no batch norm here has one after it in a Sequential"
        )
