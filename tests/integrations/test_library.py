"""A library that is missing or too old is one sentence, where the module for it is imported."""

from __future__ import annotations

from pathlib import Path

import pytest

import leangrad
from tests.support.processes import in_a_process

IMPORT = """
import sys
for name in sys.argv[2:]:
    sys.modules[name] = None  # as if it were not installed
try:
    __import__("leangrad.integrations." + sys.argv[1])
except ImportError as error:
    print(error)
    print(type(error).__name__)
"""


@pytest.mark.parametrize(
    ("module", "names", "package"),
    [
        ("transformers", ["transformers"], "transformers"),
        ("lightning", ["lightning", "lightning.pytorch", "pytorch_lightning"], "lightning"),
    ],
)
def test_a_missing_library(module: str, names: list[str], package: str) -> None:
    told, kind = in_a_process(IMPORT, module, *names).splitlines()
    assert kind == "ImportError"
    assert told.startswith(f"leangrad.integrations.{module} needs {package} ")
    assert told.endswith(f'or newer, which is not installed; pip install -U "{package}>={told.split()[3]}"')


@pytest.mark.parametrize(
    ("module", "files"),
    [("transformers", {"transformers.py": "__version__ = '4.1.0'"})]
    + [
        ("lightning", {f"{name}/__init__.py": "__version__ = '1.9.5'", f"{name}/pytorch.py": ""})
        for name in ("lightning", "pytorch_lightning")
    ],
)
def test_a_library_that_is_too_old(module: str, files: dict[str, str], tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    absent = {"lightning.pytorch", "lightning", "pytorch_lightning"} - {Path(name).parent.name for name in files}
    if "lightning/__init__.py" in files:
        absent.discard("lightning.pytorch")
    told, kind = in_a_process(IMPORT, module, *absent, paths=[str(tmp_path)]).splitlines()
    assert kind == "ImportError"
    assert "or newer, found " in told
    assert "; pip install -U " in told


def test_what_the_library_itself_lacks_is_not_hidden(tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text("import no_such_library")
    told, kind = in_a_process(IMPORT, "transformers", paths=[str(tmp_path)]).splitlines()
    assert (told, kind) == ("No module named 'no_such_library'", "ModuleNotFoundError")


def test_importing_leangrad_imports_no_trainer() -> None:
    code = """
import sys, leangrad, leangrad.integrations
leangrad.lean(__import__("torch").nn.Linear(2, 2))
print({"transformers", "lightning", "pytorch_lightning", "accelerate"} & set(sys.modules))
"""
    assert in_a_process(code).strip() == "set()"


def test_modules_are_reached_from_the_package() -> None:
    assert "integrations" in dir(leangrad)
    with pytest.raises(AttributeError, match=r"'leangrad\.integrations' has no attribute 'keras'"):
        leangrad.integrations.keras  # noqa: B018
    pytest.importorskip("transformers")
    assert leangrad.integrations.transformers.LeanCallback().settings == {}
