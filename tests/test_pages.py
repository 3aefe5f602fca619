"""The pages of the docs that users copy lines from: every block of Python runs, in order, on small models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import leangrad
from tests.support.trainers import TEXT, character_tokenizer, llama, rows

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"

Names = dict[str, Any]


def small() -> Names:
    """A model, a batch, a loss: what most pages call by these names."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64))
    x, y = torch.randn(128, 64), torch.randn(128, 64)
    loader = DataLoader(TensorDataset(x, y), batch_size=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "model": model,
        "x": x,
        "y": y,
        "criterion": nn.functional.mse_loss,
        "loader": loader,
        "optimizer": optimizer,
    }


def language() -> Names:
    model = llama()
    loader = DataLoader(rows(32), batch_size=16)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = next(iter(loader))
    return {"model": model, "dataset": rows(32), "loader": loader, "optimizer": optimizer, "batch": batch}


def trainer() -> Names:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed: the extra `trainers`")
    pytest.importorskip("trl", reason="trl is not installed: the extra `trainers`")
    lines = TEXT.read_text().splitlines()[:16]
    texts = datasets.Dataset.from_generator(lambda: ({"text": line[:30]} for line in lines), cache_dir="cache")
    return {**language(), "texts": texts, "tokenizer": character_tokenizer()}


def lightning() -> Names:
    pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed: the extra `trainers`")

    class Module(pl.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = small()["model"]

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    net = small()["model"]
    loader = DataLoader(TensorDataset(torch.randn(128, 64)), batch_size=64)
    return {"module": Module(), "net": net, "loader": loader, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1)}


def accelerate() -> Names:
    pytest.importorskip("accelerate", reason="accelerate is not installed: the extra `trainers`")
    return language()


def peft() -> Names:
    pytest.importorskip("peft", reason="peft is not installed: the extra `trainers`")
    return language()


def diffusers() -> Names:
    found = pytest.importorskip("diffusers", reason="diffusers is not installed: the extra `trainers`")
    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",), "block_out_channels": (32,)}
    unet = found.UNet2DModel(sample_size=16, in_channels=1, out_channels=1, layers_per_block=1, **blocks)
    return {
        "unet": unet,
        "loader": torch.rand(2, 4, 1, 16, 16),
        "optimizer": torch.optim.SGD(unet.parameters(), lr=0.1),
    }


def cnn() -> Names:
    body = [nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, bias=False)]
    model = nn.Sequential(*body, nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    data = TensorDataset(torch.randn(16, 3, 16, 16), torch.randint(0, 16, (16,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "model": model,
        "loader": DataLoader(data, batch_size=8),
        "optimizer": optimizer,
        "criterion": nn.functional.cross_entropy,
    }


class Blocks(nn.Module):
    """Residual blocks, each with two layers that can be split."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


def distributed() -> Names:
    torch.distributed.init_process_group("gloo", init_method=f"file://{Path.cwd()}/store", rank=0, world_size=1)
    return {**small(), "make_model": Blocks, "torch": torch}


#: The page, what its reader has, and a word that its lines print.
PAGES: dict[str, tuple[Callable[[], Names], str]] = {
    "index": (small, "equal, bit for bit"),
    "out_of_memory": (small, "gelu"),
    "trainer": (trainer, "plain keeps"),
    "lightning": (lightning, "plain keeps"),
    "accelerate": (accelerate, "plain keeps"),
    "peft": (peft, "plain keeps"),
    "diffusers": (diffusers, "plain keeps"),
    "cnns": (cnn, "convert_abn converted 2 of 2 batch norms"),
    "distributed": (distributed, "plain keeps"),
    "measure": (small, "the floor"),
    "bench": (dict, ""),
    "report": (small, "A step peaks at"),
    "limits": (small, ""),
    "platforms": (dict, ""),
    "faq": (small, ""),
    "reference": (dict, "convert_abn converted 1 of 1 batch norms"),
}
ELSEWHERE = {"budget", "compile", "cuda_graphs", "how_it_works", "loss"}  # in test_docs, or beside what they tell of


def code_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), flags=re.DOTALL)


def test_every_page_is_run() -> None:
    assert {path.stem for path in DOCS.glob("*.md")} == {*PAGES, *ELSEWHERE}


def test_the_site_has_every_page() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert sorted(re.findall(r": (\w+)\.md$", nav, flags=re.MULTILINE)) == sorted([*PAGES, *ELSEWHERE])


@pytest.mark.filterwarnings("ignore::UserWarning")  # other people's trainers warn of small data
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.usefixtures("backend_name", "nothing_left")
@pytest.mark.parametrize("page", PAGES)
def test_lines_to_copy_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    reader, expected = PAGES[page]
    names = reader()
    blocks = code_of(page)
    assert bool(blocks) == (page != "platforms")
    for n, block in enumerate(blocks):
        exec(compile(block, f"{page}.md, block {n + 1}", "exec"), names)
    assert expected in capsys.readouterr().out


# Figures


def row(file: str, **keys: Any) -> dict[str, Any]:
    """The one row with these values."""
    found = [one for one in json.loads((RESULTS / file).read_text())["rows"] if keys.items() <= one.items()]
    assert len(found) == 1, (file, keys)
    return found[0]


def model_row(case: str) -> tuple[str, str, str]:
    one = row("h200_models.json", case=case)
    plain, lean = one["plain"], one["lean"]
    peak = f"{plain['peak_gib']:.2f} → {lean['peak_gib']:.2f} GiB"
    return peak, f"{plain['ms_in_a_row']:.0f} → {lean['ms_in_a_row']:.0f} ms", f"`h200_models.json`, {case}"


def compiled_row(case: str) -> tuple[str, str, str]:
    stock, ours = (row("compiled_h200.json", case=case, way=way) for way in ("compile", "leangrad"))
    peak = f"{stock['peak_gib']:.2f} → {ours['peak_gib']:.2f} GiB"
    return peak, f"{stock['ms']:.0f} → {ours['ms']:.0f} ms", f"`compiled_h200.json`, {case}"


def loss_row() -> tuple[str, str, str]:
    plain, lazy = (row("loss_models_h200.json", case="llama_1b", way=way) for way in ("plain", "lean, exact=False"))
    peak = f"{plain['peak_gib']:.2f} → {lazy['peak_gib']:.2f} GiB"
    return peak, f"{plain['ms']:.0f} → {lazy['ms']:.0f} ms", "`loss_models_h200.json`, llama_1b"


def abn_row() -> tuple[str, str, str]:
    case = "ResNet-50 training step, 192 x 224 x 224, bfloat16 autocast, channels_last"
    one = row("abn_h200.json", case=case)
    peak = f"{one['plain_peak_gib']:.2f} → {one['lean_peak_gib']:.2f} GiB"
    return peak, f"{one['plain_ms']:.0f} → {one['lean_ms']:.0f} ms", "`abn_h200.json`, ResNet-50 training step"


def budget_row(**keys: Any) -> tuple[str, str, str]:
    plain, one = row("budgets_cpu.json", case="gpt", way="plain"), row("budgets_cpu.json", case="gpt", **keys)
    peak = f"{plain['peak_bytes'] / 1e6:.1f} → {one['peak_bytes'] / 1e6:.1f} MB"
    return peak, f"{one['ratio']:.2f} of plain's", "`budgets_cpu.json`, gpt"


def packed_row() -> tuple[str, str, str]:
    rows = json.loads((RESULTS / "packed_h200.json").read_text())["rows"]
    forms = next(one["forms"] for one in rows if one["case"]["name"] == "llama-1b")
    plain, packed = forms["plain"], forms["packed"]
    temporary = f"temporary: {plain['temporary_bytes'] / 1e9:.1f} → {packed['temporary_bytes'] / 1e9:.0f} GB"
    times = [packed[part]["ratio"] for part in ("accumulate", "clip and step")]
    return (
        temporary,
        f"accumulate {times[0]:.2f}, clip and step {times[1]:.2f} of plain's",
        "`packed_h200.json`, llama-1b",
    )


def committed() -> list[tuple[str, str, str]]:
    """Peak, time and name of every row that the page quotes, as the committed files have them."""
    cases = ["gpt2_medium", "llama_1b", "vit_l", "resnet50"]
    found = [model_row(case) for case in cases] + [loss_row(), abn_row()] + [compiled_row(case) for case in cases]
    smallest = budget_row(way="lean, budget", note="the smallest")
    return [*found, smallest, budget_row(way="checkpoint"), packed_row()]


def test_every_figure_is_that_of_its_row() -> None:
    text = (DOCS / "out_of_memory.md").read_text().partition("## What each saved")[2]
    table = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `") or "→" in line]
    assert [tuple(cells[-3:]) for cells in table] == committed()


def test_the_times_of_vit_on_five_hosts() -> None:
    hosts = json.loads((RESULTS / "h200_hosts.json").read_text())["rows"]
    assert len({host["machine"] for host in hosts}) == len(hosts) == 5
    turns = [turn for host in hosts for turn in host["turns"]]
    lean, plain = ([turn[way] for turn in turns] for way in ("lean_ms", "plain_ms"))
    told = f"lean took {min(lean):.0f} to {max(lean):.0f} ms, turn by turn, where plain took {min(plain):.0f} to"
    assert f"{told} {max(plain):.0f} (`h200_hosts.json`)" in (DOCS / "out_of_memory.md").read_text()


def test_figures_of_the_page_on_cnns() -> None:
    peak, time, _ = abn_row()
    text = " ".join((DOCS / "cnns.md").read_text().split())
    assert f"{peak} and {time}; `abn_h200.json`" in text


def test_the_table_of_the_page_on_many_gpus() -> None:
    rows = json.loads((RESULTS / "sharded_cpu.json").read_text())["rows"]
    assert all(one["bits"] for one in rows)
    expected = []
    for one in rows:
        beyond = one.get("lean_beyond_gathered_bytes")
        kept = f"{one['plain_kept_bytes'] / 1e6:.2f} → {one['lean_kept_bytes'] / 1e6:.2f} MB"
        ratio = "" if beyond is None else f"{beyond / rows[0]['lean_kept_bytes']:.3f}"
        expected.append(f"| {one['way']} | {kept} | {ratio} |")
    text = (DOCS / "distributed.md").read_text().partition("## What each rank keeps")[2]
    assert [line for line in text.splitlines() if "→" in line and "MB" in line] == expected


def test_the_reference_has_every_name() -> None:
    text = (DOCS / "reference.md").read_text()
    modules = (leangrad, leangrad.errors, leangrad.nn)
    names = [name for module in modules for name in module.__all__]
    assert [name for name in names if not re.search(rf"`{name}`|`leangrad\.{name}`", text)] == []


def test_help_opens_with_what_a_user_needs() -> None:
    """Every public name in the first lines, with what it is for."""
    text = leangrad.__doc__ or ""
    assert text.splitlines()[4].strip().startswith("model = leangrad.lean(model)")
    assert [name for name in leangrad.__all__ if not re.search(rf"^    .*\b{name}\b", text, re.MULTILINE)] == []
    assert "[Note" not in text
