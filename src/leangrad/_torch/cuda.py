"""Streams, devices and kernels of CUDA."""

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor


def _stream_of(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _stream_of)


def raw_stream(device: torch.device) -> int:
    """The current CUDA stream of ``device`` as a number."""
    return _raw_stream(device.index)


def stream_of(tensor: Tensor) -> int:
    """The current CUDA stream of the device of ``tensor`` as a number; 0 where that is no GPU."""
    return _raw_stream(tensor.device.index) if tensor.is_cuda else 0


def compile_kernel(code: str, name: str, types: str, warps: int) -> Callable[..., None] | None:
    """`launch(blocks, stream, *arguments)` of a CUDA kernel, from its C++, on the current device; or None.

    `types` has a letter for each argument: O for an address, l for a long. None where torch has no compiler at run
    time, or no way to start what it made.
    """
    build = getattr(torch.cuda, "_compile_kernel", None)
    start = getattr(getattr(torch._C, "_StaticCudaLauncher", None), "_launch_kernel", None)
    if build is None or start is None:
        return None
    try:
        kernel = build(code, name)
        function = int(kernel.func.value)
    except (AttributeError, ImportError, OSError, RuntimeError, TypeError):
        return None

    def launch(blocks: int, stream: int, *arguments: int) -> None:
        start(function, blocks, 1, 1, warps, 0, types, arguments, stream)

    launch.kernel = kernel  # type: ignore[attr-defined]  # its module must live as long
    return launch


# The index of the current CUDA device, and whether a graph is being captured on the current stream: what `torch.cuda`
# asks in the end, without a call of Python before it. Only where CUDA has been used.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


is_capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)


class Counters(NamedTuple):
    """What torch's caching allocator has counted on a device, in bytes."""

    allocated: int
    highest: int  # allocated, since the user last reset that
    reserved: int = 0  # taken from the device, whether allocated or not
    retries: int = 0  # how often the device had no more to give, and what was not allocated was given back to it


def cuda_counters(device: torch.device | None = None) -> Counters | None:
    """The counters of torch's caching allocator, without a device of the current one's.

    None where another allocator serves, which does not count.
    """
    try:
        stats = torch.cuda.memory_stats_as_nested_dict(device)
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        return Counters(allocated["current"], allocated["peak"], reserved["current"], stats["num_alloc_retries"])
    except (KeyError, RuntimeError):
        return None


_MOST_EVENTS = 1 << 18  # of a history: some 50 MB


def start_history() -> bool:
    """Let torch's caching allocator note each allocation; False where it cannot, or does so for somebody else.

    Nor while a graph is captured, whose allocations are another allocator's business. What torch does in it for
    annotations it does in all threads: what is done in one could not be ended from another.
    """
    try:
        if is_capturing() or torch._C._cuda_isHistoryEnabled():
            return False
        record = torch.cuda.memory._record_memory_history
        options = {"global_record_annotations": True} if _annotates(record) else {}
        record("all", context=None, stacks="python", max_entries=_MOST_EVENTS, **options)
    except (AttributeError, RuntimeError, TypeError):  # a torch without it, another allocator
        return False
    return True


def _annotates(record: Callable[..., None]) -> bool:
    """Whether this torch notes annotations in a history, and can be told in which threads."""
    return "global_record_annotations" in inspect.signature(record).parameters


def mark_history(nbytes: int) -> None:
    """Allocate so many bytes on the current device and give them back; nothing where it has none left."""
    with suppress(torch.OutOfMemoryError):
        torch.cuda.caching_allocator_delete(torch.cuda.caching_allocator_alloc(nbytes))


def stop_history() -> list[tuple[bool, int]]:
    """Note no more: whether bytes were allocated or given back on the current device, and how many, in order.

    Empty where there were too many. Who has begun a history of his own meanwhile, with the stacks that ours has not,
    keeps it.
    """
    traces = torch._C._cuda_memorySnapshot(None)["device_traces"]
    if not any(event.get("frames") for events in traces for event in events):
        torch.cuda.memory._record_memory_history(None)
    events = traces[current_device()]
    if len(events) >= _MOST_EVENTS:
        return []
    actions = {"alloc": True, "free_requested": False}
    return [(actions[event["action"]], event["size"]) for event in events if event["action"] in actions]
