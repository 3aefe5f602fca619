"""What torch's dispatcher shows: the mode that sees every ATen op, schemas, and which storage a tensor has."""

from typing import Any

import torch
from torch import Tensor

python_dispatch: Any = getattr(torch.utils, "_python_dispatch", None)

# The class of modes that see every ATen op, below autograd; a class without such power where torch has none.
DispatchMode: Any = getattr(python_dispatch, "TorchDispatchMode", object)


def missing_dispatch_names() -> list[str]:
    """What of this file torch does not have: without it no step can be recorded op by op."""
    add, tensor = torch.ops.aten.add.Tensor, torch.ones((), device="cpu")
    wanted = {
        "torch.utils._python_dispatch.TorchDispatchMode": DispatchMode is not object,
        "OpOverload._schema": hasattr(getattr(add, "_schema", None), "arguments"),
        "UntypedStorage._cdata": hasattr(tensor.untyped_storage(), "_cdata"),
    }
    return [name for name, there in wanted.items() if not there]


def schema(op: Any) -> Any:
    """The schema of an ATen op: its name, arguments and returns, with what it changes in place and what are views."""
    return op._schema


def storage_address(tensor: Tensor) -> int:
    """The address of a tensor's storage object, by which it is told from others while it lives."""
    return int(tensor.untyped_storage()._cdata)


def strided_parts(tensor: Tensor) -> list[Tensor]:
    """The tensors with a storage that a tensor is made of: itself, or the indices and values of a sparse one."""
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]
