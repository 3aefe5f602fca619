"""Private facts of CUDA: streams, devices, kernels, and the counters and history of its caching allocator."""

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
    """Return the current CUDA stream of ``device`` as a number."""
    return _raw_stream(device.index)


def stream_of(tensor: Tensor) -> int:
    """Return the current CUDA stream of the device of ``tensor`` as a number; 0 if that is no GPU."""
    return _raw_stream(tensor.device.index) if tensor.is_cuda else 0


def compile_kernel(code: str, name: str, types: str, warps: int) -> Callable[..., None] | None:
    """Compile a CUDA kernel from C++ for the current device; return `launch(blocks, stream, *arguments)`, or None.

    code: the C++. name: the kernel's name in it. types: a letter for each argument: O for an address, l for a long.
    warps: per block. None where torch has no compiler at run time, or cannot launch the compiled kernel.
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


# Return the index of the current CUDA device, and whether a graph is being captured on the current stream: the C
# functions that `torch.cuda` calls, without a Python call before them. To be used only after CUDA was initialized.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


is_capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)


class Counters(NamedTuple):
    """Counters of torch's caching allocator on one device, in bytes, except ``retries``."""

    allocated: int
    highest: int  # peak of ``allocated`` since the user last reset it
    reserved: int = 0  # requested from the device, allocated or not
    retries: int = 0  # how often the device had no memory left, and the allocator returned its unused memory to it


def cuda_counters(device: torch.device | None = None) -> Counters | None:
    """Return the counters of torch's caching allocator on ``device``; None: on the current device.

    Returns None if another allocator is in use, which has no counters.
    """
    try:
        stats = torch.cuda.memory_stats_as_nested_dict(device)
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        return Counters(allocated["current"], allocated["peak"], reserved["current"], stats["num_alloc_retries"])
    except (KeyError, RuntimeError):
        return None


_MOST_EVENTS = 1 << 18  # in a history: some 50 MB


def start_history() -> bool:
    """Make torch's caching allocator record a history of its allocations; returns whether it does.

    False where torch lacks it, if a history is being recorded already, or while a graph is captured, whose allocations
    another allocator makes. Torch's annotations are recorded in all threads, because a recording in one thread could
    not be ended from another.
    """
    try:
        if is_capturing() or torch._C._cuda_isHistoryEnabled():
            return False
        record = torch.cuda.memory._record_memory_history
        options = {"global_record_annotations": True} if _annotates(record) else {}
        record("all", context=None, stacks="python", max_entries=_MOST_EVENTS, **options)
    except (AttributeError, RuntimeError, TypeError):  # torch lacks a name, or another allocator is in use
        return False
    return True


def _annotates(record: Callable[..., None]) -> bool:
    """Whether this torch records annotations in a history and has an argument for recording them in all threads."""
    return "global_record_annotations" in inspect.signature(record).parameters


def mark_history(nbytes: int) -> None:
    """Allocate and free ``nbytes`` bytes on the current device, as a mark in the history; nothing if out of memory."""
    with suppress(torch.OutOfMemoryError):
        torch.cuda.caching_allocator_delete(torch.cuda.caching_allocator_alloc(nbytes))


def stop_history() -> list[tuple[bool, int]]:
    """End the history; return for each event on the current device whether it allocated or freed, and its bytes.

    The events are in order of time; the list is empty if there were too many. If the user has begun a history
    meanwhile, that one continues: its events have stacks, and those of `start_history` have none.
    """
    traces = torch._C._cuda_memorySnapshot(None)["device_traces"]
    if not any(event.get("frames") for events in traces for event in events):
        torch.cuda.memory._record_memory_history(None)
    events = traces[current_device()]
    if len(events) >= _MOST_EVENTS:
        return []
    actions = {"alloc": True, "free_requested": False}
    return [(actions[event["action"]], event["size"]) for event in events if event["action"] in actions]
