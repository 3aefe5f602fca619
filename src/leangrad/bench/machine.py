"""The hardware and the versions that a row is measured with."""

import importlib.metadata
import platform
from typing import Any

import torch

__all__ = ["describe_machine"]

_PEERS = ("transformers", "timm", "torchvision", "liger-kernel", "cut-cross-entropy", "inplace-abn", "triton")


def describe_machine(device: str) -> dict[str, Any]:
    """Return the hardware and the versions of torch, Python and installed peers, for a device such as "cuda:0".

    >>> describe_machine("cpu")["torch"] == torch.__version__
    True
    """
    on_gpu = device.startswith("cuda")
    found = {
        "hardware": torch.cuda.get_device_name() if on_gpu else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    for package in _PEERS:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
