"""The modules whose backward writes the gradient of their weight, and the functions that replace their forward.

[Note: same forward]
A packed module computes the same products as the plain module, in the same order and dtype, so its output is the same
bit for bit. `F.linear` adds the bias inside the product for some inputs (two dimensions; contiguous ones of more,
depending on the release of torch) and after it for others, and the gradient of the bias follows the same choice. Which
of the two it does is read from the graph of a tiny plain call, once.
"""

import functools
import sys
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from leangrad import _torch
from leangrad.engine import single_node
from leangrad.functional import LOW_OR_SINGLE, activate
from leangrad.ledger.observe.active_region import ledger_saves
from leangrad.switch import disabled

from .products import node_writer, packed_lookup, packed_product
from .slots import SLOTS, Slot


def _slot_for(weight: object, input: object) -> Slot | None:
    """Returns the slot of a weight that the backward of this call may write to, or None: then the call is plain."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or disabled():
        return None
    slot = SLOTS.get(weight)
    if slot is None or not weight.requires_grad or type(input) not in (Tensor, nn.Parameter):  # type: ignore[attr-defined]
        return None
    if input.layout is not torch.strided or input.is_nested:  # type: ignore[attr-defined]
        return None
    if _torch.transforms_active() or _torch.forward_mode_active():
        return None
    return slot


def _product_dtype(slot: Slot, x: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype | None:
    """Returns the dtype in which this product is computed, or None if the call has to be plain."""
    dtypes = (x.dtype, weight.dtype) if bias is None else (x.dtype, weight.dtype, bias.dtype)
    if weight.device != x.device or (bias is not None and bias.device != x.device):
        return None
    if not torch.is_autocast_enabled(x.device.type):
        return x.dtype if x.is_floating_point() and len(set(dtypes)) == 1 else None
    dtype = torch.get_autocast_dtype(x.device.type)
    if not LOW_OR_SINGLE.issuperset(dtypes):
        return None
    is_cast_alive = slot.cast is not None and slot.cast() is not None
    if weight.dtype != dtype and is_cast_alive and not (_torch.saved_tensor_hooks_active() and not ledger_saves()):
        slot.why_added = "used more than once under autocast: later uses share autocast's own cast"
        return None
    return dtype


@functools.cache
def linear_adds_inside(dims: int, is_contiguous: bool, device: torch.device) -> bool:
    """Whether `F.linear` adds its bias inside the product, and not after it: see [Note: same forward]."""
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        x = torch.zeros([2] * dims, device=device)
        # Only the bias needs a gradient, for which nothing is saved: a checkpoint around the call counts saved tensors.
        weight, bias = torch.zeros(2, 2, device=device), torch.zeros(2, device=device, requires_grad=True)
        y = torch.nn.functional.linear(x if is_contiguous else x.transpose(0, 1), weight, bias)
    return y.grad_fn is not None and y.grad_fn.name() != "AddBackward0"


def _linear(module: nn.Linear, x: Tensor) -> Tensor | None:
    """Returns `F.linear` with the module's parameters, whose gradients backward writes; None if it has to be plain."""
    weight, bias = module.weight, module.bias
    slot = _slot_for(weight, x)
    if slot is None or x.dim() < 2 or (dtype := _product_dtype(slot, x, weight, bias)) is None:
        return None
    adds_inside = bias is not None and linear_adds_inside(x.dim(), x.is_contiguous(), x.device)
    y: Tensor = packed_product(x if x.dtype == dtype else x.to(dtype), weight, bias, True, adds_inside, dtype)
    return y


def _packed_linear(self: nn.Linear, input: Tensor) -> Tensor:
    y = _linear(self, input)
    return type(self).forward(self, input) if y is None else y


def _packed_dense(self: Any, x: Tensor) -> Tensor:
    y = _linear(self, x)
    if y is None:
        return type(self).forward(self, x)  # type: ignore[no-any-return]
    return y if self.record is None else activate(y, self.record)


def _packed_conv1d(self: Any, x: Tensor) -> Tensor:
    slot = _slot_for(self.weight, x)
    if slot is not None and x.is_contiguous() and (dtype := _product_dtype(slot, x, self.weight, self.bias)):
        return packed_product(x.to(dtype), self.weight, self.bias, False, True, dtype)  # type: ignore[no-any-return]
    return type(self).forward(self, x)  # type: ignore[no-any-return]


def _packed_embedding(self: nn.Embedding, input: Tensor) -> Tensor:
    slot = _slot_for(self.weight, input)
    if slot is None or self.max_norm is not None or self.scale_grad_by_freq or self.sparse:
        return type(self).forward(self, input)
    padding_index = -1 if self.padding_idx is None else self.padding_idx
    return packed_lookup(self.weight, input, padding_index)  # type: ignore[no-any-return]


_WRITERS: dict[Callable[..., Any], Callable[..., Any]] = {}


def register_writer(plain_forward: Callable[..., Any], packed_forward: Callable[..., Any]) -> None:
    """Make modules whose class has `plain_forward` call `packed_forward` once they are packed.

    `packed_forward(module, ...)` must return what `plain_forward` returns, and call `deliver` in its backward.
    """
    assert isinstance(packed_forward, FunctionType)
    # A bound method is pickled by its name: so a module that is saved and loaded has the forward of its class.
    packed_forward.__name__ = "forward"
    _WRITERS[plain_forward] = packed_forward


register_writer(nn.Linear.forward, _packed_linear)
register_writer(nn.Embedding.forward, _packed_embedding)
single_node.register_writer(node_writer)


def teach(module: nn.Module) -> bool:
    """Replace the forward of the module by its packed form; returns whether there is one.

    Its backward writes the gradient of the weight. The module's class, parameters and state_dict stay as they are.
    """
    _register_what_was_imported()
    packed_forward = _WRITERS.get(type(module).forward)
    if packed_forward is None or "forward" in module.__dict__:
        return False
    module.forward = MethodType(packed_forward, module)
    return True


def unteach(module: nn.Module) -> None:
    """Undo `teach`: the module has the forward of its class again."""
    method = module.__dict__.get("forward")
    if isinstance(method, MethodType) and method.__func__ in _WRITERS.values():
        del module.__dict__["forward"]


def _register_what_was_imported() -> None:
    """Register classes whose module is not imported here: a model that has such a layer has imported it."""
    for module, name, packed_forward in (
        ("transformers.pytorch_utils", "Conv1D", _packed_conv1d),
        ("leangrad.nn.dense", "Dense", _packed_dense),
    ):
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and kind.forward not in _WRITERS:
            register_writer(kind.forward, packed_forward)
