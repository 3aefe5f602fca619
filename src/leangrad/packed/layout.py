"""Checks which parameters can be packed, and gives each a place in a range."""

import operator

import torch
from torch import nn

from leangrad import _torch

from .ranges import Range
from .slots import SLOTS, Slot


def check_packable(model: nn.Module, named: list[tuple[str, nn.Parameter]], dtype: torch.dtype | None) -> None:
    """Raise ValueError, which says what to do, if the model's gradients cannot be packed."""
    if not named:
        raise ValueError("the model has no trainable parameter; pack it after requires_grad is set")
    for name, parameter in named:
        if SLOTS.get(parameter) is not None:
            raise ValueError(f"{name} is packed already; use that PackedGradients, its repack(), or its unpack()")
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"{name} has no shape yet; run one forward pass before packing")
        if dtype is None:
            continue
        if not (dtype.is_floating_point and parameter.is_floating_point()) or dtype.itemsize < parameter.dtype.itemsize:
            raise ValueError(
                f"{name} is {parameter.dtype}, whose gradients do not fit into {dtype}; give a wider dtype"
            )
        if dtype.itemsize == parameter.dtype.itemsize and dtype != parameter.dtype:
            raise ValueError(f"{name} is {parameter.dtype}, whose gradients do not fit into {dtype}; give float32")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise ValueError(f"{name} makes sparse gradients, which have no place in a flat buffer; set sparse=False")


class Structure:
    """The parameters and submodules of a model at one time, to check later whether they are unchanged.

    The check takes a third of the time of a walk over the parameters, which was noticeable in a step on a GPU. If it
    fails, the model need not have changed: the caller has to compare the parameters themselves.
    """

    def __init__(self, model: nn.Module) -> None:
        found = [_torch.registries(module) for module in model.modules()]
        self._is_known = None not in found
        self._entries = [(registry, tuple(registry.values())) for pair in found if pair for registry in pair]
        self._frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]

    def is_unchanged(self) -> bool:
        """Whether every module has the same parameters and children, and every frozen parameter still is frozen."""
        for now, then in self._entries:
            if len(now) != len(then) or not all(map(operator.is_, now.values(), then)):
                return False
        return self._is_known and not any(parameter.requires_grad for parameter in self._frozen)


def has_plain_weight(module: nn.Module) -> bool:
    """Whether the module has a trainable `weight` of its own that is a dense, unsharded parameter."""
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    return weight is not None and weight.requires_grad and type(weight) is nn.Parameter


def reasons_for_adding(model: nn.Module, taught: list[nn.Module]) -> dict[nn.Parameter, str]:
    """Returns, for each parameter, the reason to report if autograd adds its gradient.

    taught: the modules for which `modules.teach` returned True.
    """
    can_write = set(taught)
    reasons: dict[nn.Parameter, str] = {}
    for module in model.modules():
        kind = type(module).__name__
        for parameter in module.parameters(recurse=False):
            if module in can_write:
                reasons.setdefault(parameter, f"the {kind} was used by a plain op, or where packing does not apply")
            else:
                reasons[parameter] = f"a {kind} has no packed form"
    return reasons


def lay_out(pairs: list[tuple[nn.Parameter, Slot]], dtype: torch.dtype | None, range_bytes: int | None) -> list[Range]:
    """Give every slot its place, in parameter order, and return the ranges.

    For each device and dtype one range at a time is filled, until it has `range_bytes`.
    """
    ranges: list[Range] = []
    open_ranges: dict[tuple[torch.device, torch.dtype, torch.dtype], Range] = {}
    for parameter, slot in pairs:
        key = (parameter.device, dtype or parameter.dtype, parameter.dtype)
        range_ = open_ranges.get(key)
        is_full = (
            range_ is not None and range_bytes is not None and range_.bytes + slot.numel * key[1].itemsize > range_bytes
        )
        if range_ is None or is_full:
            range_ = open_ranges[key] = Range(*key)
            ranges.append(range_)
        slot.range = range_
        range_.append(slot)
    return ranges
