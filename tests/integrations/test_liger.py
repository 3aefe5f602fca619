"""Liger's kernels in the real Trainer beside `LeanCallback`, run by Triton's interpreter.

In a process of its own: Liger patches transformers for all that comes after it. Of its kernels the interpreter runs
RoPE and the loss; its norm and its SwiGLU call a method that the interpreter's numbers do not have.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate", reason="accelerate is not installed: the extra `trainers`")
pytest.importorskip("liger_kernel", reason="liger-kernel is not installed: the extra `trainers`")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent

SCRIPT = """
import sys

import torch
from transformers import Trainer, TrainingArguments
from transformers.models.llama import modeling_llama

from leangrad.integrations.transformers import LeanCallback
from tests.support import same_bits
from tests.support.trainers import llama, rows

found = []
for callbacks in ([], [LeanCallback(min_bytes=0)]):
    torch.manual_seed(0)
    kernels = {"rope": True, "fused_linear_cross_entropy": True, "rms_norm": False, "swiglu": False}
    options = {"logging_steps": 1, "report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    options |= {"max_steps": 2, "per_device_train_batch_size": 1}
    args = TrainingArguments(sys.argv[1], use_liger_kernel=True, liger_kernel_config=kernels, **options)
    trainer = Trainer(llama(), args, train_dataset=rows(), callbacks=callbacks)
    trainer.train()
    assert "liger" in modeling_llama.apply_rotary_pos_emb.__module__
    assert "liger" in trainer.model.forward.__module__
    found.append((trainer.state.log_history[:2], [p.detach() for p in trainer.model.parameters()]))
(plain, plain_weights), (lean, lean_weights) = found
assert [(row["loss"], row["grad_norm"]) for row in lean] == [(row["loss"], row["grad_norm"]) for row in plain]
assert all(same_bits(a, b) for a, b in zip(plain_weights, lean_weights, strict=True))
assert all(row["lean_saved_share"] > 0.2 for row in lean), lean
print("trained alike")
"""


def test_ligers_kernels_and_lean_train_like_ligers_alone(tmp_path: Path) -> None:
    paths = [str(ROOT / "src"), str(ROOT), *(path for path in sys.path if path)]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "trained alike" in done.stdout
    assert "Liger's kernels keep what they need, all else is lean" in done.stdout
