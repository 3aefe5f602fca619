"""Host time of the ledger: microseconds per saved tensor, in a model whose kernels take almost no time.

    python -m benchmarks.ledger.overhead [--device cuda] [--write overhead_cpu]

The model is twenty-four Transformer blocks on tiny tensors, so that a step consists of the host's work only. The rows
are plain, a function mode and hooks that do nothing, and two ledgers; all are timed in alternation in one process, host
time by `time.process_time`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

import leangrad
from benchmarks.environment import write_rows

ROUNDS = 15


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.up, self.down, self.dropout = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        h, _ = self.attention(h, h, h, need_weights=False)
        x = x + self.dropout(h)
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))  # type: ignore[no-any-return]


class PassThrough(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs) if kwargs else func(*args)


def measure_overhead(device: str) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(32) for _ in range(24)]).to(device)
    x = torch.randn(2, 8, 32, device=device)
    saved = 0

    def count(t: Tensor) -> Tensor:
        nonlocal saved
        saved += 1
        return t.detach()

    with saved_tensors_hooks(count, lambda t: t):
        model(x).square().mean()
    rebuilding, keeping = leangrad.saving(min_bytes=0), leangrad.saving(min_bytes=1 << 40)
    regions: dict[str, Callable[[], Any]] = {
        "plain": nullcontext,
        "a function override that does nothing": PassThrough,
        "hooks that do nothing": lambda: saved_tensors_hooks(lambda t: t.detach(), lambda t: t),
        "a ledger that keeps everything": lambda: keeping,
        "a ledger that rebuilds everything": lambda: rebuilding,
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in regions}
    for _ in range(ROUNDS + 3):
        for name, region in regions.items():
            times[name].append(_step(model, x, region))
    rows = []
    plain = [statistics.median(t[k] for t in times["plain"][3:]) for k in (0, 1)]
    for name, found in times.items():
        forward, backward = (statistics.median(t[k] for t in found[3:]) for k in (0, 1))
        rows.append(
            {
                "region": name,
                "forward_ms": forward * 1e3,
                "backward_ms": backward * 1e3,
                "microseconds_per_saved_tensor": (forward + backward - sum(plain)) * 1e6 / saved,
                "saved_tensors": saved,
            }
        )
    return rows


def _step(model: nn.Module, x: Tensor, region: Callable[[], Any]) -> tuple[float, float]:
    start = time.process_time()
    with region():
        loss = model(x).square().mean()
    middle = time.process_time()
    loss.backward()
    return middle - start, time.process_time() - middle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure_overhead(arguments.device)
    for row in rows:
        print(
            f"{row['region']:<40} forward {row['forward_ms']:7.2f} ms  backward {row['backward_ms']:7.2f} ms  "
            f"{row['microseconds_per_saved_tensor']:6.1f} us per saved tensor"
        )
    if arguments.write:
        write_rows(arguments.write, arguments.device, rows)


if __name__ == "__main__":
    main()
