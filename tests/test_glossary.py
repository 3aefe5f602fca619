"""The glossary of the ledger has every name of a file and a class in it, in the source and in the docs alike."""

import ast
import re
from collections import defaultdict
from pathlib import Path

from leangrad import ledger

LEDGER = Path(ledger.__file__).parent
PAPER = Path(__file__).parent.parent / "docs" / "how_it_works.md"

# Words of the field that no file or class is called by.
WORDS = {"saved tensor", "kept", "rebuilt", "anchor", "recipe", "origin", "product", "cut", "plan", "step"}


Glossary = dict[str, str]


def names_in_the_source(folder: Path) -> dict[str, set[str]]:
    """Names of files, folders and public classes, each with the rooms that it stands in."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        room = parts[0]
        if path.name == "__init__.py":
            if len(parts) > 1:
                found[parts[-2]].add(room)
            continue
        found[parts[-1]].add(room)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].add(room)
    return found


def expected_names(found: dict[str, set[str]]) -> set[str]:
    """What the glossary has to explain: a name that stands in several rooms, once for each."""
    return {name if len(rooms) == 1 else f"{name} ({room})" for name, rooms in found.items() for room in rooms}


def glossary_of_the_source(text: str) -> Glossary:
    """Lines of four spaces, names, two spaces or more, and a meaning; below the word "Glossary"."""
    return entries(re.findall(r"^    (\S.*?)  +(\S.*)$", text[text.index("Glossary") :], flags=re.MULTILINE))


def glossary_of_the_paper(text: str) -> Glossary:
    """The rows of the table below its heading; those in bold are headings, too."""
    rows = re.findall(r"^\| ([^*|]+) \| (.+) \|$", text[text.index("## Words in the source") :], flags=re.MULTILINE)
    return entries([(names.replace("`", ""), meaning) for names, meaning in rows[2:]])  # below `| name |` and `| --- |`


def entries(lines: list[tuple[str, str]]) -> Glossary:
    found: Glossary = {}
    for names, meaning in lines:
        for name in names.split(", "):
            assert name not in found, f"{name} is told twice"
            found[name] = meaning
    return found


def test_every_name_is_in_the_glossary_and_no_other() -> None:
    told = glossary_of_the_source(ledger.__doc__ or "").keys()
    expected = expected_names(names_in_the_source(LEDGER))
    assert len(expected) > 80
    assert expected - told == set(), "tell of these in the docstring of leangrad/ledger/__init__.py"
    assert told - expected == WORDS, "no file or class has these names any more"


def test_the_paper_has_the_same_glossary() -> None:
    assert glossary_of_the_paper(PAPER.read_text()) == glossary_of_the_source(ledger.__doc__ or "")


def test_a_meaning_is_one_plain_line() -> None:
    for name, meaning in glossary_of_the_source(ledger.__doc__ or "").items():
        assert 3 <= len(meaning.split()) <= 20, name
        assert not meaning.endswith("."), name


def test_no_name_has_two_meanings() -> None:
    found = names_in_the_source(LEDGER)
    assert {name: rooms for name, rooms in found.items() if len(rooms) > 1} == {}


def test_names_are_collected(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "room" / "__init__.py").write_text("")
    (tmp_path / "room" / "chair.py").write_text("class Chair:\n    class Leg: ...\nclass _Screw: ...\n")
    (tmp_path / "door.py").write_text("class Chair: ...\n")
    found = names_in_the_source(tmp_path)
    assert found == {"room": {"room"}, "chair": {"room"}, "Chair": {"room", "door"}, "door": {"door"}}
    assert expected_names(found) == {"room", "chair", "Chair (room)", "Chair (door)", "door"}
    text = "other:\n    not  this\nGlossary.\n\nA room\n    chair, Chair (room)    to sit on\n"
    assert glossary_of_the_source(text) == {"chair": "to sit on", "Chair (room)": "to sit on"}
