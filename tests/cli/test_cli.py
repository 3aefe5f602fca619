"""The command line: the demo's models and figures, verify on a user's own file, and the doctor."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner, Result

import leangrad
from leangrad import _torch, demo
from leangrad.cli import app, doctor
from leangrad.demo import Case, Comparison, compare, gpt, residual_net, swiglu
from leangrad.measure import Measurement
from tests.support import same_bits

FLOAT_BYTES = 4


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def words(result: Result) -> str:
    """The output without line breaks and frames, which depend on the width of the terminal."""
    return re.sub(r"[\s│╭╮╰╯─]+", " ", result.output)


# demo


def residual_net_bytes(batch: int = 8, width: int = 16, side: int = 64, blocks: int = 4, classes: int = 4) -> int:
    """The floor, counted by hand: the output of every convolution, which batch norm's backward reads, and the logits.

    They are enough: the statistics are computed from them again, and with those every ReLU, every sum and every
    convolution's input.
    """
    maps = (1 + 2 * blocks) * batch * width * side * side
    return FLOAT_BYTES * (maps + batch * classes)


def gpt_bytes(
    batch: int = 8, length: int = 128, *, layers: int = 4, width: int = 128, heads: int = 4, vocabulary: int = 64
) -> int:
    """The floor, counted by hand.

    For each token and block: q, k and v (3 width), the attention's output (width) and its logs of denominators (heads),
    the outputs of `proj` and `out` (width each), without which the residual stream cannot be built again, and that of
    `fc` (4 width), from which all of GELU can. And the logits. The masks of dropout are drawn again from the random
    state, and the embeddings looked up again.
    """
    each_token = layers * (3 * width + width + heads + width + 4 * width + width) + vocabulary
    return FLOAT_BYTES * batch * length * each_token


def swiglu_bytes(
    batch: int = 8,
    length: int = 128,
    *,
    layers: int = 4,
    width: int = 128,
    heads: int = 4,
    groups: int = 2,
    hidden: int = 384,
    vocabulary: int = 64,
) -> int:
    """The floor, counted by hand.

    For each token and block: q (width), k and v before they are repeated (width · groups / heads each), the attention's
    output (width) and its logs of denominators (heads), the outputs of `out` and `down` (width each), without which the
    residual stream cannot be built again, and those of `gate` and `up` (hidden each). And the logits.
    """
    narrow = width // heads * groups
    each_token = layers * (width + 2 * narrow + width + heads + 2 * width + 2 * hidden) + vocabulary
    return FLOAT_BYTES * batch * length * each_token


# A case, its count by hand, and the sizes of both.
COUNTS: list[tuple[Callable[..., Case], Callable[..., int], dict[str, int]]] = [
    (residual_net, residual_net_bytes, {"batch": 2, "width": 4, "side": 8, "blocks": 1, "classes": 3}),
    (gpt, gpt_bytes, {"batch": 2, "length": 8, "layers": 1, "width": 16, "heads": 2, "vocabulary": 11}),
    (
        swiglu,
        swiglu_bytes,
        {"batch": 2, "length": 8, "layers": 1, "width": 16, "heads": 4, "groups": 2, "hidden": 24, "vocabulary": 11},
    ),
    (residual_net, residual_net_bytes, {"batch": 3, "width": 8, "side": 6, "blocks": 3, "classes": 5}),
    (gpt, gpt_bytes, {"batch": 3, "length": 10, "layers": 2, "width": 24, "heads": 3, "vocabulary": 7}),
    (
        swiglu,
        swiglu_bytes,
        {"batch": 3, "length": 10, "layers": 2, "width": 32, "heads": 4, "groups": 1, "hidden": 40, "vocabulary": 7},
    ),
]
TINY = tuple(make(**sizes) for make, _, sizes in COUNTS[:3])


@pytest.mark.parametrize(("make", "count", "sizes"), COUNTS)
def test_floor_is_what_was_counted_by_hand(
    make: Callable[..., Case], count: Callable[..., int], sizes: dict[str, int]
) -> None:
    assert compare(make(**sizes), steps=1).floor_bytes == count(**sizes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "by_hand"), list(zip(demo.CASES, (residual_net_bytes(), gpt_bytes(), swiglu_bytes()), strict=True))
)
def test_demo_shows_a_gain(case: Case, by_hand: int) -> None:
    comparison = compare(case, steps=2)
    assert comparison.floor_bytes == by_hand
    assert comparison.gradient_difference is None
    assert comparison.plain_loss == comparison.lean_loss
    assert comparison.plain.kept_bytes > 1.9 * by_hand > 30e6
    assert by_hand < comparison.lean.kept_bytes < 1.15 * by_hand
    assert comparison.lean.peak_bytes < 0.75 * comparison.plain.peak_bytes


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_models_learn(case: Case) -> None:
    inputs, targets = case.make_batch(torch.Generator().manual_seed(0))
    again = Case(case.name, case.make_model, lambda _: (inputs, targets))
    first, last = compare(again, steps=1), compare(again, steps=60)
    assert last.lean_loss < 0.5 * first.lean_loss


def test_data_is_the_same_for_the_same_seed_and_labels_vary() -> None:
    for case in demo.CASES:
        first, second = (case.make_batch(torch.Generator().manual_seed(7)) for _ in range(2))
        assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))
        assert len(first[1].unique()) > 1


def test_tokens_follow_each_other_nine_times_in_ten() -> None:
    tokens, followers = demo.case.chained_tokens(64, 64, 50, torch.Generator().manual_seed(0))
    assert same_bits(tokens[:, 1:], followers[:, :-1])
    assert ((tokens + 7) % 50 == followers).float().mean().item() == pytest.approx(0.902, abs=0.02)


def test_compare_leaves_the_random_state_and_calls_back_after_each_step() -> None:
    before = torch.get_rng_state()
    calls: list[None] = []
    compare(TINY[1], 3, on_step=lambda: calls.append(None))
    assert same_bits(torch.get_rng_state(), before)
    assert len(calls) == 3
    with pytest.raises(ValueError, match="at least one step, got 0"):
        compare(TINY[1], 0)


class Skewed(torch.autograd.Function):
    """Identity whose gradient is off by one in a thousand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 1.001


def skewed(model: nn.Module) -> nn.Module:
    model.register_forward_hook(lambda module, args, output: Skewed.apply(output))
    return model


def known(name: str, number: int) -> Comparison:
    plain, lean = (
        Measurement(peak_bytes=peak, kept_bytes=kept, seconds=1.0, temporaries=(), timeline=(), device="cpu")
        for peak, kept in ((number * 9_000_000, number * 8_000_000), (number * 6_000_000, number * 5_000_000))
    )
    return Comparison(
        name,
        plain,
        lean,
        floor_bytes=number * 4_000_000,
        time_ratio=1 + number / 100,
        gradient_difference=None if number != 2 else 0.0,  # 0.0 and -0.0 are not the same bits
        plain_loss=number / 7,
        lean_loss=number / 3,
    )


def test_demo_prints_every_figure_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "compare", lambda case, steps, on_step: known(case.name, demo.CASES.index(case) + 1))
    result = invoke("demo", "--steps", "3")
    rows = {cells[0]: cells[1:] for line in result.output.splitlines() if (cells := re.split(r"  +", line.strip()))}
    assert rows["residual conv net"] == ["GPT with dropout", "RMSNorm + SwiGLU"]
    assert rows["peak, plain"] == ["9.00 MB", "18.00 MB", "27.00 MB"]
    assert rows["peak, lean"] == ["6.00 MB", "12.00 MB", "18.00 MB"]
    assert rows["kept, plain"] == ["8.00 MB", "16.00 MB", "24.00 MB"]
    assert rows["kept, lean"] == ["5.00 MB", "10.00 MB", "15.00 MB"]
    assert rows["floor of kept"] == ["4.00 MB", "8.00 MB", "12.00 MB"]
    assert rows["time, lean / plain"] == ["1.01", "1.02", "1.03"]
    assert rows["gradients off by"] == ["0", "0, not bitwise", "0"]
    assert rows["last loss, plain"] == ["0.142857", "0.285714", "0.428571"]
    assert rows["last loss, lean"] == ["0.333333", "0.666667", "1.000000"]
    assert max(map(len, result.output.splitlines())) <= 80
    assert result.exit_code == 1


def test_demo_succeeds_and_says_where_to_go_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "CASES", TINY)
    result = invoke("demo", "--steps", "2")
    assert result.exit_code == 0, result.output
    assert "bit for bit" in result.output
    assert "leangrad verify" in result.output


def test_demo_fails_if_a_gradient_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "CASES", TINY[:1])
    monkeypatch.setattr(demo.comparison, "lean", skewed)
    result = invoke("demo", "--steps", "1")
    assert result.exit_code == 1
    assert "Gradients differ" in result.output
    assert re.search(r"gradients off by +0\.001\b", result.output)


def test_demo_refuses_no_steps() -> None:
    assert invoke("demo", "--steps", "0").exit_code == 2


# verify

FACTORIES = """
import torch
from torch import nn
from dataclasses import dataclass

@dataclass
class Settings:
    width: int = 8

def pair():
    return nn.Sequential(nn.Linear(4, Settings().width), nn.GELU(), nn.Linear(8, 2)), torch.randn(3, 4)

def triple():
    model, x = pair()
    return model, (x,), lambda out: (out - 1).pow(2).mean()

def frozen():
    model, x = pair()
    return model.requires_grad_(False), x

class Growing(nn.Linear):
    calls = [0.0]  # kept by the class, where verify cannot put it back

    def forward(self, x):
        Growing.calls[0] += 1.0
        return super().forward(x * 2 ** Growing.calls[0])

def growing():
    return Growing(4, 2), torch.randn(3, 4)

def alone():
    return nn.Linear(2, 2)

def four():
    return 1, 2, 3, 4

constant = 1
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of the user's. What loading it leaves in `sys` is put back."""
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "my_factories.py"
    path.write_text(FACTORIES)
    yield path
    for name in ("my_factories", "broken"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["pair", "triple"])
@pytest.mark.parametrize("how", [str, lambda path: path.stem], ids=["file", "module"])
def test_verify_a_users_model(factories: Path, name: str, how: Callable[[Path], str]) -> None:
    result = invoke("verify", f"{how(factories)}:{name}")
    assert result.exit_code == 0, result.output
    assert "kept for backward" in result.output
    assert "equal, bit for bit" in result.output


def test_verify_under_autocast(factories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    real = leangrad.verify

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["autocast"])
        return real(*args, **kwargs)

    monkeypatch.setattr(leangrad, "verify", spy)
    assert invoke("verify", f"{factories}:pair", "--autocast", "bfloat16").exit_code == 0
    assert seen == [torch.bfloat16]
    assert invoke("verify", f"{factories}:pair", "--autocast", "float64").exit_code == 2


def test_verify_fails_if_lean_is_further_from_plain_than_plain_is(factories: Path) -> None:
    result = invoke("verify", f"{factories}:growing")
    assert result.exit_code == 1
    assert "MORE than plain differs from itself" in result.output


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("{file}", "expected MODULE:FACTORY"),
        ("{file}:", "expected MODULE:FACTORY"),
        ("{file}:nothing", "expected a function 'nothing'"),
        ("{file}:constant", "expected a function 'constant'"),
        ("{file}:alone", "got Linear"),
        ("{file}:four", "got a tuple of 4"),
        ("no_such_file.py:pair", "found no file"),
        ("no_such_module:pair", "found no module"),
        ("my_factories.no_such_part:pair", "found no module"),
    ],
)
@pytest.mark.parametrize("command", ["verify", "floor"])
def test_a_wrong_target_is_told(factories: Path, command: str, target: str, message: str) -> None:
    result = invoke(command, target.format(file="my_factories.py" if target == "{file}" else factories))
    assert result.exit_code == 2
    assert message in words(result)


BROKEN = """
import torch
from torch import nn

class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), Sizes())

    def forward(self, x):
        return self.inner(x)

class Sizes(nn.Module):
    def forward(self, x):
        try:
            return x @ torch.ones(3, 3)
        except RuntimeError as error:
            raise ValueError("my own message") from error

def broken():
    return Broken(), torch.randn(2, 4)

def raises():
    raise KeyError("nothing here")
"""


@pytest.mark.parametrize("command", ["verify", "floor"])
def test_an_error_of_the_users_code_is_2_and_shows_their_frames_only(factories: Path, command: str) -> None:
    path = factories.parent / "broken.py"
    path.write_text(BROKEN)
    result = invoke(command, f"{path}:broken")
    assert result.exit_code == 2
    files = re.findall(r'File "(.*?)", line \d+, in (\w+)', result.output)
    assert files == [(str(path), "forward"), (str(path), "forward"), (str(path), "forward")]
    assert "ValueError: my own message" in result.output
    assert "mat1 and mat2" in result.output  # its cause
    assert f"leangrad.{command} called Broken with the batch float32[2, 4]" in result.output
    assert re.search(r"\(\d+ frames of torch and leangrad are left out; --traceback prints all\)", result.output)
    result = invoke(command, f"{path}:raises")
    assert (result.exit_code, re.findall(r"in (\w+)", result.output)) == (2, ["raises"])
    everything = invoke(command, f"{path}:broken", "--traceback")
    assert isinstance(everything.exception, ValueError)


@pytest.mark.parametrize("command", ["verify", "floor"])
def test_an_error_that_is_nobodys_frame_is_a_sentence(factories: Path, command: str) -> None:
    result = invoke(command, f"{factories}:frozen")
    assert result.exit_code == 2
    assert result.output.startswith("ValueError: expected a model with a parameter that requires a gradient")


@pytest.mark.parametrize("command", ["verify", "floor"])
def test_an_import_that_fails_in_the_users_file(factories: Path, command: str) -> None:
    path = factories.parent / "broken.py"
    path.write_text("import no_such_package_at_all")
    for target in ("broken:pair", f"{path}:pair"):
        result = invoke(command, target)
        assert result.exit_code == 2
        assert re.findall(r'File "(.*?)"', result.output) == [str(path)]
        assert "ModuleNotFoundError: No module named 'no_such_package_at_all'" in result.output


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp16", torch.float16), ("float16", torch.float16)],
)
def test_autocast_has_short_names(
    factories: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(leangrad, "verify", lambda *args, **named: seen.append(named["autocast"]) or Verified())
    assert invoke("verify", f"{factories}:pair", "--autocast", name).exit_code == 0
    assert seen == [dtype]


class Verified:
    passed = True


@pytest.mark.parametrize(("against", "words"), [("offload", "equal, bit for bit"), ("itself", "not compared with")])
def test_verify_against_something_else(factories: Path, against: str, words: str) -> None:
    result = invoke("verify", f"{factories}:pair", "--against", against)
    assert result.exit_code == 0, result.output
    assert words in result.output


# floor


@pytest.mark.parametrize(("name", "kept"), [("pair", 3 * (8 + 2)), ("triple", 3 * (8 + 2))])
@pytest.mark.parametrize("how", [str, lambda path: path.stem], ids=["file", "module"])
def test_floor_of_a_users_model(factories: Path, name: str, kept: int, how: Callable[[Path], str]) -> None:
    result = invoke("floor", f"{how(factories)}:{name}")
    assert result.exit_code == 0, result.output
    # 3 rows: 8 pre-activations of the GELU, and 2 outputs that the loss squares, in float32.
    assert result.output.splitlines()[-1].split() == [str(4 * kept), "the", "floor:", "2", "tensors"]


@pytest.mark.parametrize("name", ["bf16", "bfloat16"])
def test_floor_under_autocast(factories: Path, name: str) -> None:
    result = invoke("floor", f"{factories}:pair", "--autocast", name)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1].split()[0] == str(2 * 3 * (8 + 2))
    assert "bfloat16" in result.output
    assert invoke("floor", f"{factories}:pair", "--autocast", "float64").exit_code == 2


# doctor


def test_doctor_finds_all_in_order() -> None:
    result = invoke("doctor")
    assert result.exit_code == 0, result.output
    for word in (leangrad.__version__, torch.__version__, "private torch names", "ownership", "threads"):
        assert word in result.output


def test_every_private_name_is_known_and_there() -> None:
    names = _torch.private_names()
    # One of each kind: an attribute, a name asked for by getattr, a name of a module and of an op.
    assert {"_use_count", "_will_engine_execute_node", "_forward_hooks", "_schema"} <= names.keys()
    missing = [name for name, there in names.items() if not there]
    assert not missing, "torch dropped these, or `private_names` has to be told whose they are"


def test_doctor_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "private_names", lambda: {"_there": True, "_gone": False})
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "1 of 2 are there" in result.output
    assert "missing: _gone" in result.output


@pytest.mark.parametrize(("answer", "message"), [(True, "WRONG"), (False, "cannot be told")])
def test_doctor_checks_ownership(monkeypatch: pytest.MonkeyPatch, answer: bool, message: str) -> None:
    monkeypatch.setattr(doctor, "owned", lambda grad: answer)
    result = invoke("doctor")
    assert result.exit_code == 1
    assert message in result.output


@pytest.mark.parametrize(
    ("machine", "delay", "hinted"),
    [("aarch64", None, True), ("aarch64", "-1", False), ("aarch64", "0", True), ("x86_64", None, False)],
)
def test_doctor_hints_at_the_allocator(
    monkeypatch: pytest.MonkeyPatch, machine: str, delay: str | None, hinted: bool
) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("platform.machine", lambda: machine)
    if delay is None:
        monkeypatch.delenv("MIMALLOC_PURGE_DELAY", raising=False)
    else:
        monkeypatch.setenv("MIMALLOC_PURGE_DELAY", delay)
    result = invoke("doctor")
    assert result.exit_code == 0, "a hint is not a failure"
    assert ("page faults" in result.output) == hinted


# the rest


def test_version_and_help() -> None:
    assert invoke("--version").output == f"leangrad {leangrad.__version__}\n"
    help_text = words(invoke("--help"))
    for command in ("demo", "verify", "doctor"):
        assert command in help_text
    assert "Usage" in invoke().output


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["doctor"]])
def test_python_m_leangrad(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "leangrad", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert leangrad.__version__ in result.stdout or "Usage: python -m leangrad" in result.stdout
