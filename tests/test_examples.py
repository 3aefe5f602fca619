"""Every example runs at its small size, as a user would run it, and learns something."""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"

#: The loss that the small run must fall below; beside it, that of a model that knows nothing.
LOSSES = {
    "char_lm": 2.6,  # 4.0
    "copy_task": 0.5,  # 2.1
    "diffusion_2d": 0.92,  # 1.0
    "finetune_trainer": 3.2,  # 4.9
    "train_cnn_abn": 0.8,  # 1.1
}

#: Those that print plain beside lean, and the share of plain's peak that lean must stay below.
COMPARISONS = {"finetune_trainer": 0.75, "train_cnn_abn": 0.9}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_the_small_run_learns(name, tmp_path):
    if name == "finetune_trainer":
        pytest.importorskip("accelerate", reason="accelerate is not installed: the extra `trainers`")
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / f"{name}.py", "--small"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"loss (\d+\.\d+)", done.stdout.splitlines()[-1])
    assert found, done.stdout
    assert float(found[1]) < LOSSES[name]
    assert "100%" in done.stderr  # the progress bar
    if name in COMPARISONS:
        rows = dict(re.findall(r"│ (\w+) +│.*?│ +([\d.]+) MB", done.stdout))
        assert len(rows) == 2
        assert float(rows.pop("plain")) * COMPARISONS[name] > float(rows.popitem()[1])
    for picture in tmp_path.iterdir():
        assert picture.suffix == ".svg"
        assert len(list(ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}circle"))) == 500


def test_every_example_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(LOSSES)


def test_the_text_is_what_its_recipe_writes(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES / "data"))
    from logbook import logbook

    assert (EXAMPLES / "data" / "logbook.txt").read_text() == logbook()
