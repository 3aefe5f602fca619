"""The rooms of the source: imports point one way; and those of the tests, which mirror them.

Read off the files, lazy and type-checking imports included.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
# A package's `__init__` shares its name with the package: `from leangrad import nn` reads the one, means the other.
Graph = dict[str, set[str]]


def modules(source: Path, *folders: str) -> dict[str, Path]:
    """The files under ``source``, or under these folders in it, by their module's name."""
    found = {}
    for path in sorted(path for folder in folders or (".",) for path in (source / folder).rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(source: Path, *folders: str) -> Graph:
    """For each module, those that any line of its file imports."""
    known = modules(source, *folders)
    graph: Graph = {}
    for name, path in known.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        found: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = package.rsplit(".", node.level - 1)[0] if node.level else ""
                origin = ".".join(part for part in (base, node.module) if part)
                inside = {f"{origin}.{alias.name}" for alias in node.names}
                found.update(inside & known.keys())
                if inside - known.keys():
                    found.add(origin)
        graph[name] = (found & known.keys()) - {name}
    return graph


def circles(graph: Graph) -> list[list[str]]:
    """Groups of modules each of which imports, through others, itself."""
    reach: Graph = {name: set() for name in graph}
    for name in graph:
        frontier = [name]
        while frontier:
            for other in graph[frontier.pop()]:
                if other not in reach[name]:
                    reach[name].add(other)
                    frontier.append(other)
    groups = {frozenset(b for b in reach[a] if a in reach[b]) for a in graph if a in reach[a]}
    return sorted(sorted(group) for group in groups)


def test_no_module_imports_itself_through_others() -> None:
    assert circles(imports(SOURCE)) == []


def test_circles_are_found(tmp_path: Path) -> None:
    (tmp_path / "house" / "room").mkdir(parents=True)
    (tmp_path / "house" / "__init__.py").write_text("from house.door import open\n")
    (tmp_path / "house" / "door.py").write_text("def open():\n    from .room import chair\n")
    (tmp_path / "house" / "room" / "__init__.py").write_text("")
    (tmp_path / "house" / "room" / "chair.py").write_text("from ..door import open\nfrom . import table\n")
    (tmp_path / "house" / "room" / "table.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import house.room.chair\n"
    )
    assert circles(imports(tmp_path)) == [["house.door", "house.room.chair", "house.room.table"]]


def test_no_folder_has_more_than_a_dozen_files() -> None:
    counts = Counter(path.parent for root in (SOURCE, ROOT / "benchmarks") for path in root.rglob("*.py"))
    assert {str(folder): count for folder, count in counts.items() if count > 12} == {}


@pytest.mark.parametrize(
    ("low", "high"),
    [("policy", "torch"), ("policy", "compiled"), ("ops", "nn"), ("policy", "floor"), ("ledger", "floor")],
)
def test_lower_rooms_do_not_know_higher_ones(low: str, high: str) -> None:
    graph = imports(SOURCE)
    found = {name: graph[name] for name in graph if name.startswith(f"leangrad.{low}")}
    assert found
    assert [name for name, read in found.items() if any(other.startswith(f"leangrad.{high}") for other in read)] == []
    if high == "torch":
        text = [path.read_text() for name, path in modules(SOURCE).items() if name.startswith(f"leangrad.{low}")]
        assert not any("import torch" in words or "from torch" in words for words in text)


# The tests

# Folders of the tests that are no folders of the source: what tests share, the zoo, the docs as a site, many processes.
SHARED = {"distributed", "site", "support", "support/rule_cases", "zoo"}


def imported_tests(graph: Graph) -> Graph:
    """For each module that imports test files, these."""
    found = {name: {other for other in read if is_test_file(other)} for name, read in graph.items()}
    return {name: tests for name, tests in found.items() if tests}


def is_test_file(name: str) -> bool:
    return name.rpartition(".")[2].startswith("test_")


def test_no_test_file_is_imported() -> None:
    """What two of them need is in `tests/support`."""
    graph = imports(ROOT, "tests", "benchmarks", "examples")
    assert sum(is_test_file(name) for name in graph) > 100
    assert imported_tests(graph) == {}


def test_imported_test_files_are_found(tmp_path: Path) -> None:
    (tmp_path / "tests" / "room").mkdir(parents=True)
    (tmp_path / "tests" / "support.py").write_text("TABLE = 1\n")
    (tmp_path / "tests" / "test_door.py").write_text("from tests.support import TABLE\n")
    (tmp_path / "tests" / "room" / "test_chair.py").write_text("from tests.test_door import TABLE\n")
    (tmp_path / "tests" / "room" / "test_table.py").write_text("def test():\n    from . import test_chair\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "walk.py").write_text("import tests.room.test_table\n")
    expected = {
        "other.walk": {"tests.room.test_table"},
        "tests.room.test_chair": {"tests.test_door"},
        "tests.room.test_table": {"tests.room.test_chair"},
    }
    assert imported_tests(imports(tmp_path, "tests", "other")) == expected


def test_tests_mirror_the_source() -> None:
    tests, source = ROOT / "tests", SOURCE / "leangrad"
    folders = {path.parent.relative_to(tests).as_posix() for path in tests.rglob("*.py")} - SHARED
    assert len(folders) > 12
    assert [folder for folder in sorted(folders) if not (source / folder / "__init__.py").exists()] == []
