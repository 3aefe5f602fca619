"""`python -m benchmarks`: which models are measured in which ways, and how their rows are written."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench import side_by_side
from benchmarks.bench.cases import FULL, SMALL, UNROLLED
from leangrad.bench import WAYS, Bench, Row


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """Every call of `bench`, answered at once; results are written to `tmp_path`."""
    calls: list[dict[str, Any]] = []

    def stand_in(target: str, ways: Any, *, name: str, **named: Any) -> Bench:
        calls.append({"ways": list(ways), "name": name, **named})
        machine = {"hardware": "ARM CPU"}
        rows = [Row(way, peak_bytes=len(calls), machine=machine) for way in WAYS if way in ("plain", *ways)]
        for n in range(len(rows)):
            named.get("found", lambda _: None)(Bench(name, tuple(rows[: n + 1])))
        return Bench(name, tuple(rows))

    monkeypatch.setattr(side_by_side, "bench", stand_in)
    monkeypatch.setattr(side_by_side, "RESULTS", tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return calls


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks", *arguments])
    side_by_side.main()


def test_the_cpu_set(asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(monkeypatch, "--write", "rows")
    content = json.loads((tmp_path / "rows.json").read_text())
    assert content["hardware"] == "ARM CPU"
    assert content["commit"]
    rows = [row for row in content["rows"] if "axis" not in row]
    assert list(dict.fromkeys(row["case"] for row in rows)) == list(SMALL)
    compiled = {row["case"] for row in rows if WAYS[row["way"]].compiles}
    assert compiled == set(side_by_side.COMPILED)
    searched = [one for one in asked if "memory" in one]
    assert [one["name"] for one in searched] == [name for name in SMALL if name in side_by_side.LARGEST]
    assert not any(WAYS[way].compiles for one in searched for way in one["ways"])
    assert len(content["rows"]) - len(rows) == 9 * 3


def test_on_a_gpu_all_ways_of_all_models_under_autocast(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(monkeypatch, "--device", "cuda")
    assert {one["name"] for one in asked} == set(FULL)
    ways = {name: {way for one in asked if one["name"] == name for way in one["ways"]} for name in FULL}
    assert all(found == set(WAYS) for name, found in ways.items() if name not in UNROLLED)
    assert all(ways[name] == set(side_by_side.EAGER) for name in UNROLLED)
    assert len({one["turnstile"] for one in asked}) == 1, "they share one device"
    assert asked[0]["turnstile"]
    assert {one["name"] for one in asked if not one["autocast"]} == {"llama_1b"}
    assert all(one["options"]["device"] == "cuda" for one in asked)


def test_without_the_search_for_the_largest_batch(asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "--no-largest", "--no-scaling")
    assert not any("memory" in one for one in asked)
    assert {one["turnstile"] for one in asked} == {""}


def test_some_rows_beside_those_of_earlier_runs(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run(monkeypatch, "--case", "vit_l", "unet", "--ways", "lean", "packed", "--write", "rows")
    run(monkeypatch, "--case", "unet", "--ways", "packed", "--keep", "--write", "rows")
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["case"], row["way"], row["peak_bytes"]) for row in rows] == [
        ("vit_l", "plain", 1),
        ("vit_l", "lean", 1),
        ("vit_l", "packed", 1),
        ("unet", "plain", 3),
        ("unet", "lean", 2),
        ("unet", "packed", 3),
    ]


def test_a_run_that_was_stopped_goes_on(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Alone, --resume keeps what there is; and plain, which runs with each way, keeps its row."""
    run(monkeypatch, "--case", "resnet50", "--ways", "checkpoint", "lean", "--resume", "--write", "rows")
    before = json.loads((tmp_path / "rows.json").read_text())["rows"]
    asked.clear()
    run(monkeypatch, "--case", "resnet50", "--ways", "lean", "compile", "lean_budget", "--resume", "--write", "rows")
    assert [one["ways"] for one in asked] == [["lean_budget"], ["compile"]]
    assert {one["budget"] for one in asked} == {1}  # the checkpoint's peak
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row for row in rows if row["way"] in ("plain", "checkpoint", "lean")] == before
    assert {row["way"] for row in rows} == {"plain", "checkpoint", "lean", "lean_budget", "compile"}
    asked.clear()
    run(monkeypatch, "--case", "resnet50", "--ways", "lean", "compile", "--resume", "--write", "rows")
    assert asked == []


def test_on_a_gpu_each_way_that_compiles_is_by_itself_and_plain_runs_once(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = ["--ways", "checkpoint", "compile", "lean", "compile_leangrad"]
    run(monkeypatch, "--device", "cuda", "--case", "unet", "vit_l", *ways)
    assert [(one["name"], one["ways"]) for one in asked] == [
        ("unet", ["plain"]),
        ("vit_l", ["plain"]),
        ("unet", ["compile"]),
        ("unet", ["checkpoint", "lean"]),
        ("unet", ["compile_leangrad"]),
        ("vit_l", ["compile"]),
        ("vit_l", ["checkpoint", "lean"]),
        ("vit_l", ["compile_leangrad"]),
    ]
    assert not any("plain" in one for one in asked[:2])
    assert [one["plain"].peak_bytes for one in asked[2:]] == [1, 1, 1, 2, 2, 2]


def test_on_a_gpu_where_plain_fails_nothing_follows(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(target: str, ways: Any, *, name: str, found: Any, **named: Any) -> None:
        asked.append({"ways": list(ways)})
        found(Bench(name, (Row("plain", "failed"),)))

    monkeypatch.setattr(side_by_side, "bench", fails)
    run(monkeypatch, "--device", "cuda", "--case", "unet", "--ways", "compile", "lean")
    assert asked == [{"ways": ["plain"]}]


def test_shapes_that_have_rows_are_not_run_again(asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = ["--case", "resnet50", "--scaling", "--resume", "--write", "rows"]
    run(monkeypatch, *scaled)
    assert len(asked) > 9
    asked.clear()
    run(monkeypatch, *scaled)
    assert asked == []


def test_a_budget_without_a_checkpoint_is_compared_below_leans_peak() -> None:
    lean = {"lean": {"peak_bytes": 100}}
    assert side_by_side._known_budget({"checkpoint": {"peak_bytes": 5}, **lean}) == 5
    assert side_by_side._known_budget({"checkpoint": {}, **lean}) == 80  # it is none for this model
    assert side_by_side._known_budget(lean) is None  # it runs now


@pytest.mark.parametrize("flag", ["--keep", "--resume"])
def test_whose_rows_are_kept(
    flag: str, asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "--case", "unet", flag)
    assert "need --write NAME" in capsys.readouterr().err
    assert asked == []


def test_an_unknown_model_is_an_error(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "--case", "resnet51")
    assert "there is no model 'resnet51'; there are resnet50, vit_l" in capsys.readouterr().err
    assert asked == []
