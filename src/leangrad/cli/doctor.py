"""Checks of this machine: versions, devices, and whether anything makes leangrad fall back to plain PyTorch."""

import importlib.metadata
import os
import platform
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import leangrad
from leangrad import _torch
from leangrad.engine.ownership import owned
from leangrad.switch import NAME, disabled

__all__ = ["Finding", "examine"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    - `name`, `found`: what was checked, and the result.
    - `good`: whether the result is as it should be.
    - `hint`: what to do about it, or what follows from it; "" if there is nothing to say.
    """

    name: str
    found: str
    good: bool = True
    hint: str = ""


def examine() -> list[Finding]:
    """Return the findings on the off switch, versions, devices, torch's private names, ownership and CPU allocator.

    >>> [finding.name for finding in examine()][:3]
    ['leangrad', 'torch', 'Python']
    """
    return [
        Finding("leangrad", leangrad.__version__),
        *_switch(),
        _torch_version(),
        Finding("Python", f"{platform.python_version()} ({platform.system()} {platform.machine()})"),
        Finding("Triton", _version("triton")),
        Finding("device", _devices()),
        Finding("threads", f"{torch.get_num_threads()} for ops, {os.cpu_count()} cores"),
        _private_names(),
        _ownership(),
        *_allocator(),
    ]


def _switch() -> list[Finding]:
    if not disabled():
        return []
    hint = f"take {NAME} out of the environment, or set it to 0, to let leangrad work again"
    return [Finding("switch", f"{NAME}={os.environ[NAME]}: everything runs plain", False, hint)]


def _torch_version() -> Finding:
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    return Finding("torch", torch.__version__, release >= (2, 11), "leangrad needs torch 2.11 or newer")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed; it is used on GPUs only"


def _devices() -> str:
    if not torch.cuda.is_available():
        return "CPU"
    return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def _private_names() -> Finding:
    names = _torch.private_names()
    missing = [name for name, there in names.items() if not there]
    return Finding(
        "private torch names",
        f"{len(names) - len(missing)} of {len(names)} are there",
        not missing,
        f"missing: {', '.join(missing)}; without them leangrad does what plain PyTorch does",
    )


class _Ask(torch.autograd.Function):
    """The identity; its backward appends to ``answers`` whether `owned` says that the gradient is owned."""

    answers: list[bool]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        _Ask.answers.append(owned(grad))
        return grad * 1


def _ownership() -> Finding:
    """Check `owned` on a gradient without other references, and on one that another branch of the graph reads too."""
    _Ask.answers = []
    x = torch.ones(4, 4, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `owned` warns if it cannot tell; the finding below reports that
        (_Ask.apply(x) * 2).sum().backward()
        h = x * 1
        ((h + _Ask.apply(h)) * 2).sum().backward()
    if _Ask.answers == [True, False]:
        return Finding("ownership", "gradients that nobody else sees are told from shared ones")
    if _Ask.answers == [False, False]:
        hint = "every gradient is copied instead of overwritten: results are the same, memory is not saved"
        return Finding("ownership", "cannot be told on this build of Python and torch", False, hint)
    return Finding("ownership", f"WRONG: the test gave {_Ask.answers}", False, "please report this with these versions")


def _allocator() -> list[Finding]:
    # Only torch's wheels for Linux on ARM use mimalloc.
    if (platform.system(), platform.machine()) != ("Linux", "aarch64"):
        return []
    delay = os.environ.get("MIMALLOC_PURGE_DELAY")
    hint = "with MIMALLOC_PURGE_DELAY=-1 set before Python starts, freed memory is used again without page faults"
    found = "MIMALLOC_PURGE_DELAY is not set" if delay is None else f"MIMALLOC_PURGE_DELAY={delay}"
    return [Finding("CPU memory", found, hint="" if delay == "-1" else hint)]
