"""`python -m benchmarks --readme` writes the tables and pictures of README and docs/bench.md from the committed rows.

Each table is between two comments, `<!-- rows: NAME -->` and `<!-- end -->`. `tests/bench/test_pages.py` generates all
of them again and fails if a page differs.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.bench.cases import FULL, SMALL, TABLE
from benchmarks.bench.pictures import curves, dots
from benchmarks.bench.side_by_side import AXES, SCALED
from benchmarks.environment import RESULTS
from leangrad.bench import WAYS

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/bench.md")
CPU, GPU = "side_by_side_cpu", "side_by_side_h200"
NAMES = {"resnet50": "ResNet-50", "vit_l": "ViT-L/16", "gpt2_medium": "GPT-2 medium", "llama_1b": "Llama 1B shape"}
TITLES = {
    "plain": "plain",
    "checkpoint": "checkpoint per block",
    "selective": "selective checkpoint",
    "save_on_cpu": "`save_on_cpu`",
    "compile": "`torch.compile`",
    "compile_budget": "the same, torch's budget 0.5",
    "lean": "**`lean`**",
    "lean_budget": "**`lean`, budget: the checkpoint's peak**",
    "no_logits": "**`lean`, `exact=False`**",
    "compile_leangrad": '**`torch.compile`, `backend="leangrad"`**',
    "convert_abn": "**`convert_abn`**",
    "packed": "**`pack_gradients`**",
    "liger": "Liger",
    "cce": "Apple's CCE",
    "inplace_abn": "inplace_abn",
}
GIB = 2**30


def rows_in(name: str) -> list[dict[str, Any]]:
    """Return the rows of the results file ``name``."""
    found: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return found


def row_in(name: str, **keys: Any) -> dict[str, Any] | None:
    """Return the first row of a results file with these values, or None."""
    return next((row for row in rows_in(name) if keys.items() <= row.items()), None)


# ------------------------------------------------------------------------------------------------------------- one H200


BUDGETS, CAPTURED = "budgets_h200", "captured_h200"
Cell = tuple[float, float] | None  # peak above state in GiB, and time over plain; None: there is no row


def h200_cell(way: str, case: str) -> Cell:
    """Return the peak above state in GiB and the time over plain, of one model trained in one way on an H200.

    State is the model's parameters and the optimizer's state.
    """
    plain = row_in("h200_models", case=case)
    assert plain is not None
    above = plain["plain"]["peak_gib"]

    def of_budgets(file: str, **keys: Any) -> Cell:
        """Peaks in these files include the state; its size is the plain peak there minus ``above``, for all ways."""
        base, row = row_in(file, case=case, way="plain"), row_in(file, case=case, **keys)
        if base is None or row is None or "peak" not in row:
            return None
        return above - (base["peak"] - row["peak"]) / GIB, row["ms"] / base["ms"]

    def of_run(name: str, **keys: Any) -> Cell:
        """A way whose rows are in ``CAPTURED``, all from one machine; of a case that is not there, as `of_budgets`."""
        base, row = (row_in(CAPTURED, case=case, way=one) for one in ("plain", name))
        if base is None or row is None:
            return of_budgets(BUDGETS, way=name, **keys)
        return row["peak_gib"] - row["standing_gib"], row["ms"] / base["ms"]

    def of_compiled(name: str) -> Cell:
        row, base = row_in("compiled_h200", case=case, way=name), row_in(BUDGETS, case=case, way="plain")
        return None if row is None or base is None or "ms" not in row else (row["peak_gib"], row["ms"] / base["ms"])

    def of_loss(name: str) -> Cell:
        base, row = (row_in("loss_models_h200", case=case, way=one) for one in ("plain", name))
        return None if base is None or row is None or "ms" not in row else (row["peak_gib"], row["ms"] / base["ms"])

    def of_abn() -> Cell:
        title = "ResNet-50 training step, 192 x 224 x 224, bfloat16 autocast, channels_last"
        row = row_in("abn_h200", case=title) if case == "resnet50" else None
        return None if row is None else (row["lean_peak_gib"], row["time_ratio"])

    sources: dict[str, Callable[[], Cell]] = {
        "plain": lambda: of_run("plain"),
        "checkpoint": lambda: of_run("checkpoint"),
        "selective": lambda: of_budgets("budgets_peers_h200", way="selective"),
        "save_on_cpu": lambda: of_budgets("budgets_peers_h200", way="save_on_cpu"),
        "compile": lambda: of_compiled("compile"),
        "compile_budget": lambda: of_compiled("budget"),
        "lean": lambda: of_run("lean"),
        "lean_budget": lambda: of_run("budget", at="checkpoint's peak"),
        "no_logits": lambda: of_loss("lean, exact=False"),
        "compile_leangrad": lambda: of_compiled("leangrad"),
        "convert_abn": of_abn,
        "liger": lambda: of_loss("liger"),
    }
    return sources[way]() if way in sources else None


def refusal(way: str, case: str) -> str:
    """Return the text of a cell without figures: "refused" if lean refused its budget, a dash if there is no row."""
    row = row_in(BUDGETS, case=case, way="budget", at="checkpoint's peak") if way == "lean_budget" else None
    return "refused" if row is not None and "error" in row else "–"


def h200_table() -> str:
    """Return the table of the four models on a GPU, with a line for each way."""
    lines = [["one H200: peak above state, GiB · time / plain", *(NAMES[case] for case in TABLE)]]
    for way in WAYS:
        cells = [h200_cell(way, case) for case in TABLE]
        if any(cells):
            shown = [
                f"{cell[0]:.2f} · {cell[1]:.2f}" if cell else refusal(way, case)
                for cell, case in zip(cells, TABLE, strict=True)
            ]
            lines.append([TITLES[way], *shown])
    return markdown(lines)


def timm_sentence() -> str:
    """Return a sentence with the median peak and kernel time of leangrad's compile backend on the models of timm."""
    rows = [row for row in rows_in("compiled_h200") if row["way"] == "leangrad" and row["case"] not in TABLE]
    peak, kernels = (statistics.median(row[key] for row in rows) for key in ("peak_gib_ratio", "device_ms_ratio"))
    return (
        f'Over {len(rows)} models of timm that are compiled, `backend="leangrad"` takes {peak:.2f} of '
        f"`inductor`'s peak and {kernels:.2f} of its kernels' time (medians, batch 128)."
    )


# ---------------------------------------------------------------------------------------------------------------- a CPU


def side_by_side(name: str) -> list[dict[str, Any]]:
    """Return the rows of all ways on all models in a results file, without those that show how peaks grow."""
    return [row for row in rows_in(name) if "axis" not in row]


def cpu_rows() -> list[dict[str, Any]]:
    """Return the rows that were measured on a CPU."""
    return side_by_side(CPU)


def cpu_table() -> str:
    """Return a table with a line for each way on a CPU: medians over the models, and the largest gradient error."""
    heads = ["models", "peak / plain", "kept / floor", "time / plain", "gradients"]
    heads += ["batch in plain's memory, two models"]
    lines = [["ten small models, one CPU thread; medians", *heads]]
    for way in WAYS:
        mine = [row for row in cpu_rows() if row["way"] == way and row["outcome"] == "measured"]
        if not mine:
            continue
        larger = [row["largest_batch"] / row["rows"] for row in mine if "largest_batch" in row]
        lines.append(
            [
                TITLES[way],
                str(len(mine)),
                *(median(mine, key) for key in ("peak_over_plain", "kept_over_floor", "ratio")),
                error_of(mine),
                f"× {statistics.median(larger):.2f}" if larger else "–",
            ]
        )
    return markdown(lines)


def median(rows: list[dict[str, Any]], key: str) -> str:
    """Return the median of a column as text, or a dash if no row has it."""
    values = [row[key] for row in rows if key in row]
    return f"{statistics.median(values):.2f}" if values else "–"


def error_of(rows: list[dict[str, Any]]) -> str:
    """Return as text the largest error of gradients relative to plain; for the rows of plain, relative to float64."""
    if own := [row["float64_error"] for row in rows if "float64_error" in row]:
        return f"off float64's by up to {max(own):.0e}"
    told = [row for row in rows if "gradient_error" in row]
    if told and all(row.get("bitwise") for row in told):
        return "same bits"
    return f"off by up to {max(row['gradient_error'] for row in told):.0e}" if told else "–"


def cases_table(name: str, cases: Sequence[str]) -> str:
    """Return a table with a line for each model and a column for each way: peak and time, relative to plain."""
    rows = side_by_side(name)
    ways = [way for way in WAYS if way != "plain" and any(row["way"] == way and "ratio" in row for row in rows)]
    lines = [["peak · time, / plain", *(way for way in ways)]]
    for case in cases:
        found = {row["way"]: row for row in rows if row["case"] == case}
        if found:
            lines.append([case.removeprefix("timm:"), *(cell_of(found.get(way)) for way in ways)])
    return markdown(lines)


def cell_of(row: dict[str, Any] | None) -> str:
    """Return peak and time of a row as text; else its outcome, or a dash if there is no row or it does not apply."""
    if row is None or row["outcome"] == "not for this":
        return "–"
    return f"{row['peak_over_plain']:.2f} · {row['ratio']:.2f}" if "ratio" in row else row["outcome"]


def left_out(name: str) -> str:
    """Return a list of ways without figures, failures and exceeded budgets, each with the note of its row."""
    lines = []
    for way in WAYS:
        mine = [row for row in side_by_side(name) if row["way"] == way]
        if mine and all(row["outcome"] == "not for this" for row in mine) and len({row["note"] for row in mine}) == 1:
            lines.append(f"- `{way}`: {mine[0]['note']}.")
        wrong = [row for row in mine if row["outcome"] == "failed" or "above its budget" in row.get("note", "")]
        lines += [f"- `{way}` on {row['case'].removeprefix('timm:')}: {row['note'].rstrip('.')}." for row in wrong]
    return "\n".join(lines)


def machine(name: str) -> str:
    """Return a sentence with the hardware, the versions and the commits that these rows were measured with."""
    found = json.loads((RESULTS / f"{name}.json").read_text())
    commits = sorted({row.get("commit", found["commit"]) for row in found["rows"]})
    count = found["threads"]
    return (
        f"`{name}.json`: {found['hardware']}, {count} {'thread' if count == 1 else 'threads'} for each process, torch "
        f"{found['torch']}, Python {found['python']}, commit {' and '.join(commits)}."
    )


def markdown(lines: list[list[str]]) -> str:
    """Return rows of text as a Markdown table; the first row is its head."""
    head, *body = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *body])


# ------------------------------------------------------------------------------------------------------------ the pages

PARTS: dict[str, Callable[[], str]] = {
    "h200": h200_table,
    "timm": timm_sentence,
    "cpu": cpu_table,
    "cases": partial(cases_table, CPU, SMALL),
    "left out": partial(left_out, CPU),
    "machine": partial(machine, CPU),
    "gpu cases": partial(cases_table, GPU, FULL),
    "gpu left out": partial(left_out, GPU),
    "gpu machine": partial(machine, GPU),
}


def pictures() -> dict[str, str]:
    """Return the pictures as SVG text, by the names of their files."""
    rows = cpu_rows()
    ways = [way for way in WAYS if way != "plain" and any(row["way"] == way and "ratio" in row for row in rows)]
    grown = [row for row in rows_in(CPU) if "axis" in row]
    return {
        "side_by_side_cpu.svg": dots(
            "Ten small models on a CPU: a dot each, a bar at the median; blue is leangrad", rows, ways
        ),
        "scaling_cpu.svg": curves(
            "The peak of a small GPT as it grows, over plain's before", grown, ("plain", *SCALED), list(AXES.values())
        ),
    }


def filled(page: str) -> str:
    """Return the text of a page with its generated parts made anew."""

    def fill(match: re.Match[str]) -> str:
        return f"<!-- rows: {match[1]} -->\n{PARTS[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- rows: ([\w ]+) -->\n.*?<!-- end -->", fill, (ROOT / page).read_text(), flags=re.DOTALL)


def write_all() -> None:
    """Write the pages and the pictures."""
    for page in PAGES:
        (ROOT / page).write_text(filled(page))
    for name, content in pictures().items():
        (RESULTS / name).write_text(content)
