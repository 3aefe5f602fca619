"""Activated batch norm against BatchNorm2d + activation, in one process, in alternation.

    python -m benchmarks.nn.abn --write abn_cpu                  # a residual net
    python -m benchmarks.nn.abn --device cuda --write abn_h200   # each layer of ResNet-50, whole training steps

A single layer is timed on a leaf tensor and on a copy of it. Autograd holds a leaf until backward in any case, so
InPlaceABN keeps it, as ABN does, and does not invert. The copy stands for the output of a convolution: InPlaceABN
overwrites it and inverts it in backward, after asking the device which channels can be inverted.

Each row is printed as a line of JSON; `--write` writes all rows to benchmarks/results. Ratios are lean / plain, the
median over rounds in which both run right after each other; "device" is the time of the kernels alone, without the
host.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.environment import write_rows
from leangrad.measure import measure
from leangrad.nn.abn import ABN, InPlaceABN
from leangrad.nn.convert import convert_abn

# (channels, height) of the maps of ResNet-50 at 224 x 224.
LAYERS = ((64, 112), (64, 56), (256, 56), (128, 28), (512, 28), (256, 14), (1024, 14), (512, 7), (2048, 7))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.act = nn.LeakyReLU(0.01, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.act(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        y: Tensor = self.act(out)
        return y


def residual_net(width: int, depth: int) -> nn.Module:
    stem = (nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.LeakyReLU(0.01, inplace=True))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    return nn.Sequential(*stem, *(Block(width) for _ in range(depth)), *head)


def seconds(step: Callable[[], object], device: str, repeats: int) -> float:
    """Return the seconds of one step: the mean of ``repeats`` steps that run without waiting for the device between."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def interleave(
    plain: Callable[[], object], lean: Callable[[], object], device: str, rounds: int, repeats: int = 1
) -> dict[str, float]:
    for _ in range(3):
        plain(), lean()
    pairs = []
    for i in range(rounds):  # the order alternates, so that neither is always the first
        times = {step: seconds(step, device, repeats) for step in ((plain, lean), (lean, plain))[i % 2]}
        pairs.append((times[plain], times[lean]))
    return {
        "plain_ms": 1e3 * statistics.median(p for p, _ in pairs),
        "lean_ms": 1e3 * statistics.median(q for _, q in pairs),
        "time_ratio": statistics.median(q / p for p, q in pairs),
    }


def training_step(model: nn.Module, x: Tensor, target: Tensor, optimizer: Any, autocast: bool) -> Callable[[], None]:
    def step() -> None:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)  # last, so that no gradient is allocated before the step

    return step


def cpu_row(width: int, depth: int, size: int, batch: int, rounds: int) -> dict[str, Any]:
    plain = residual_net(width, depth)
    lean = convert_abn(copy.deepcopy(plain))
    x, target = torch.randn(batch, 3, size, size), torch.randint(10, (batch,))
    steps = [training_step(m, x, target, torch.optim.SGD(m.parameters(), 1e-3), False) for m in (plain, lean)]
    times = interleave(steps[0], steps[1], "cpu", rounds)
    memory = [measure(step, timed_runs=1) for step in steps]
    return {
        "case": f"residual net, width {width}, {depth} blocks, {batch} x {size} x {size}, float32",
        **times,
        "plain_peak_bytes": memory[0].peak_bytes,
        "lean_peak_bytes": memory[1].peak_bytes,
        "plain_kept_bytes": memory[0].kept_bytes,
        "lean_kept_bytes": memory[1].kept_bytes,
        "peak_ratio": memory[1].peak_bytes / memory[0].peak_bytes,
    }


def layer_row(channels: int, height: int, batch: int, rounds: int, kind: type[ABN], copied: bool) -> dict[str, Any]:
    """Return the row of one layer alone.

    copied: the layer's input is a copy, which InPlaceABN may overwrite like a convolution's output; else it is a leaf.
    """
    plain = nn.Sequential(nn.BatchNorm2d(channels), nn.LeakyReLU(0.01, inplace=True)).cuda()
    lean = kind(channels).cuda()
    shape = (batch, channels, height, height)
    x, dz = (torch.randn(shape, device="cuda").bfloat16().to(memory_format=torch.channels_last) for _ in range(2))
    x.requires_grad_()

    def step(layer: nn.Module) -> Callable[[], None]:
        inputs = (x, *layer.parameters())

        def run() -> None:
            torch.autograd.grad(layer(x.clone() if copied else x), inputs, dz)

        return run

    # Many short rounds, because the host's time varies by a third from one tenth of a second to the next.
    times = interleave(step(plain), step(lean), "cuda", 5 * rounds, repeats=10)
    device_ms = {f"{name}_device_ms": busy_ms(step(layer)) for name, layer in (("plain", plain), ("lean", lean))}
    what = f"copy + {kind.__name__}" if copied else kind.__name__
    return {"case": f"{what} forward+backward, {shape}, bfloat16, channels_last", **times, **device_ms}


def busy_ms(step: Callable[[], object]) -> float:
    """Return the time that the device works in a step, in milliseconds: the sum of its kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        step()
        torch.cuda.synchronize()
    return float(sum(e.self_device_time_total for e in profile.key_averages())) / 1e3


def chain(width: int, depth: int, norm: Callable[[int], list[nn.Module]]) -> nn.Module:
    """Return a chain of convolution + norm + activation; each of four stages halves the map and doubles the width."""
    layers: list[nn.Module] = []
    channels = 3
    for stage in range(4):
        for i in range(depth):
            out = width << stage
            layers += [nn.Conv2d(channels, out, 3, stride=2 if i == 0 else 1, padding=1, bias=False), *norm(out)]
            channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


def chain_row(batch: int, size: int, rounds: int) -> dict[str, Any]:
    """Return the row of a model in which each norm follows a convolution, as in-place norms are used."""
    plain = chain(64, 5, lambda c: [nn.BatchNorm2d(c), nn.LeakyReLU(0.01, inplace=True)])
    lean = chain(64, 5, lambda c: [InPlaceABN(c)])
    lean.load_state_dict(dict(zip(lean.state_dict(), plain.state_dict().values(), strict=True)))
    case = f"20 x (convolution + InPlaceABN) training step, {batch} x {size} x {size}, bfloat16 autocast, channels_last"
    return {"case": case} | model_figures(plain, lean, batch, size, rounds)


def resnet50_row(batch: int, rounds: int) -> dict[str, Any]:
    import torchvision

    plain = torchvision.models.resnet50()
    lean = convert_abn(copy.deepcopy(plain))
    case = f"ResNet-50 training step, {batch} x 224 x 224, bfloat16 autocast, channels_last"
    return {"case": case} | model_figures(plain, lean, batch, 224, rounds)


def model_figures(plain: nn.Module, lean: nn.Module, batch: int, size: int, rounds: int) -> dict[str, Any]:
    """Return time, device time and peak of a training step, plain and lean, and the ratios."""
    models: list[Any] = [plain, lean]
    models = [m.cuda().to(memory_format=torch.channels_last) for m in models]
    x = torch.randn(batch, 3, size, size, device="cuda").to(memory_format=torch.channels_last)
    target = torch.randint(1000, (batch,), device="cuda")
    steps = [training_step(m, x, target, torch.optim.AdamW(m.parameters(), fused=True), True) for m in models]
    row: dict[str, Any] = interleave(steps[0], steps[1], "cuda", rounds, repeats=4)
    for name, step in zip(("plain", "lean"), steps, strict=True):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        row[f"{name}_peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
        row[f"{name}_device_ms"] = busy_ms(step)
    return {**row, "peak_ratio": row["lean_peak_gib"] / row["plain_peak_gib"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch", type=int, default=None, help="images; 8 on the CPU, 192 on CUDA")
    parser.add_argument("--only", choices=("layers", "model"), help="CUDA: one part only")
    parser.add_argument("--write", default="", help="the name of a file in benchmarks/results")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows: list[Callable[[], dict[str, Any]]] = []
    batch = options.batch or (8 if options.device == "cpu" else 192)
    if options.device == "cpu":
        rows.append(lambda: cpu_row(width=128, depth=16, size=16, batch=batch, rounds=options.rounds))
    else:
        if options.only != "model":
            for kind, copied in ((InPlaceABN, False), (InPlaceABN, True), (ABN, False)):
                rows += [partial(layer_row, c, h, batch, options.rounds, kind, copied) for c, h in LAYERS]
        if options.only != "layers":
            rows += [partial(chain_row, images, size, options.rounds) for images, size in ((batch, 224), (16, 64))]
            rows.append(lambda: resnet50_row(batch, options.rounds))
    done = []
    for make in rows:
        done.append(make())
        print(json.dumps(done[-1]), flush=True)
    if options.write:
        write_rows(options.write, options.device, done)


if __name__ == "__main__":
    main()
