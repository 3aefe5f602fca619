"""What every test shares: a fixed seed, no GPU tests where there is no GPU, `--shuffle SEED` for another order.

`make test` runs a part of the cases of some tests, which differ little from each other or take long: those that are
marked `sampled(n)` every n-th, those marked `extended` not at all. `make test-all` runs all, and so does a test that is
called by its name.
"""

import gc
import importlib
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

# torch warns at the first product of a process that is computed in the thread of backward, whoever asks for it.
FIRST_PRODUCT = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run all tests in the random order of this seed")
    parser.addoption("--all", action="store_true", help="run every case of tests that are marked sampled or extended")


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = config.getoption("--shuffle")
    return None if seed is None else f"tests in random order: --shuffle {seed}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark = FIRST_PRODUCT if torch.cuda.is_available() else pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(mark)
    if not config.getoption("--all") and not any("::" in arg for arg in config.args):
        _sample(config, items)
    seed = config.getoption("--shuffle")
    if seed is not None:
        random.Random(seed).shuffle(items)


def _sample(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only `make test-all` runs."""
    counts: Counter[str] = Counter()
    chosen, others = [], []
    for item in items:
        test = item.nodeid.partition("[")[0]
        every = item.get_closest_marker("sampled")
        is_chosen = "extended" not in item.keywords and (every is None or counts[test] % every.args[0] == 0)
        counts[test] += 1
        (chosen if is_chosen or "gpu" in item.keywords else others).append(item)  # who has a GPU runs all of those
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = chosen


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # what is frozen outlives the interpreter, and bindings to C++ complain of that


@pytest.fixture(autouse=True, scope="module")
def _few_objects() -> None:
    """Hide what was there before a test file from the garbage collector.

    `measure` looks through all objects that the collector knows, and many tests collect. After some hundred tests there
    are millions of objects, and each look takes a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _onednn_stays_on() -> Iterator[None]:
    """A bfloat16 product that oneDNN cannot do on a CPU switches it off for the process: other bits, other scratch."""
    was_on = torch._C._get_mkldnn_enabled()
    yield
    torch._C._set_mkldnn_enabled(was_on)


@pytest.fixture(autouse=True)
def _backend_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lean model under another backend is told so once in a process: not in whichever test comes first."""
    monkeypatch.setattr(importlib.import_module("leangrad.lean"), "_has_said", True)


@pytest.fixture
def backend_name() -> Iterator[None]:
    """What the entry point does for a package that is installed."""
    from torch._dynamo.backends import registry

    from leangrad.compiled import compile_lean

    torch._dynamo.list_backends()  # torch looks for entry points once in a process: not in here
    tables = (registry._COMPILER_FNS, registry._BACKENDS)
    before = [dict(table) for table in tables]
    if "leangrad" not in registry._COMPILER_FNS:
        torch._dynamo.register_backend(compile_lean, name="leangrad")
    yield
    for table, content in zip(tables, before, strict=True):
        table.clear()
        table.update(content)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Trainers of others leave a process group and variables of the environment, and Accelerate keeps its settings."""
    before = dict(os.environ)
    yield
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
