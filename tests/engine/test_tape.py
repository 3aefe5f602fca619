"""The tape moves gradients: the same objects, lent where two need them, added in place where one is owned."""

import gc
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from leangrad.engine import grad_buffer, tape
from leangrad.engine.grad_buffer import Lease, Pool, borrowed, release_scratch
from leangrad.engine.single_node import run
from leangrad.errors import ConsumedError
from leangrad.measure import measure
from leangrad.ops.activation import ACTIVATIONS
from leangrad.tape import Tape
from tests.support import same_bits
from tests.support.activation import PLAIN
from tests.support.fuzz import fuzz_settings


@pytest.fixture(params=[0, 1 << 20], ids=["rebuilt", "stored"])
def rebuilding(request, monkeypatch):
    """Small maps are stored, not rebuilt: test both, whatever the size."""
    monkeypatch.setattr(tape, "_REBUILD_MIN_BYTES", request.param)


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def test_x_squared_plus_x():
    record = Tape()
    x = record.watch(torch.tensor([2.0]))
    record.backward(record.add(record.mul(x, x), x))
    assert x.grad.item() == 5


def chain_of_adds(a, b, add):
    return add(add(a, b), a)


def diamond(a, b, add):
    c = add(a, b)
    return add(add(c, a), add(c, b))


def fan_out(a, b, add):
    total = add(a, b)
    for _ in range(100):
        total = add(total, a)
    return total


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    "graph", [lambda a, b, add: add(a, a), chain_of_adds, diamond, fan_out], ids=["x+x", "again", "diamond", "fan-out"]
)
def test_lent_gradients_match_autograd(graph, keep):
    a, b, g = leaf(3, 4), leaf(3, 4), torch.randn(3, 4, dtype=torch.float64)
    expected = torch.autograd.grad(graph(a, b, torch.add), (a, b), g, allow_unused=True)
    record = Tape(keep=keep)
    va, vb = record.watch(a), record.watch(b)
    before = g.clone()
    record.backward(graph(va, vb, record.add), g)
    assert same_bits(g, before)
    for var, grad in zip((va, vb), expected, strict=True):
        assert (var.grad is None) == (grad is None)
        assert grad is None or same_bits(var.grad, grad)


def test_first_arrival_is_the_same_object_and_the_second_is_added_in_place():
    record = Tape()
    x = record.watch(torch.zeros(3))
    first, second = torch.ones(3), torch.full((3,), 2.0)
    record.receive(x, Lease(first))
    assert x.grad is first
    record.receive(x, Lease(second))
    assert x.grad is first
    assert first.tolist() == [3, 3, 3]


def test_a_lent_gradient_is_left_alone():
    record = Tape()
    x = record.watch(torch.zeros(3))
    lent, ours = torch.ones(3), torch.full((3,), 2.0)
    record.receive(x, borrowed(lent))
    record.receive(x, Lease(ours))  # added into the owned one, although it came second
    assert x.grad is ours
    x.gradient = None
    record.receive(x, borrowed(lent))
    record.receive(x, borrowed(lent))  # neither is owned
    assert x.grad.tolist() == [2, 2, 2]
    assert lent.tolist() == [1, 1, 1]


def test_gradients_of_two_inputs_never_share_memory():
    record = Tape()
    a, b = record.watch(torch.zeros(3)), record.watch(torch.zeros(3))
    record.backward(record.add(a, b), torch.ones(3), ours=True)
    a.grad.fill_(7)
    assert b.grad.tolist() == [1, 1, 1]


def test_keep_leaves_every_gradient_and_lets_backward_run_again():
    record = Tape(keep=True)
    x = record.watch(torch.tensor([3.0]))
    square = record.mul(x, x)
    y = record.add(record.activate(square, "relu"), x)
    for _ in range(2):
        record.backward(y)
        assert x.grad.item() == 7
        assert square.grad.item() == 1
        assert y.grad.item() == 1


def test_the_default_frees_each_gradient_and_a_second_backward_says_how_to_keep():
    record = Tape()
    x = record.watch(torch.tensor([3.0]))
    square = record.mul(x, x)
    record.backward(square)
    assert square.grad is None
    with pytest.raises(ConsumedError, match=r"consumed by an earlier backward; record it with Tape\(keep=True\)"):
        record.backward(square)


def test_bad_shapes_are_named():
    record = Tape()
    a, b = record.watch(torch.zeros(3)), record.watch(torch.zeros(4))
    with pytest.raises(ValueError, match=r"a and b: expected one shape, got \(3,\) and \(4,\)"):
        record.add(a, b)
    with pytest.raises(ValueError, match=r"grad: expected the output's shape \(3,\), got \(4,\)"):
        record.backward(record.add(a, a), torch.zeros(4))


# Random programs: the same code runs on a tape, and on autograd.


class Plain:
    """The ops of a tape, on autograd's tensors."""

    add, mul = staticmethod(torch.add), staticmethod(torch.mul)

    def reshape(self, a, shape):
        return a.reshape(shape)

    def linear(self, x, w, b=None):
        return F.linear(x, w, b)

    def activate(self, x, name):
        return PLAIN[name](x)


SHAPES = [(4, 4), (4, 4), (4, 4), (4,)]


def random_program(draw):
    """A list of choices, and the function that runs them on some ops."""
    kinds = st.sampled_from(["add", "mul", "reshape", "linear", "activate", "square"])
    names = st.sampled_from([name for name, record in ACTIVATIONS.items() if not record.gated])
    choices = [
        (draw(kinds), draw(st.integers(0, 50)), draw(st.integers(0, 50)), draw(names))
        for _ in range(draw(st.integers(1, 9)))
    ]

    def program(ops, x, y, w, b):
        pool = [x, y]
        for kind, i, j, name in choices:
            a, c = pool[i % len(pool)], pool[j % len(pool)]
            try:
                if kind == "add":
                    pool.append(ops.add(a, c))
                elif kind == "mul":
                    pool.append(ops.mul(a, c))
                elif kind == "square":
                    pool.append(ops.mul(a, a))
                elif kind == "reshape":
                    pool.append(ops.reshape(ops.reshape(a, (16,)), (4, 4)))
                elif kind == "linear":
                    pool.append(ops.linear(a, w, b if i % 2 else None))
                else:
                    pool.append(ops.activate(a, name))
            except ConsumedError:  # a private tape has overwritten this value: take another
                continue
        return pool[-1]

    return program


@pytest.mark.fuzz
@pytest.mark.parametrize("threshold", [0, 1 << 20], ids=["rebuilt", "stored"])
def test_random_programs_match_autograd(threshold, monkeypatch):
    monkeypatch.setattr(tape, "_REBUILD_MIN_BYTES", threshold)
    private_runs = []

    @fuzz_settings(small=150, large=5_000)
    @given(st.data())
    def check(data):
        program = random_program(data.draw)
        needs = data.draw(st.lists(st.booleans(), min_size=4, max_size=4).filter(any))
        tensors = [torch.randn(s, dtype=torch.float64, requires_grad=n) for s, n in zip(SHAPES, needs, strict=True)]
        wanted = [t for t in tensors if t.requires_grad]
        y = program(Plain(), *tensors)
        g = torch.randn_like(y)
        if not y.requires_grad:
            return
        expected = torch.autograd.grad(y, wanted, g, allow_unused=True)

        for keep in (False, True):
            record = Tape(keep=keep)
            variables = [record.watch(t, needs_grad=t.requires_grad) for t in tensors]
            record.backward(program(record, *variables), g)
            agree([v.grad for v in variables if v.needs_grad], expected)

        swallowed = []

        def private(record, *variables):
            out = program(record, *variables)
            swallowed.append(any(v is out for v in variables))
            return out

        try:
            once = run(private, lambda *t: program(Plain(), *t), *tensors)
        except ConsumedError:
            return
        # Where a value had been overwritten the program went another way: nothing to compare with.
        private_runs.append(not swallowed[0] and same_bits(once, y))
        if not private_runs[-1]:
            return
        agree(torch.autograd.grad(once, wanted, g, retain_graph=True, allow_unused=True), expected)
        agree(torch.autograd.grad(once, wanted, g, allow_unused=True), expected)

    check()
    assert sum(private_runs) > 0.6 * len(private_runs)


def agree(found, expected):
    for one, other in zip(found, expected, strict=True):
        if one is None or other is None:
            assert one is None or not one.any()
            assert other is None or not other.any()
        else:
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10, equal_nan=True)


# The buffers of a chain.


def chain(depth: int, activation: str, width: int = 128, rows: int = 4096):
    """A step of a chain as one node, and the bytes of one map."""
    x = torch.randn(rows, width)
    gated = ACTIVATIONS[activation].gated
    weights = [torch.randn(width * (2 if gated else 1), width).div_(12).requires_grad_() for _ in range(depth)]
    grad = torch.randn(rows, width)

    def program(record, x, *weights):
        for w in weights:
            x = record.activate(record.linear(x, w), activation)
        return x

    def step():
        for w in weights:
            w.grad = None
        run(program, None, x, *weights).backward(grad)

    return step, x.numel() * 4


@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "softmax"])
@pytest.mark.parametrize("depth", [2, 9])
@pytest.mark.sampled(3)
def test_backward_of_a_chain_allocates_no_map_after_warm_up(depth, activation):
    step, map_bytes = chain(depth, activation)
    found = measure(step, timed_runs=1)
    allocated = [e.bytes for e in found.timeline if e.phase == "backward" and e.bytes >= map_bytes]
    if activation == "mish" and torch.get_num_threads() > 1:  # in chunks, threads would end elsewhere: other bits
        assert allocated == [map_bytes] * depth
    else:
        assert allocated == []


@pytest.mark.parametrize("activation", ["relu", "gelu", "tanh", "swiglu"])
def test_two_gradient_buffers_for_any_depth(activation, monkeypatch):
    """Count the leases on whole maps that are out at the same time, the incoming gradient included."""
    alive, most = set(), [0]
    made = Lease.__init__

    def note(self, tensor, memory=None, scratch=False):
        made(self, tensor, memory, scratch)
        if tensor.shape[0] == 4096:
            alive.add(self.memory.data_ptr())
            most[0] = max(most[0], len(alive))

    def forget(self, given):
        released(self, given)
        alive.discard(given.memory.data_ptr())

    released = Pool.release
    monkeypatch.setattr(Lease, "__init__", note)
    monkeypatch.setattr(Pool, "release", forget)
    step, _ = chain(9, activation)
    step()
    assert most[0] <= 2


@pytest.mark.parametrize(("activation", "maps"), [("relu", 1), ("tanh", 1), ("gelu", 1), ("silu", 1), ("swiglu", 2)])
def test_kept_bytes_of_a_chain(activation, maps):
    """One map a layer (two for the gate and the value); the last output is the caller's, and not kept twice."""
    depth = 6
    step, map_bytes = chain(depth, activation)
    release_scratch()
    keeps_output = ACTIVATIONS[activation].keeps == "output"
    found = measure(step, timed_runs=1)
    assert found.kept_bytes == (depth * maps + (0 if keeps_output else 1)) * map_bytes


def test_scratch_waits_for_the_next_tape_and_can_be_released():
    release_scratch()
    step, map_bytes = chain(3, "gelu")
    step()
    assert [t.numel() * 4 for t in grad_buffer._waiting[torch.float32]] == [map_bytes]
    release_scratch()
    assert not grad_buffer._waiting


def test_uneven_widths_after_warm_up(rebuilding):
    """Maps of different sizes share scratch; what leaves the tape is exactly as large as it must be."""
    release_scratch()
    widths = [7, 32, 3, 64, 5]
    weights = [leaf(o, i) for i, o in pairwise(widths)]
    x, g = leaf(6, 7), torch.randn(6, 5, dtype=torch.float64)

    def program(record, x, *weights):
        for w in weights:
            x = record.activate(record.linear(x, w), "silu")
        return x

    def plain(x, *weights):
        for w in weights:
            x = F.silu(F.linear(x, w))
        return x

    expected = torch.autograd.grad(plain(x, *weights), [x, *weights], g)
    for _ in range(3):
        found = torch.autograd.grad(run(program, plain, x, *weights), [x, *weights], g)
        for one, other in zip(found, expected, strict=True):
            assert same_bits(one, other)
            assert one.untyped_storage().nbytes() == one.numel() * 8


def test_no_cycles_with_the_collector_off():
    step, _ = chain(3, "relu")
    gc.collect()
    gc.disable()
    try:
        before = torch_tensors()
        y = run(lambda t, x, w: t.activate(t.linear(x, w), "relu"), None, torch.ones(2, 2), leaf(2, 2).float())
        del y
        for _ in range(3):
            step()
        release_scratch()
        after = torch_tensors()
    finally:
        gc.enable()
    assert after <= before + 3  # the gradients of the weights


def torch_tensors() -> int:
    return sum(issubclass(type(o), Tensor) for o in gc.get_objects())
