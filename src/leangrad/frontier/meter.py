"""How much memory a step takes, on the device that the model is on.

[Note: what a peak counts] On a GPU the peak is what `torch.cuda.max_memory_allocated` would show if this model, its
batch, its gradients and the state of its optimizer were alone on the device: other tensors that stand there are taken
off, and added again to the budget that `lean` is told, which means the whole device. On a CPU, where nobody counts the
process's tensors, it is `leangrad.measure(step).peak_bytes`: what the step takes above what stood before it.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leangrad.measure import measure
from leangrad.trees import tensors_in

__all__ = ["CudaMeter", "Meter", "Reading", "meter_for"]

_BLOCK = 512  # the caching allocator's unit

Step = Callable[[Callable[[], object]], object]  # called with what is to be called when backward begins


@dataclass(frozen=True)
class Reading:
    """The memory of one step: its peak, and what is kept when backward begins."""

    peak_bytes: int
    kept_bytes: int


class Meter:
    """Counts the memory of steps on a CPU, and on any device that torch's profiler knows."""

    is_free = False  # measuring takes a fraction of a second

    def read(self, step: Step) -> Reading:
        """Run a step and count."""
        measurement = measure(lambda: step(lambda: None), timed_runs=0)
        return Reading(measurement.peak_bytes, measurement.kept_bytes)

    def budget_for(self, peak_bytes: int) -> int:
        """The budget that `lean` has to be told for a peak of so many bytes."""
        return peak_bytes

    def peak_at(self, budget: int) -> int:
        """The peak that a budget of `lean` means."""
        return budget

    def capacity(self) -> int | None:
        """The largest peak that the device has room for; None if nobody can tell."""
        return None

    def count_off(self, nbytes: int) -> None:
        """Take so many bytes that have nothing to do with the step off its peak."""

    def standing_bytes(self) -> int:
        """What is allocated now."""
        return 0

    def synchronize(self) -> None:
        """Wait for the device."""

    def release(self) -> None:
        """Give back what steps have left."""
        gc.collect()


class CudaMeter(Meter):
    """Counts the memory of steps on a GPU. The device's peak statistics are reset."""

    is_free = True

    def __init__(self, device: torch.device, model: nn.Module, batch: Any) -> None:
        self._device = device
        self._offset = torch.cuda.memory_allocated(device) - bytes_on(device, model, batch)

    def read(self, step: Step) -> Reading:
        """Run a step and count."""
        self.synchronize()
        start = torch.cuda.memory_allocated(self._device)
        at_backward: list[int] = []
        torch.cuda.reset_peak_memory_stats(self._device)
        step(lambda: at_backward.append(torch.cuda.memory_allocated(self._device)))
        self.synchronize()
        kept = max(0, at_backward[0] - start) if at_backward else 0
        return Reading(torch.cuda.max_memory_allocated(self._device) - self._offset, kept)

    def budget_for(self, peak_bytes: int) -> int:
        """The budget that `lean` has to be told for a peak of so many bytes."""
        return peak_bytes + self._offset

    def peak_at(self, budget: int) -> int:
        """The peak that a budget of `lean` means."""
        return budget - self._offset

    def capacity(self) -> int | None:
        """The largest peak that the device has room for."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + torch.cuda.memory_reserved(self._device) - self._offset

    def count_off(self, nbytes: int) -> None:
        """Take so many bytes that have nothing to do with the step off its peak."""
        self._offset += nbytes

    def standing_bytes(self) -> int:
        """What is allocated now."""
        gc.collect()
        return torch.cuda.memory_allocated(self._device)

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)

    def release(self) -> None:
        """Give back what steps have left."""
        gc.collect()
        torch.cuda.empty_cache()


def meter_for(model: nn.Module, batch: Any) -> Meter:
    """The meter of the device that the first parameter of the model is on."""
    device = next(model.parameters()).device
    return CudaMeter(device, model, batch) if device.type == "cuda" else Meter()


def bytes_on(device: torch.device, *roots: Any) -> int:
    """The bytes that the tensors of models, batches and other nests take on a device, in the allocator's blocks."""
    sizes: dict[int, int] = {}
    for root in roots:
        found = [*root.parameters(), *root.buffers()] if isinstance(root, nn.Module) else tensors_in(root)
        for tensor in found:
            if tensor.device == device and _has_storage(tensor):
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = -(-storage.nbytes() // _BLOCK) * _BLOCK
    return sum(sizes.values())


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and type(tensor) in (Tensor, nn.Parameter)
