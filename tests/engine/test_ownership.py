"""`owned` tells exclusive gradients from shared ones; `take` moves things out once."""

import subprocess
import sys
import threading
import warnings
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from leangrad.engine import ownership
from leangrad.engine.ownership import owned, take
from leangrad.errors import ConsumedError


class Probe(torch.autograd.Function):
    """Identity that notes what `owned` says of its gradient."""

    @staticmethod
    def forward(ctx, x, answers):
        ctx.answers = answers
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.answers.append(owned(grad))
        return grad.clone(), None


def ask(build, root_grad=None):
    """Build a graph around probes, run backward, and return the probes' answers in the order of the backward."""
    answers: list[bool] = []
    x = torch.randn(4, 6, requires_grad=True)
    y = build(x, lambda t: Probe.apply(t, answers))
    if y.dim():
        y.backward(torch.randn_like(y) if root_grad is None else root_grad)
    else:
        y.backward()
    return answers


def held(kind):
    kept = []

    def build(x, probe):
        y = probe(x)
        y.register_hook(lambda grad: kept.append(kind(grad)))
        return (y * 2).sum()

    return build


def captured(x, probe):
    y = probe(x)
    torch.autograd.grad((y * 2).sum(), [y, x])
    return x.sum()


EXCLUSIVE = {
    "from an op": lambda x, probe: (probe(x) * 2).sum(),
    "through a view": lambda x, probe: (probe(x).reshape(-1) * 2).sum(),
    "through two views": lambda x, probe: (probe(x).t().reshape(3, 8) * 2).sum(),
    "from a Function": lambda x, probe: (Probe.apply(probe(x), []) * 2).sum(),
    "accumulated from two branches": lambda x, probe: (lambda y: (y * 2 + y * 3).sum())(probe(x)),
    "transposed": lambda x, probe: (probe(x).t() * torch.randn(6, 4)).sum(),
    "retained by a clone": lambda x, probe: (lambda y: (y.retain_grad(), (y * 2).sum())[1])(probe(x)),
    "hook that holds nothing": held(lambda grad: None),
    "hook that holds a copy": held(lambda grad: grad.clone()),
}
SHARED = {
    "hook that holds it": held(lambda grad: grad),
    "hook that holds a weak reference": held(lambda grad: weakref.ref(grad)),
    "hook that holds an alias": held(lambda grad: grad.detach()),
    "hook that holds a slice": held(lambda grad: grad[0]),
    "hook that holds the storage": held(lambda grad: grad.untyped_storage()),
    "hook that holds a numpy view": held(lambda grad: grad.numpy()),
    "hook that holds a dlpack view": held(lambda grad: np.from_dlpack(grad.detach())),
    "residual": lambda x, probe: (lambda h: ((h + probe(h)) * 2).sum())(x * 1),
    "residual, other order": lambda x, probe: (lambda h: ((probe(h) + h) * 2).sum())(x * 1),
    "expanded by sum": lambda x, probe: probe(x).sum(),
    "slice of a cat": lambda x, probe: (torch.cat([probe(x), x]) * 2).sum(),
    "given by the caller": lambda x, probe: probe(x),
    "captured": captured,
}


@pytest.mark.parametrize("name", EXCLUSIVE)
def test_exclusive_gradients_are_owned(name):
    assert ask(EXCLUSIVE[name]) == [True]


@pytest.mark.parametrize("name", SHARED)
def test_shared_gradients_are_not(name):
    assert ask(SHARED[name]) == [False]


def test_second_reader_of_a_shared_gradient_owns_it():
    """Two probes share one gradient: the first to run must not overwrite it, the second is the last that sees it."""
    assert ask(lambda x, probe: (lambda h: ((probe(h) + probe(h)) * 2).sum())(x * 1)) == [False, True]


def test_memory_of_numpy_is_not_ours():
    """No count of torch sees that the array behind `from_numpy` is held by somebody else."""
    arrays = []

    class FromNumpy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            arrays.append(np.ones((4, 6), dtype=np.float32))
            return torch.from_numpy(arrays[-1])

    assert ask(lambda x, probe: FromNumpy.apply(probe(x)).sum()) == [False]


def test_subclasses_are_not_ours():
    class Tagged(Tensor):
        pass

    class Tag(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad.clone().as_subclass(Tagged)

    assert ask(lambda x, probe: Tag.apply(probe(x)).sum()) == [False]


def test_overlapping_memory_is_not_ours():
    class Overlap(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return torch.ones(24).as_strided((4, 6), (1, 1))

    assert ask(lambda x, probe: Overlap.apply(probe(x)).sum()) == [False]


def test_create_graph_owns_nothing():
    answers = []
    x = torch.randn(3, requires_grad=True)
    torch.autograd.grad((Probe.apply(x, answers) * 2).sum(), x, create_graph=True)
    assert answers == [False]


def test_other_call_depths_answer_false():
    """The contract: `owned(grad)` in backward itself. One call deeper, or under a decorator, promises nothing."""
    answers = []

    def deeper(grad):
        return owned(grad)

    class Deep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            answers.append(deeper(grad))
            return grad.clone()

    class Decorated(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, grad):
            answers.append(owned(grad))
            return grad.clone()

    x = torch.randn(3, requires_grad=True)
    ((Deep.apply(x) * 2).sum() + (Decorated.apply(x) * 2).sum()).backward()
    assert answers == [False, False]
    assert not owned(torch.randn(3))
    with torch.no_grad():
        assert not owned(torch.randn(3))


def test_several_gradients_of_one_backward():
    answers = []

    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2, x * 3

        @staticmethod
        def backward(ctx, a, b):
            answers.extend([owned(a), owned(b)])
            return a + b

    x = torch.randn(4, requires_grad=True)
    a, b = Pair.apply(x)
    (a * 2 + b * 3).sum().backward()
    a, b = Pair.apply(x)
    (a + b).mul(2).sum().backward()  # one gradient, handed to both
    assert answers == [True, True, False, False]


def test_answers_stay_right_when_the_code_is_hot():
    """The interpreter specializes hot calls; the counts must not move when it does."""
    answers = []
    x = torch.randn(4, requires_grad=True)
    for _ in range(500):
        (Probe.apply(x, answers) * 2).sum().backward()
        h = x * 1
        ((h + Probe.apply(h, answers)) * 2).sum().backward()
    assert answers == [True, False] * 500


def test_other_threads():
    answers = []
    threads = [threading.Thread(target=lambda: answers.extend(ask(EXCLUSIVE["from an op"]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 4


def test_a_trace_function_makes_it_careful_not_wrong():
    sys.settrace(lambda *args: lambda *args: None)
    try:
        exclusive, shared = ask(EXCLUSIVE["from an op"]), ask(SHARED["hook that holds it"])
    finally:
        sys.settrace(None)
    assert shared == [False]
    assert ask(EXCLUSIVE["from an op"]) == [True]
    assert exclusive in ([True], [False])


CALIBRATED_ELSEWHERE = """
import sys, threading, torch
{before}
from leangrad.engine import ownership
class Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, grad):
        print(ownership.owned(grad))
        return grad.clone()
def run():
    kept = []
    x = torch.randn(3, requires_grad=True, device="cpu")
    (Probe.apply(x) * 2).sum().backward()
    y = Probe.apply(x); y.register_hook(lambda g: kept.append(g)); (y * 2).sum().backward()
{inside}
{after}
run()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "inside", "after"),
    [
        ("", "run()", ""),
        ("torch.set_default_device('meta')", "run()", "torch.set_default_device(None)"),
        ("trace = lambda *a: trace\nthreading.settrace(trace)", "run()", "threading.settrace(None)"),
        ("from torch.utils.flop_counter import FlopCounterMode", "with FlopCounterMode(display=False): run()", ""),
        ("torch.set_grad_enabled(False)", "with torch.enable_grad(): run()", "torch.set_grad_enabled(True)"),
    ],
    ids=["plain", "default device", "traced", "dispatch mode", "no grad"],
)
@pytest.mark.sampled(2)
def test_the_first_question_may_come_from_anywhere(before, inside, after):
    code = CALIBRATED_ELSEWHERE.format(before=before, inside=inside, after=after)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "False"] * 2, done.stderr


WHO_EVALUATES_FRAMES = """
import threading, torch
from leangrad._torch import is_python_evaluating
from leangrad.engine import ownership
class Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, grad):
        print(ownership.owned(grad))
        return grad.clone()
def run():
    for holders in range(8):
        held = []
        x = torch.randn(3, requires_grad=True)
        y = Probe.apply(x)
        if holders: y.register_hook(lambda g: held.extend([g] * holders))
        (y * 2).sum().backward()
    print("python" if is_python_evaluating() else "dynamo")
def raise_in_a_compile():
    def backend(graph, inputs): raise RuntimeError
    try: torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    except Exception: pass
def run_beside_a_compiled_function():
    inside, over = threading.Event(), threading.Event()
    def wait():
        inside.set()
        assert over.wait(60)
    def compiled(x):
        wait()
        return x + 1
    thread = threading.Thread(target=lambda: torch.compile(compiled, backend="eager")(torch.ones(2)))
    thread.start()
    assert inside.wait(60)
    run()
    over.set()
    thread.join()
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["run()", "run_beside_a_compiled_function()", "raise_in_a_compile(); run()"])
@pytest.mark.parametrize("then", ["run()", "run_beside_a_compiled_function()", "raise_in_a_compile(); run()"])
@pytest.mark.sampled(3)
def test_answers_do_not_depend_on_who_evaluates_frames(first, then):
    """Dynamo's evaluator holds a call's arguments once more. Rows of one state are compared with counts of another.

    From Python 3.12 on nothing is owned while it evaluates frames; after a compile that raised it may do so for good.
    """
    code = f"{WHO_EVALUATES_FRAMES}\n{first}\n{then}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    answers = done.stdout.split()
    is_told_apart = sys.version_info >= (3, 12)
    for answer, *shared, evaluating in (answers[:9], answers[9:]):
        assert shared == ["False"] * 7, done.stderr
        assert answer == str(evaluating == "python" or not is_told_apart), done.stderr
    if first == "run()":
        assert answers[8] == "python"
    if "beside" in then:
        assert answers[17] == "dynamo"


def test_importing_does_not_start_the_engine():
    """A backward at import would break forked workers on machines with GPUs."""
    done = subprocess.run(
        [sys.executable, "-c", "from leangrad.engine import ownership; print(ownership._exclusive)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "None"


def test_a_build_that_cannot_tell_owns_nothing_and_warns_once(monkeypatch):
    """If a known-shared gradient looks exclusive, the answer is always no, with one warning."""
    monkeypatch.setattr(ownership, "_exclusive", None)
    monkeypatch.setattr(ownership, "reference_counts", lambda tensor: (1, 1))
    with pytest.warns(RuntimeWarning, match="cannot tell exclusive gradients"):
        assert ask(EXCLUSIVE["from an op"]) == [False]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ask(EXCLUSIVE["from an op"]) == [False]
        assert ask(SHARED["residual"]) == [False]


@pytest.mark.parametrize("counts", [lambda tensor: None, lambda tensor: 1 / 0])
def test_a_build_without_the_counts_owns_nothing(monkeypatch, counts):
    monkeypatch.setattr(ownership, "_exclusive", None)
    monkeypatch.setattr(ownership, "reference_counts", counts)
    with pytest.warns(RuntimeWarning, match="cannot tell exclusive gradients"):
        assert ask(EXCLUSIVE["from an op"]) == [False]


def test_take_moves_once():
    holder = SimpleNamespace(x=torch.ones(2))
    x = holder.x
    assert take(holder, "x", keep="keep it") is x
    assert holder.x is None
    with pytest.raises(ConsumedError, match=r"SimpleNamespace\.x was already moved out .*; pass retain_graph=True"):
        take(holder, "x", keep="pass retain_graph=True")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*EXCLUSIVE, *SHARED])
def test_on_a_gpu_where_backward_runs_on_another_thread(name):
    if "numpy" in name or "dlpack" in name:
        pytest.skip("host memory only")
    answers: list[bool] = []
    x = torch.randn(4, 6, device="cuda", requires_grad=True)
    with torch.device("cuda"):
        y = {**EXCLUSIVE, **SHARED}[name](x, lambda t: Probe.apply(t, answers))
        y.backward(torch.randn_like(y)) if y.dim() else y.backward()
    assert answers == [name in EXCLUSIVE]


@pytest.mark.gpu
def test_side_streams_are_not_ours():
    answers: list[bool] = []
    x = torch.randn(4, 6, device="cuda", requires_grad=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        (Probe.apply(x, answers) * 2).sum().backward()
    torch.cuda.synchronize()
    assert answers == [False]
