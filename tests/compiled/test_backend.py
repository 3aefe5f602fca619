"""backend="leangrad": its entry point, its options, and what a user sees who asks for what there is not."""

from __future__ import annotations

import gc
import pickle
import re
import sys
import threading
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx, nn

import leangrad
from leangrad._torch import compiler
from leangrad.compiled import backend as backend_module
from leangrad.compiled import compile_lean, summary
from leangrad.compiled.partitioner import REMEMBERED, Partitioner, Settings, chosen
from leangrad.errors import LeangradError
from leangrad.policy.kernels import Fusion
from tests.support import assert_same_bits
from tests.support.partitions import Partitions
from tests.support.processes import in_a_process

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.usefixtures("fresh_choice")
EXACT = {"leangrad.exact": True}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8))


def test_the_entry_point_names_the_backend() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    module, _, name = groups["torch_dynamo_backends"]["leangrad"].partition(":")
    assert getattr(sys.modules[module], name) is compile_lean


def test_torch_finds_the_backend_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    from torch._dynamo.backends import registry

    torch._dynamo.list_backends()  # torch looks for entry points once in a process: not in here
    point = metadata.EntryPoint("leangrad", "leangrad.compiled:compile_lean", "torch_dynamo_backends")
    monkeypatch.setitem(registry._BACKENDS, "leangrad", point)
    monkeypatch.delitem(registry._COMPILER_FNS, "leangrad", raising=False)
    model = mlp()
    torch.compile(model, backend="leangrad", options=EXACT)(torch.randn(4, 8)).sum().backward()
    assert chosen
    registry._COMPILER_FNS.pop("leangrad", None)


UNIMPORTED = """
import sys, torch
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
step = torch.compile(model, backend="leangrad", options={"leangrad.exact": True})
step(torch.randn(4, 8)).sum().backward()
print("chosen", len(sys.modules["leangrad.compiled.partitioner"].chosen))
"""


def test_a_process_that_never_imports_leangrad_has_the_backend(tmp_path: Path) -> None:
    """As an installed package tells torch: by the entry points in its metadata."""
    (told,) = (tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"],)
    metadata = tmp_path / "leangrad-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: leangrad\nVersion: 0\n")
    lines = ["[torch_dynamo_backends]", *(f"{k} = {v}" for k, v in told["torch_dynamo_backends"].items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    assert in_a_process(UNIMPORTED, paths=[str(tmp_path)]).split() == ["chosen", "1"]


def test_importing_leangrad_does_not_import_the_compiler() -> None:
    names = {"torch._dynamo", "torch._inductor", "leangrad.compiled"}
    in_a_process(f"import sys, leangrad; assert not {names} & set(sys.modules)")


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"leangrad.exat": True}, ValueError, r"unknown option 'leangrad.exat'; leangrad's are leangrad.exact"),
        ({"max_autotun": True}, ValueError, "unknown option 'max_autotun': neither leangrad nor Inductor has it"),
        ({"leangrad.exact": 1}, TypeError, "leangrad.exact: expected True or False, got 1"),
        ({"leangrad.slowdown": 0.9}, ValueError, "leangrad.slowdown: expected a number of at least 1"),
        ({"leangrad.slowdown": "1.1"}, ValueError, "leangrad.slowdown: expected a number of at least 1"),
        ({"leangrad.slowdown": float("nan")}, ValueError, "leangrad.slowdown: expected a number of at least 1"),
        ({"custom_partitioner_fn": print}, ValueError, 'for one of your own use backend="inductor"'),
        ({"leangrad.exact": True, "max_autotune": True}, ValueError, "takes no option of Inductor's, got max_autotune"),
    ],
)
def test_bad_options_are_told(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        compile_lean(fx.symbolic_trace(mlp()), [torch.randn(4, 8)], options=options)


REFUSED = """
import torch
from leangrad.compiled import compile_lean
try:
    torch.compile(torch.nn.Linear(8, 8), backend=compile_lean, options={"leangrad.exat": True})(torch.randn(4, 8))
except torch._dynamo.exc.BackendCompilerFailed as error:
    print(error)
"""


def test_torch_hands_the_words_on() -> None:
    """In a process of its own: after a compile that raised, Dynamo evaluates the frames of the whole process."""
    assert "unknown option 'leangrad.exat'; leangrad's are leangrad.exact" in in_a_process(REFUSED)


UNCOMPILED = """
import torch
from leangrad.compiled import compile_lean
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
try:
    torch.compile(model, backend=compile_lean)(torch.randn(4, 8))
except torch._dynamo.exc.BackendCompilerFailed as error:
    print(error)
torch._dynamo.reset()
torch.compile(model, backend=compile_lean, options={"leangrad.exact": True})(torch.randn(4, 8)).sum().backward()
print("exact", model[0].weight.grad is not None)
"""


def test_without_a_cpp_compiler_one_is_told_what_is_missing_and_what_needs_none(tmp_path: Path) -> None:
    told = in_a_process(UNCOMPILED, CXX=str(tmp_path / "none"), TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert "Inductor needs a C++ compiler to compile for a CPU, and found no working one" in told
    assert 'options={"leangrad.exact": True}' in told
    assert "exact True" in told


def test_without_triton_one_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx, exc

    def fail(*args: Any, **kwargs: Any) -> Any:
        try:
            raise exc.TritonMissing(None)
        except exc.TritonMissing as error:
            raise exc.InductorError(error, None) from None

    monkeypatch.setattr(compile_fx, "compile_fx", fail)
    with pytest.raises(leangrad.errors.LeangradError, match=r"needs a Triton that works.*leangrad\.exact"):
        compile_lean(fx.symbolic_trace(mlp()), [torch.randn(4, 8)])


def test_other_failures_of_inductor_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("another")

    monkeypatch.setattr(compile_fx, "compile_fx", fail)
    with pytest.raises(ValueError, match="another"):
        compile_lean(fx.symbolic_trace(mlp()), [torch.randn(4, 8)])


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.sampled(2)
def test_where_inductor_fails_at_our_choice_torchs_own_is_compiled(
    where: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug in its code generator that torch's own choice does not meet must not stop a training."""
    from torch._inductor import compile_fx, config
    from torch._inductor.exc import InductorError

    real = compile_fx.compile_fx_inner

    def fail(*args: Any, **kwargs: Any) -> Any:
        is_here = bool(kwargs.get("is_backward")) == (where == "backward")
        if config.custom_partitioner_fn is not None and is_here:
            raise InductorError(RuntimeError("C++ compile error"), None)
        return real(*args, **kwargs)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", fail)
    model, x = mlp(), torch.randn(4, 8)
    (expected,) = torch.autograd.grad(model(x).square().sum(), model[0].weight)
    with pytest.warns(UserWarning, match=r"cannot compile what leangrad chose.*C\+\+ compile error.*own choice"):
        out = torch.compile(model, backend=compile_lean, dynamic=dynamic)(x)
    out.square().sum().backward()
    torch.testing.assert_close(model[0].weight.grad, expected)
    assert not chosen


def test_of_many_graphs_the_summary_leaves_out_the_one_that_torch_chose_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx, config
    from torch._inductor.exc import InductorError

    torch.compile(mlp(), backend=compile_lean, options=EXACT)(torch.randn(4, 8)).sum().backward()
    chosen.extend(chosen[:1] * (REMEMBERED - 1))
    before = list(chosen)
    real = compile_fx.compile_fx_inner

    def fail(*args: Any, **kwargs: Any) -> Any:
        if config.custom_partitioner_fn is not None:
            raise InductorError(RuntimeError("C++ compile error"), None)
        return real(*args, **kwargs)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", fail)
    with pytest.warns(UserWarning, match="cannot compile what leangrad chose"):
        torch.compile(mlp(), backend=compile_lean)(torch.randn(4, 8))
    assert chosen == before[1:]


def test_what_fails_with_torchs_own_choice_too_is_inductors(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx
    from torch._inductor.exc import InductorError

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise InductorError(RuntimeError("C++ compile error"), None)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", fail)
    with pytest.raises(InductorError, match="C\\+\\+ compile error"):
        compile_lean(fx.symbolic_trace(mlp()), [torch.randn(4, 8)])


def test_kernels_of_backward_are_of_the_size_that_the_policy_plays_them_with(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx, config

    real, sizes = compile_fx.compile_fx_inner, []

    def look(*args: Any, **kwargs: Any) -> Any:
        sizes.append((kwargs.get("is_backward", False), config.max_fusion_size))
        return real(*args, **kwargs)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", look)
    default = config.max_fusion_size
    torch.compile(mlp(), backend=compile_lean)(torch.randn(4, 8)).sum().backward()
    torch._dynamo.reset()
    torch.compile(mlp(), backend=compile_lean, options={"max_fusion_size": 4})(torch.randn(4, 8)).sum().backward()
    assert sorted(sizes) == [(False, 4), (False, default), (True, 4), (True, Fusion().size)]


def test_added_work_is_beside_what_torch_would_keep() -> None:
    """The usual cut is torch's own: of a chain that it keeps none of, nothing is added."""
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    torch.compile(model, backend=compile_lean)(torch.randn(64, 8)).sum().backward()
    (one,) = chosen
    assert one.choice.slowdown == 1.0


def test_a_torch_that_is_too_old_has_names_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._functorch import partitioners

    monkeypatch.delattr(partitioners, "choose_saved_values_set")
    compiler.missing.cache_clear()
    try:
        assert compiler.missing() == ("torch._functorch.partitioners.choose_saved_values_set",)
    finally:
        compiler.missing.cache_clear()


def test_an_unknown_mode_is_told() -> None:
    with pytest.raises(ValueError, match="unknown mode 'fast'; Inductor has default, "):
        backend_module._patches("fast", {})
    assert backend_module._patches("max-autotune", {})["max_autotune"] is True
    assert backend_module._patches("default", {"max-autotune": True}) == {"max_autotune": True}


def test_without_torchs_names_it_compiles_with_torchs_partitioner_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(compiler, "missing", lambda: ("torch.gone",))
    monkeypatch.setattr(
        compiler, "compile_by_inductor", lambda gm, inputs, patches: calls.append(patches) or gm.forward
    )
    backend_module._warn_of_missing.cache_clear()
    with pytest.warns(UserWarning, match=r'has no torch\.gone: backend="leangrad" compiles with torch\'s own'):
        torch.compile(mlp(), backend=compile_lean)(torch.randn(4, 8))
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.compile(mlp(), backend=compile_lean)(torch.randn(4, 8))
    assert calls == [{}, {}]
    torch._dynamo.reset()
    with pytest.raises(LeangradError, match=r"has no torch\.gone, which leangrad\.exact needs"):
        compile_lean(torch.fx.symbolic_trace(mlp()), [torch.randn(4, 8)], options={"leangrad.exact": True})
    backend_module._warn_of_missing.cache_clear()


def test_every_name_of_torch_is_there() -> None:
    assert compiler.missing() == ()


def test_what_is_pickled_does_not_change_with_what_was_chosen() -> None:
    """Inductor hashes the pickled partitioner of a backward graph. Times and choices in it would miss the caches."""
    found = Partitions(Settings(slowdown=1.2))
    before = pickle.dumps(Partitioner(found.settings, found.limits))
    torch._dynamo.reset()
    torch.compile(mlp(), backend=found.backend)(torch.randn(4, 8)).sum().backward()
    assert found.chosen is not None
    assert pickle.dumps(found) == before
    again = pickle.loads(before)
    assert (again.settings, again.limits, again.chosen) == (found.settings, found.limits, None)


def test_the_key_of_the_caches_holds_every_setting() -> None:
    keys = {Partitioner(Settings(exact=exact, slowdown=s)).uuid() for exact in (False, True) for s in (1.0, 1.1)}
    assert len(keys) == 4
    assert Partitioner(Settings()).uuid() == Partitioner(Settings()).uuid()


def test_two_threads_with_different_backends_do_not_meet() -> None:
    """One thread is inside its choice while the other partitions: that one gets torch's own.

    Traced they are one after the other: torch's own tracing does not run in two threads at once.
    """
    is_inside, is_done = threading.Event(), threading.Event()
    calls: list[int] = []

    def choose(graph: Any, info: Any) -> list[Any]:
        calls.append(threading.get_ident())
        return list(info.inputs)

    def partition() -> None:
        def compiler(gm: Any, _: Any) -> Any:
            return make_boxed_func(gm.forward)

        function = aot_function(
            lambda x: x.exp().sin().sum(), compiler, compiler, partition_fn=min_cut_rematerialization_partition
        )
        function(torch.randn(8, requires_grad=True)).backward()

    def inside() -> None:
        with compiler.choosing(choose):
            is_inside.set()
            assert is_done.wait(60)
            partition()

    thread = threading.Thread(target=inside)
    thread.start()
    assert is_inside.wait(60)
    try:
        partition()
        assert calls == []
    finally:
        is_done.set()
        thread.join()
    assert calls == [thread.ident]


def test_the_summary_tells_what_was_chosen() -> None:
    assert "no graph with a backward" in summary()
    torch.compile(mlp(), backend=compile_lean, options=EXACT)(torch.randn(64, 8)).sum().backward()
    line, advice = summary().splitlines()[1:]
    assert float(line.split()[0]) > 0
    assert advice == "the measured peak of a step: compiled.summary(leangrad.measure(step))"


def test_the_measured_peak_of_exact_is_the_expected_one() -> None:
    """But for what ops allocate and free inside themselves, and the number 1 that backward begins with."""
    model, x = nn.Sequential(mlp(), mlp()), torch.randn(256, 8)
    run = torch.compile(lambda x: model(x).square().mean(), backend=compile_lean, options=EXACT, fullgraph=True)

    def step() -> None:
        model.zero_grad()
        run(x).backward()

    measured = leangrad.measure(step, timed_runs=2)
    (found,) = chosen
    outcome = found.choice.outcome
    assert outcome.peak_bytes <= measured.peak_bytes <= 1.05 * outcome.peak_bytes
    assert measured.kept_bytes == outcome.kept_bytes + 4
    assert re.search(r"measured peak: .* MB, 1\.0\d\d times the expected one$", summary(measured))
    chosen.append(found)
    assert "not compared: 2 graphs were compiled" in summary(measured)


def test_nothing_that_exact_keeps_outlives_its_backward() -> None:
    model, x = mlp(), torch.randn(61, 8)
    torch.compile(model, backend=compile_lean, options=EXACT)(x).sum().backward()
    gc.collect()
    assert [one for one in gc.get_objects() if type(one) is Tensor and one.shape == (61, 32)] == []


def test_without_gradients_nothing_is_chosen() -> None:
    with torch.no_grad():
        torch.compile(mlp(), backend=compile_lean, options=EXACT)(torch.randn(4, 8))
    assert not chosen


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 tells no compile from an export while it traces")
def test_a_lean_model_under_another_backend_is_told_which_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["leangrad.lean"], "_has_said", False)
    model = leangrad.lean(mlp())
    x = torch.randn(4, 8)
    with pytest.warns(UserWarning, match=r'backend="leangrad"') as caught:
        torch.compile(model, backend="aot_eager")(x).sum().backward()
    assert len([one for one in caught if 'backend="leangrad"' in str(one.message)]) == 1
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.compile(model, backend="aot_eager", fullgraph=True)(x).sum().backward()


def test_a_lean_model_under_our_backend_is_told_nothing() -> None:
    model = leangrad.lean(mlp())
    plain = mlp()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(4, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.compile(model, backend=compile_lean, options=EXACT, fullgraph=True)(x).sum().backward()
    plain(x).sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert_same_bits(p.grad, q.grad)
