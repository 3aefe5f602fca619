"""Compare the gradients of the H200 table's models bit for bit, lean against plain.

    python -m benchmarks.ledger.bitwise --write h200_bitwise

Flash attention sums up its gradients in varying order, so two runs of plain differ on models that use it, and lean can
only be shown to be as close. With ATen's math backend of attention and deterministic algorithms two runs of plain are
equal, and lean must be equal to plain: in the recorded step, in steps that follow the trace, and with fused replays. A
row holds, for one kind of attention, how many of a model's gradients are bitwise equal in two runs of plain, and in
each step of lean to those of plain.
"""

from __future__ import annotations

import argparse
import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import leangrad
from benchmarks.environment import write_rows
from benchmarks.models import CASES, Case
from leangrad.ledger.fuse import fused

STEPS = 8


def run(case: Case) -> list[dict[str, Any]]:
    """Compare one model, at half its batch, with one kind of attention after another until two plain runs are equal."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = case.make().train()
    batch = case.batch(max(1, case.size // 2))
    rows: list[dict[str, Any]] = []
    for name, attention in _attentions().items():
        with attention:
            leangrad.plain(model)
            expected, again = _gradients(case, model, batch), _gradients(case, model, batch)
            leangrad.lean(model)
            equal = [_equal(expected, _gradients(case, model, batch)) for _ in range(STEPS)]
        plain = _equal(expected, again)
        row = {"case": case.name, "attention": name, "gradients": len(expected), "plain_equal": plain}
        rows.append({**row, "lean_equal": equal, "fused_launches": fused.report()["launches"]})
        print(rows[-1], flush=True)
        if plain == len(expected):
            break
    return rows


def _attentions() -> dict[str, AbstractContextManager[Any]]:
    return {
        "as torch chooses": nullcontext(),
        "flash": sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        "written out": sdpa_kernel(SDPBackend.MATH),
    }


def _gradients(case: Case, model: nn.Module, batch: tuple[Tensor, ...]) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    with torch.autocast("cuda", torch.bfloat16) if case.autocast else nullcontext():
        loss = case.loss(model, batch)
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _equal(a: list[Tensor], b: list[Tensor]) -> int:
    return sum(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs="*", default=["llama_1b", "gpt2_medium"])
    parser.add_argument("--write", default="")
    arguments = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    warnings.simplefilter("ignore")  # for ops without a deterministic form; running plain twice shows their effect
    torch.use_deterministic_algorithms(True, warn_only=True)
    rows = [row for case in CASES if case.name in arguments.case for row in run(case)]
    if arguments.write:
        write_rows(arguments.write, "cuda", rows)


if __name__ == "__main__":
    main()
