"""Two real processes over gloo: the Trainer wraps the model in DDP, and the callback makes it lean inside of that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

pytest.importorskip("accelerate", reason="accelerate is not installed: the extra `trainers`")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
]

ROOT = Path(__file__).parent.parent.parent

SCRIPT = """
import sys

import torch
import torch.distributed as dist
from transformers import Trainer, TrainingArguments

import leangrad
from leangrad.integrations.transformers import LeanCallback
from tests.support.trainers import llama, rows

found = []
for callbacks in ([], [LeanCallback()]):
    torch.manual_seed(0)
    options = {"logging_steps": 1, "report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    args = TrainingArguments(sys.argv[1], max_steps=3, per_device_train_batch_size=4, ddp_backend="gloo", **options)
    trainer = Trainer(llama(), args, train_dataset=rows(), callbacks=callbacks)
    trainer.train()
    assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"
    assert not leangrad.is_lean(trainer.model)
    found.append([row for row in trainer.state.log_history if "loss" in row])
plain, lean = found
assert len(plain) == 3
assert [(row["loss"], row["grad_norm"]) for row in lean] == [(row["loss"], row["grad_norm"]) for row in plain]
assert all(row["lean_saved_share"] > 0.3 for row in lean)
with open(f"{sys.argv[1]}/{dist.get_rank()} of {dist.get_world_size()}", "w"):
    dist.destroy_process_group()
"""


def test_two_processes_train_like_plain(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    paths = [str(ROOT / "src"), str(ROOT), *(path for path in sys.path if path)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(tmp_path / "train.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("leangrad: LlamaForCausalLM keeps for backward only") == 1  # one process speaks
    assert {path.name for path in tmp_path.glob("* of *")} == {"0 of 2", "1 of 2"}
