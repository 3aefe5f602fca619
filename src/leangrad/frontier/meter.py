"""Measure how much memory a step uses on the device of the model.

[Note: what a peak counts] On a GPU the peak is what `torch.cuda.max_memory_allocated` would show if only this model,
its batch, its gradients and the state of its optimizer were on the device. The bytes of other tensors there are
subtracted from it, and added again to the budget that is passed to `lean`, because that budget counts the whole device.
On a CPU, where torch does not count the tensors of the process, the peak is `leangrad.measure(step).peak_bytes`: the
memory that the step uses above what was allocated before it.
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

_BLOCK = 512  # bytes; the caching allocator rounds sizes up to multiples of this

Step = Callable[[Callable[[], object]], object]  # a step; it calls its argument when backward begins


@dataclass(frozen=True)
class Reading:
    """The memory of one step: its peak, and the bytes that it has allocated and still holds when backward begins."""

    peak_bytes: int
    kept_bytes: int


class Meter:
    """Counts the memory of steps on a CPU, and on any device that torch's profiler supports."""

    is_free = False  # whether measuring a step takes no extra time; here it takes a fraction of a second

    def read(self, step: Step) -> Reading:
        """Run a step and return its memory."""
        measurement = measure(lambda: step(lambda: None), timed_runs=0)
        return Reading(measurement.peak_bytes, measurement.kept_bytes)

    def budget_for(self, peak_bytes: int) -> int:
        """Return the budget to pass to `lean` for a peak of ``peak_bytes``; see [Note: what a peak counts]."""
        return peak_bytes

    def peak_at(self, budget: int) -> int:
        """Return the peak that a budget of `lean` corresponds to: the inverse of `budget_for`."""
        return budget

    def capacity(self) -> int | None:
        """Return the largest peak that the device has room for; None if that is not known."""
        return None

    def count_off(self, nbytes: int) -> None:
        """Subtract ``nbytes``, which do not belong to the steps, from the peaks of all later steps.

        This class does nothing: its peaks do not include what was allocated before a step.
        """

    def standing_bytes(self) -> int:
        """Return the bytes that are allocated on the device now; 0 where they are not counted."""
        return 0

    def synchronize(self) -> None:
        """Wait for the device."""

    def release(self) -> None:
        """Free the memory that steps have left behind."""
        gc.collect()


class CudaMeter(Meter):
    """Counts the memory of steps on a GPU. The device's peak statistics are reset."""

    is_free = True

    def __init__(self, device: torch.device, model: nn.Module, batch: Any) -> None:
        self._device = device
        self._offset = torch.cuda.memory_allocated(device) - bytes_on(device, model, batch)

    def read(self, step: Step) -> Reading:
        """Run a step and return its memory."""
        self.synchronize()
        start = torch.cuda.memory_allocated(self._device)
        at_backward: list[int] = []
        torch.cuda.reset_peak_memory_stats(self._device)
        step(lambda: at_backward.append(torch.cuda.memory_allocated(self._device)))
        self.synchronize()
        kept = max(0, at_backward[0] - start) if at_backward else 0
        return Reading(torch.cuda.max_memory_allocated(self._device) - self._offset, kept)

    def budget_for(self, peak_bytes: int) -> int:
        """Return the budget to pass to `lean` for a peak of ``peak_bytes``; see [Note: what a peak counts]."""
        return peak_bytes + self._offset

    def peak_at(self, budget: int) -> int:
        """Return the peak that a budget of `lean` corresponds to: the inverse of `budget_for`."""
        return budget - self._offset

    def capacity(self) -> int | None:
        """Return the largest peak that the device has room for."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + torch.cuda.memory_reserved(self._device) - self._offset

    def count_off(self, nbytes: int) -> None:
        """Subtract ``nbytes``, which do not belong to the steps, from the peaks of all later steps."""
        self._offset += nbytes

    def standing_bytes(self) -> int:
        """Return the bytes that are allocated on the device now."""
        gc.collect()
        return torch.cuda.memory_allocated(self._device)

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)

    def release(self) -> None:
        """Free the memory that steps have left behind, including the caching allocator's unused blocks."""
        gc.collect()
        torch.cuda.empty_cache()


def meter_for(model: nn.Module, batch: Any) -> Meter:
    """Return the meter for the device of the model's first parameter."""
    device = next(model.parameters()).device
    return CudaMeter(device, model, batch) if device.type == "cuda" else Meter()


def bytes_on(device: torch.device, *roots: Any) -> int:
    """Return the bytes of the tensors in models, batches and other nested structures on a device.

    A storage that several tensors share counts once; sizes are rounded up to the allocator's blocks.
    """
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
