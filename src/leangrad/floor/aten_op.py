"""One call of an ATen op, described by its schema: what it reads, what it writes, whether it may run twice."""

from typing import Any

import torch
from torch import Tensor

from leangrad import _torch
from leangrad.policy.ops import is_product
from leangrad.trees import tensors_in

__all__ = ["SHAPE_ONLY", "UNWRITTEN", "Op", "stored_tensors"]

#: In-place ops that do not read the old contents of the tensor that they write.
_OVERWRITING = {"copy_", "fill_", "zero_", "bernoulli_", "normal_", "uniform_", "random_", "exponential_"}
_OVERWRITING |= {"log_normal_", "cauchy_", "geometric_"}

UNWRITTEN = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}

#: Backward ops that read only the shape of `self`. Eager PyTorch keeps some of these tensors all the same, needlessly.
SHAPE_ONLY = {"nll_loss_backward", "nll_loss2d_backward", "avg_pool2d_backward", "avg_pool3d_backward"}
SHAPE_ONLY |= {"_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward"}
SHAPE_ONLY |= {f"{kind}_pad{n}d_backward" for kind in ("reflection", "replication") for n in (1, 2, 3)}
SHAPE_ONLY |= {f"max_pool{n}d_with_indices_backward" for n in (2, 3)}
SHAPE_ONLY |= {f"adaptive_max_pool{n}d_backward" for n in (2, 3)}

#: Ops that create a tensor like another one, without reading the contents of that.
_FACTORIES = {f"{kind}_like" for kind in ("zeros", "ones", "full", "rand", "randn", "randint")}
_FACTORIES |= {"new_zeros", "new_ones", "new_full"} | UNWRITTEN


class Op:
    """One call of an ATen op: what it reads, what it writes, and whether it may run twice."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func = func
        schema = _torch.schema(func)
        namespace, _, self.name = schema.name.partition("::")
        declared = schema.arguments
        self.given = {one.name: value for one, value in zip(declared, args, strict=False)} | kwargs
        written = {one.name for one in declared if one.alias_info is not None and one.alias_info.is_write}
        if self._updates_statistics():  # the schema does not declare these writes
            written |= {"running_mean", "running_var"}
        self.unread = self._unread() | {one.name for one in declared if one.is_out}
        if self.name in _OVERWRITING:
            self.unread |= written
        self.tensors = stored_tensors(self.given)
        self.writes = [tensor for name in self.given if name in written for tensor in stored_tensors(self.given[name])]
        self.reads = [
            tensor for name in self.given if name not in self.unread for tensor in stored_tensors(self.given[name])
        ]
        self.is_view = not written and any(one.alias_info is not None for one in schema.returns)
        # Another library's op may contain a product.
        self.is_product = namespace not in ("aten", "prims") or is_product(self.name)

    def _is_training(self) -> bool:
        return bool(self.given.get("training", self.given.get("train", True)))

    def _updates_statistics(self) -> bool:
        is_forward = "momentum" in self.given or "exponential_average_factor" in self.given
        return "running_mean" in self.given and is_forward and self._is_training()

    def _unread(self) -> set[str]:
        """Return the names of the tensor arguments whose contents cannot change the result."""
        given = self.given
        if self.name in SHAPE_ONLY or self.name in _FACTORIES:
            return {"self"}
        unread = set()
        if "running_mean" in given:
            training = self._is_training()
            unread |= {"running_mean", "running_var"} if training else {"save_mean", "save_invstd", "save_var"}
            if not training and "output_mask" in given and not given["output_mask"][1]:
                unread.add("input")
        if self.name == "convolution_backward":
            to_input, to_weight, _ = given["output_mask"]
            unread |= {name for name, is_read in (("input", to_weight), ("weight", to_input)) if not is_read}
        return unread

    def random_state(self) -> tuple[int, ...]:
        """Return the state of the generator that the op draws from; empty if it draws nothing."""
        takes_dropout = any(one.name == "dropout_p" for one in _torch.schema(self.func).arguments)
        is_sure = takes_dropout and self.given.get("dropout_p", 0.0) == 0.0
        if torch.Tag.nondeterministic_seeded not in self.func.tags or is_sure:
            return ()
        if (generator := self.given.get("generator")) is not None:
            return tuple(generator.get_state().tolist())
        device = torch.device(self.given.get("device") or (self.tensors[0].device if self.tensors else "cpu"))
        state = torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        return tuple(state.tolist())


def stored_tensors(tree: object) -> list[Tensor]:
    """Return every tensor with a storage in a tree of containers; a sparse tensor counts as its indices and values."""
    return [part for tensor in tensors_in(tree) for part in _torch.strided_parts(tensor)]
