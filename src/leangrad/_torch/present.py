"""Checks whether this torch has the private names that leangrad uses."""

import ast
import functools
import importlib
import warnings
from pathlib import Path
from typing import Any

import torch

from leangrad._torch.dispatch import python_dispatch
from leangrad._torch.sharding import sharding_names


def private_names() -> dict[str, bool]:
    """Return every private name that this folder uses, except in ``compiler.py``, and whether this torch has it.

    The names are read off the source, so the list is always complete. A name counts as present if any of the objects
    whose private names are used here has it. Names of CUDA are left out if torch was built without CUDA.

    >>> private_names()["_version"]
    True
    """
    tensor = torch.ones(1, requires_grad=True) * 1
    owners: list[Any] = [torch, torch._C, torch._C._autograd, torch.autograd, torch.autograd.forward_ad]
    owners += [torch.autograd.profiler, torch.overrides]
    owners += [torch.autograd.Variable, torch.autograd.graph, torch.autograd.Function, torch.nn.modules]
    owners += [
        torch.nn.Module()._replicate_for_data_parallel(),
        torch.nn.modules.module,
        torch.ops.aten,
        torch.ops.aten.add.Tensor,
    ]
    owners += [tensor, tensor.untyped_storage(), tensor.grad_fn]
    owners += [
        torch.cuda,
        torch.cuda.memory,
        getattr(torch._C, "_StaticCudaLauncher", None),
        torch.utils,
        python_dispatch,
    ]
    if torch.distributed.is_available():
        owners.append(importlib.import_module("torch.distributed._composable_state"))
    there = {name for owner in owners for name in dir(owner)} | sharding_names()
    files = [path for path in Path(__file__).parent.glob("*.py") if path.stem != "compiler"]  # it has `missing`
    names = [name for path in sorted(files) for name in _private_names_in(ast.parse(path.read_text()))]
    if not torch.backends.cuda.is_built():
        names = [name for name in names if "cuda" not in name.lower() and name != "_launch_kernel"]
    return {name: name in there for name in names}


def _private_names_in(source: ast.Module) -> list[str]:
    """Return each `_name` in `x._name`, `getattr(x, "_name")` and `hasattr(x, "_name")`."""
    found: dict[str, None] = {}
    for node in ast.walk(source):
        match node:
            case ast.Attribute(value=ast.Name(id="sys")):  # Python's own
                continue
            case ast.Attribute(attr=str(name)):
                pass
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=str(name)), *_]):
                pass
            case _:
                continue
        if name.startswith("_") and not name.startswith("__"):
            found[name] = None
    return list(found)


def _missing_ledger_names() -> list[str]:
    """Return what is missing of [Note: names that are used in place], and of node names that are read here."""
    with torch.inference_mode(False), torch.enable_grad():
        tensor = torch.ones((), device="cpu", requires_grad=True) * torch.ones((), device="cpu", requires_grad=True)
    node: Any = tensor.grad_fn
    raw = getattr(node, "_raw_saved_self", None)
    wanted = {
        "Tensor": (tensor, ("_version", "_base", "_is_view")),
        "Node": (node, ("_sequence_nr", "_input_metadata", "metadata", "_saved_self", "_raw_saved_self")),
        "SavedTensor": (raw, ("data", "unpack_hook")),
    }
    return [f"{of}.{name}" for of, (owner, names) in wanted.items() for name in names if not hasattr(type(owner), name)]


_MISSING_LEDGER_NAMES = _missing_ledger_names()


@functools.cache
def ledger_names_present() -> bool:
    """Whether torch has every private name that the ledger needs; if not, warn once."""
    if _MISSING_LEDGER_NAMES:
        warnings.warn(
            f"torch {torch.__version__} has no {', '.join(_MISSING_LEDGER_NAMES)}, which leangrad's ledger needs: "
            "lean models run plain, with the same gradients and no memory saved. Use a torch that leangrad knows.",
            stacklevel=2,
        )
    return not _MISSING_LEDGER_NAMES
