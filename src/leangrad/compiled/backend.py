"""The backend: reads the options, and compiles a graph with our partitioner, by Inductor or for eager's own kernels."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from leangrad import _torch
from leangrad._torch import compiler
from leangrad.compiled.first_step import FirstStep, Peak
from leangrad.compiled.fused_loss import fuse_losses
from leangrad.compiled.partitioner import Chosen, Partitioner, Settings, chosen
from leangrad.compiled.side_outputs import set_apart
from leangrad.errors import LeangradError
from leangrad.measure import Measurement
from leangrad.policy.choice import REUSED_READS
from leangrad.policy.kernels import LARGEST
from leangrad.sizes import parse_size
from leangrad.switch import disabled

__all__ = ["compile_lean", "read_options", "summary"]

PREFIX = "leangrad."
READS = "realize_reads_threshold"  # Inductor's name for `policy.kernels.Fusion.reused_reads`
SIZE = "max_fusion_size"  # Inductor's name for `policy.kernels.Fusion.size`


def compile_lean(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one graph that ``torch.compile(model, backend="leangrad")`` has captured.

    Equals ``backend="inductor"``, except for the choice of what forward saves for backward and for the fused loss.
    ``options`` may hold these, and Inductor's own unless ``leangrad.exact`` is set:

    ``leangrad.exact``: run eager's own kernels, so that results are bit for bit those of eager PyTorch.
    ``leangrad.slowdown``: upper bound on the time of a step, as a multiple of its time without leangrad, both as the
        policy estimates them; 1.1 by default.
    ``leangrad.budget``: upper bound on the memory of a graph's step above what is allocated before it, ``"8GB"`` for
        instance. The policy then chooses the fastest plan that fits, by its own estimates of time and memory.
    ``leangrad.fused_loss``: compute the cross entropy of a projection to a vocabulary without its logits, if nothing
        else in the graph reads them; True by default. Ignored with ``leangrad.exact``, because it rounds differently.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
    >>> compiled = torch.compile(model, backend=compile_lean, options={"leangrad.exact": True})  # or backend="leangrad"
    >>> compiled(torch.ones(2, 8)).sum().backward()
    """
    settings, _ = read_options(options or {})
    lazy = fuse_losses(gm) if settings.fused_loss and not settings.exact and not disabled() else None
    compile_graph = functools.partial(_compile, mode=mode, options=options or {})
    side = set_apart(gm, example_inputs, compile_graph)
    compiled = compile_graph(gm, example_inputs)
    compiled = compiled if side is None else side.around(compiled)
    return compiled if lazy is None else lazy.around(compiled)


def _compile(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None, options: Mapping[str, Any]
) -> Callable[..., Any]:
    """Compile one graph as it is given, without a rewrite of its losses or outputs."""
    settings, rest = read_options(options)
    if missing := compiler.missing():
        if settings.exact:
            raise LeangradError(f"torch {torch.__version__} has no {', '.join(missing)}, which leangrad.exact needs")
        _warn_of_missing(missing)
        return compiler.compile_by_inductor(gm, example_inputs, _patches(mode, rest))
    if settings.exact:
        if rest or mode:
            given = ", ".join([*rest, *([f"mode={mode!r}"] if mode else [])])
            raise ValueError(f"leangrad.exact runs eager's kernels and takes no option of Inductor's, got {given}")
        partitioner = Partitioner(settings, REUSED_READS[:1])
        return compiler.compile_op_by_op(gm, example_inputs, partitioner, _watcher(partitioner))
    patches = _patches(mode, rest)
    partitioner = Partitioner(settings, _limits(patches))
    patches["custom_partitioner_fn"] = partitioner
    size = min(LARGEST, patches.get(SIZE, compiler.inductor_setting(SIZE)))

    def of_backward() -> dict[str, Any]:
        return {READS: partitioner.reused_reads, SIZE: size}

    try:
        return compiler.compile_by_inductor(gm, example_inputs, patches, of_backward, _watcher(partitioner))
    except Exception as error:
        if not compiler.is_inductors(error):
            raise
        del patches["custom_partitioner_fn"]
        chosen[:] = [one for one in chosen if one is not partitioner.chosen]
        compiled = compiler.compile_by_inductor(gm, example_inputs, patches)  # may raise, as without leangrad
        warnings.warn(
            f"Inductor cannot compile what leangrad chose for this graph ({type(error).__name__}: "
            f"{str(error).strip().splitlines()[0]}); it is compiled with torch's own choice and keeps what that keeps",
            stacklevel=2,
        )
        return compiled


def read_options(options: Mapping[str, Any]) -> tuple[Settings, dict[str, Any]]:
    """Split ``options`` into leangrad's own settings and the rest, which is Inductor's.

    >>> read_options({"leangrad.slowdown": 1.05, "max_autotune": True})
    (Settings(exact=False, slowdown=1.05, budget=None, fused_loss=True), {'max_autotune': True})
    """
    known = {field.name: field for field in dataclasses.fields(Settings)}
    ours: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for key, value in options.items():
        if not key.startswith(PREFIX):
            rest[key] = value
            continue
        name = key.removeprefix(PREFIX)
        if name not in known:
            raise ValueError(f"unknown option {key!r}; leangrad's are {', '.join(PREFIX + k for k in known)}")
        ours[name] = value
    if ours.get("budget") is not None:
        if "slowdown" in ours:
            raise ValueError("give leangrad.budget or leangrad.slowdown, not both: each says how far to go")
        ours["budget"] = parse_size(ours["budget"], "leangrad.budget")
    if "custom_partitioner_fn" in rest:
        raise ValueError(
            'custom_partitioner_fn is what backend="leangrad" sets itself; for one of your own use backend="inductor"'
        )
    settings = Settings(**ours)
    for name in ("exact", "fused_loss"):
        if type(getattr(settings, name)) is not bool:
            raise TypeError(f"leangrad.{name}: expected True or False, got {getattr(settings, name)!r}")
    slowdown = settings.slowdown
    if isinstance(slowdown, bool) or not isinstance(slowdown, int | float) or not slowdown >= 1:
        raise ValueError(f"leangrad.slowdown: expected a number of at least 1, such as 1.1, got {slowdown!r}")
    return settings, rest


def _patches(mode: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Return Inductor's settings for ``mode`` and ``options``, as torch.compile builds them for backend="inductor"."""
    patches = dict(compiler.mode_options(mode)) if mode else {}
    known = compiler.inductor_options()
    for key, value in options.items():
        if key.replace("-", "_") not in known:
            raise ValueError(f"unknown option {key!r}: neither leangrad nor Inductor has it")
        patches[key.replace("-", "_")] = value
    return patches


def _limits(patches: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the values of ``READS`` that backward may be compiled with: only the user's, if the user has set one."""
    limit = patches.get(READS, compiler.inductor_setting(READS))
    return (limit,) if READS in patches or limit != REUSED_READS[0] else REUSED_READS


def _watcher(partitioner: Partitioner) -> compiler.Watch:
    """Return a callback that measures the first step of a graph, if the graph has a backward and runs on a GPU."""
    endings: list[Callable[[], None]] = []

    def watch(compiled: Any, arguments: Sequence[Any], is_backward: bool) -> None:
        found = partitioner.chosen
        device = next((one.device for one in arguments if isinstance(one, Tensor) and _counts(one.device)), None)
        if found is None or device is None:
            return
        if found.first_step is None:
            found.first_step = FirstStep(functools.partial(_torch.cuda_counters, device))
        first = found.first_step

        def end() -> None:
            first.end()
            for stop in tuple(endings):  # called twice if two threads run their first backward at the same time
                stop()
            endings.clear()

        before, after = (_nothing, end) if is_backward else (first.begin, _nothing)
        endings.append(compiler.around_runs(compiled, before, after))

    return watch


def _nothing() -> None:
    pass


def _counts(device: torch.device) -> bool:
    return device.type == "cuda"


@functools.cache
def _warn_of_missing(missing: tuple[str, ...]) -> None:
    warnings.warn(
        f'torch {torch.__version__} has no {", ".join(missing)}: backend="leangrad" compiles with torch\'s own '
        "partitioner and keeps what that keeps",
        stacklevel=2,
    )


def summary(measured: Measurement | None = None) -> str:
    """Return a table of the graphs compiled last: the bytes that each keeps for backward, and the policy's estimates.

    On a GPU the table also compares the measured peak of each graph's first step with the expected one, if the
    allocator's counters show it; see `leangrad.compiled.first_step`.

    measured: the measurement of a step, by `leangrad.measure`. Its peak is then compared with the expected one as well.
        A step of several graphs has no expected peak, because each graph's estimate covers only that graph.

    >>> from leangrad import compiled
    >>> text = compiled.summary()
    """
    if not chosen:
        return "no graph with a backward was compiled in this process, or all came out of a cache"
    lines = [f"{'kept MB':>10} {'floor MB':>10} {'peak MB':>10} {'work':>6}"]
    lines += map(_row, chosen)
    if measured is not None:
        lines.append(_compared(measured.peak_bytes))
    elif not any(map(_first_peak, chosen)):
        lines.append("the measured peak of a step: compiled.summary(leangrad.measure(step))")
    return "\n".join(lines)


def _row(one: Chosen) -> str:
    choice, outcome, floor = one.choice, one.choice.outcome, one.choice.floor
    line = f"{outcome.kept_bytes / 1e6:>10.3f} {floor.kept_bytes / 1e6:>10.3f} {outcome.peak_bytes / 1e6:>10.3f}"
    line += f" {choice.slowdown:>6.3f}"
    if peak := _first_peak(one):
        line += f"  first step: {peak}"
        line += "" if peak.is_bound else f", {peak.nbytes / max(outcome.peak_bytes, 1):.3f} times the expected peak"
    if one.fused_losses:
        line += "  the loss is computed without logits"
    if choice.is_held_back:
        line += f"  {choice.lowest.peak_bytes / 1e6:.3f} MB would take {choice.lowest_slowdown:.2f} times the work"
        line += "; raise leangrad.slowdown for it"
    return line


def _first_peak(one: Chosen) -> Peak | None:
    return one.first_step.peak if one.first_step is not None else None


def _compared(peak_bytes: int) -> str:
    line = f"measured peak: {peak_bytes / 1e6:.3f} MB, "
    if len(chosen) > 1:
        return line + f"not compared: {len(chosen)} graphs were compiled, and each knows only its own peak"
    expected = chosen[0].choice.outcome.peak_bytes
    return line + f"{peak_bytes / max(expected, 1):.3f} times the expected one"
