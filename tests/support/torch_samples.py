"""torch's own sample inputs for its ops (OpInfo) and modules (ModuleInfo), which need the package ``expecttest``.

They live in ``torch.testing._internal``: the lists differ from release to release, and so nothing here names an op.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.nn.modules.lazy import LazyModuleMixin


def _import() -> tuple[list[Any], list[Any]]:
    """The two lists; what importing them changes in torch for the whole process is undone.

    It freezes ``torch.backends`` flags and wraps calls of scripted functions.
    """
    scripted = [(kind, kind.__call__) for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod)]
    with warnings.catch_warnings(), mock.patch.object(torch.backends, "disable_global_flags"):
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.common_modules import module_db
    for kind, call in scripted:
        kind.__call__ = call
    return op_db, module_db


@functools.cache
def op_infos() -> list[Any]:
    """Every op that has gradients, by name: the same order in every process."""
    found = [op for op in _import()[0] if op.supports_autograd]
    return sorted(found, key=lambda op: (op.name, op.variant_test_name))


@functools.cache
def module_infos() -> list[Any]:
    """Every module that needs no lazy parameters, by name."""
    return sorted(
        (info for info in _import()[1] if not issubclass(info.module_cls, LazyModuleMixin)), key=lambda info: info.name
    )


def full_name(op: Any) -> str:
    """The name of an op with that of its variant."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def samples_of(op: Any, device: str, dtype: torch.dtype, count: int | None) -> Iterator[Any]:
    """The first ``count`` sample inputs of an op, or all; none if it does not have ``dtype``."""
    if dtype in op.supported_backward_dtypes(device):
        torch.manual_seed(0)
        # torch looks for a unittest among the callers, and reads the source of each of them: most of the time of this.
        with mock.patch.object(inspect, "stack", list):
            samples = op.sample_inputs(device, dtype, requires_grad=True)
        yield from itertools.islice(samples, count)


def module_samples_of(info: Any, device: str, dtype: torch.dtype, training: bool) -> list[Any]:
    """The inputs for the constructor and for the forward pass of a module."""
    if dtype not in info.supported_dtypes(device):
        return []
    torch.manual_seed(0)
    return list(info.module_inputs_func(info, device=device, dtype=dtype, requires_grad=True, training=training))
