"""Private facts of torch's dispatcher: the dispatch mode, schemas of ops, and storages of tensors."""

from typing import Any

import torch
from torch import Tensor

python_dispatch: Any = getattr(torch.utils, "_python_dispatch", None)

# The base class of modes that see every ATen op, below autograd; `object` where torch lacks it.
DispatchMode: Any = getattr(python_dispatch, "TorchDispatchMode", object)


def missing_dispatch_names() -> list[str]:
    """Return the names used in this file that torch lacks; without them no step can be recorded op by op."""
    add, tensor = torch.ops.aten.add.Tensor, torch.ones((), device="cpu")
    wanted = {
        "torch.utils._python_dispatch.TorchDispatchMode": DispatchMode is not object,
        "OpOverload._schema": hasattr(getattr(add, "_schema", None), "arguments"),
        "UntypedStorage._cdata": hasattr(tensor.untyped_storage(), "_cdata"),
    }
    return [name for name, there in wanted.items() if not there]


def schema(op: Any) -> Any:
    """Return an ATen op's schema: name, arguments and returns, which are changed in place and which are views."""
    return op._schema


def storage_address(tensor: Tensor) -> int:
    """Return the address of a tensor's C++ storage object, which identifies the storage while it is alive."""
    return int(tensor.untyped_storage()._cdata)


def strided_parts(tensor: Tensor) -> list[Tensor]:
    """Return the tensors whose storages hold a tensor's data: itself, or the indices and values of a sparse tensor."""
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]
