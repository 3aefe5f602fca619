"""Workspaces: what is lent never overlaps, never changes in a holder's hand, and is allocated once."""

import copy
import gc
import pickle
import threading

import pytest
import torch
from torch import nn

import leangrad
from leangrad import workspace as module
from leangrad.errors import StaleError
from leangrad.workspace import Workspace
from tests.support import same_bits

NAN = float("nan")


def touch(workspace, name, shape, **kwargs):
    """Borrow, fill and give back; the address at which it was."""
    with workspace.borrow(name, shape, **kwargs) as borrowed:
        borrowed.tensor.fill_(NAN)
        return borrowed.tensor.data_ptr()


# Capacity


CASES = {
    "powers of two": ([(3, 100)], [(4, 128)]),
    "a power stays": ([(4, 128)], [(4, 128)]),
    "what fits allocates nothing": ([(3, 100), (4, 128), (2, 65)], [(4, 128)]),
    "one dimension exceeds": ([(3, 100), (5, 100)], [(4, 128), (8, 128)]),
    "the other stays": ([(3, 100), (5, 20)], [(4, 128), (8, 128)]),
    "both exceed": ([(3, 100), (5, 129)], [(4, 128), (8, 256)]),
    "all fall to a quarter": ([(16, 64), (4, 16)], [(16, 64), (4, 16)]),
    "one is just above a quarter": ([(16, 64), (5, 16)], [(16, 64)]),
    "only one falls": ([(16, 64), (16, 1)], [(16, 64)]),
    "shrinks to what is asked for": ([(64, 64), (3, 9)], [(64, 64), (4, 16)]),
    "after shrinking it grows again": ([(64,), (1,), (64,)], [(64,), (1,), (64,)]),
    "no dimensions": ([(), ()], [()]),
    "empty": ([(0, 3), (0, 3), (1, 4)], [(1, 4)]),
    "empty falls below a quarter": ([(8, 8), (0, 0), (0, 0)], [(8, 8), (1, 1)]),
    "three dimensions": ([(2, 3, 5), (2, 4, 8), (1, 1, 1)], [(2, 4, 8)]),
}


@pytest.mark.parametrize("case", CASES)
def test_capacity(case):
    """A list of requests, and the capacities that are allocated for it, in order."""
    requests, capacities = CASES[case]
    workspace, high_water = Workspace(), 0
    for shape in requests:
        touch(workspace, "a", shape, dtype=torch.float64)
        high_water = max(high_water, workspace.bytes)
    sizes = [8 * torch.Size(capacity).numel() for capacity in capacities]
    assert workspace.allocations == len(capacities)
    assert workspace.bytes == sizes[-1]
    assert workspace.high_water == high_water == max(sizes)


def test_what_is_lent_is_contiguous_and_of_the_shape_asked_for():
    workspace = Workspace()
    for shape in [(3, 5), (2, 7), (0, 4), (4, 8), (3, 1, 5), ()]:
        with workspace.borrow("a", shape) as borrowed:
            assert borrowed.tensor.shape == shape
            assert borrowed.tensor.is_contiguous()
            assert borrowed.tensor._base is None
            assert not borrowed.tensor.requires_grad


def test_growing_never_holds_both_memories():
    """The old memory is returned before the new one is allocated."""
    workspace = Workspace()
    touch(workspace, "a", (1 << 17,))
    found = leangrad.measure(lambda: touch(workspace, "a", (1 << 18,)), timed_runs=0)
    assert found.peak_bytes == (4 << 18) - (4 << 17)
    assert workspace.high_water == 4 << 18


def test_a_repeated_sequence_of_products_allocates_nothing():
    workspace = Workspace()
    factors = [(torch.randn(n, k), torch.randn(k, m)) for n, k, m in [(64, 33, 96), (50, 20, 70), (60, 32, 90)]]
    sums = []

    def step():
        for a, b in factors:
            shape = (a.shape[0], b.shape[1])
            with workspace.borrow("product", shape, like=a) as product, workspace.borrow("map", shape, like=a) as map_:
                torch.mm(a, b, out=product.tensor)
                torch.tanh(product.tensor, out=map_.tensor)
                sums.append(map_.tensor.sum().item())

    step()
    allocations = workspace.allocations
    assert allocations == 2
    found = leangrad.measure(step, timed_runs=0)
    assert workspace.allocations == allocations
    assert max(event.bytes for event in found.timeline) < 1024  # the sums, and no map
    assert sums[:3] == sums[-3:]


# Who gets which memory


def test_names_dtypes_ranks_and_devices_are_apart():
    workspace = Workspace()
    with workspace.borrow("a", (4,)) as first:
        kinds = [
            workspace.borrow("b", (4,)),
            workspace.borrow("a", (4,), dtype=torch.float64),
            workspace.borrow("a", (2, 2)),
            workspace.borrow("a", (4,)),  # the first is still lent
        ]
        addresses = {first.tensor.data_ptr(), *(kind.tensor.data_ptr() for kind in kinds)}
    assert len(addresses) == 5
    assert workspace.bytes == 4 * 16 + 32


def test_the_defaults_are_torchs():
    like = torch.zeros(1, dtype=torch.bfloat16)
    assert Workspace().borrow("a", (2,)).tensor.dtype == torch.float32
    assert Workspace().borrow("a", (2,), like=like).tensor.dtype == torch.bfloat16
    assert Workspace().borrow("a", (2,), dtype=torch.float64, like=like).tensor.dtype == torch.float64
    assert Workspace().borrow("a", (2,), device="cpu", like=like).tensor.dtype == torch.bfloat16
    assert Workspace().borrow("a", (2,), device="meta", like=like).tensor.device.type == "meta"


def test_a_negative_size_is_an_error():
    workspace = Workspace()
    with pytest.raises(ValueError, match=r"expected sizes of 0 or more, got \(2, -1\)"):
        workspace.borrow("a", (2, -1))
    assert workspace.allocations == 0
    touch(workspace, "a", (2, 1))


def test_a_borrower_that_is_gone_has_given_back():
    workspace = Workspace()
    address = workspace.borrow("a", (4,)).tensor.data_ptr()
    assert touch(workspace, "a", (4,)) == address
    assert workspace.allocations == 1


def test_nested_borrowers_find_their_own_memory_again():
    workspace = Workspace()

    def nested(depth):
        with workspace.borrow("a", (4 * depth,)) as borrowed:
            borrowed.tensor.fill_(depth)
            if depth > 1:
                nested(depth - 1)
            assert borrowed.tensor.eq(depth).all()

    nested(5)
    nested(5)
    assert workspace.allocations == 5


def test_failed_allocation_leaves_the_buffer_usable(monkeypatch):
    workspace = Workspace()
    touch(workspace, "a", (4,))
    with monkeypatch.context() as patch:

        def empty(*_, **__):
            raise MemoryError

        patch.setattr(torch, "empty", empty)
        with pytest.raises(MemoryError):
            workspace.borrow("a", (64,))
    assert workspace.bytes == 0
    touch(workspace, "a", (4,))
    assert workspace.bytes == 16


# Generations


def test_touching_what_was_lent_again_raises():
    workspace = Workspace()
    first = workspace.borrow("scores", (4,))
    first.release()
    second = workspace.borrow("scores", (4,))
    assert (first.generation, second.generation) == (1, 2)
    with pytest.raises(StaleError, match=r"borrow 1 of 'scores' was given back .*\(it is at 2\); borrow it anew"):
        _ = first.tensor
    first.release()  # a second time does nothing, to the new borrower least of all
    assert second.tensor.shape == (4,)


def test_touching_what_was_given_back_raises_even_if_nobody_has_it():
    workspace = Workspace()
    with workspace.borrow("a", (4,)) as borrowed:
        assert repr(borrowed) == "Borrowed('a', generation 1, (4,), torch.float32)"
    with pytest.raises(StaleError):
        _ = borrowed.tensor
    assert repr(borrowed) == "Borrowed('a', generation 1, given back)"


def test_a_copy_of_a_borrow_grows_stale_as_well():
    workspace = Workspace()
    first = workspace.borrow("a", (4,))
    second = copy.copy(first)
    first.release()
    third = workspace.borrow("a", (4,))
    with pytest.raises(StaleError):
        _ = second.tensor
    third.tensor.fill_(1)


def test_an_error_gives_back():
    workspace = Workspace()

    def fail():
        with workspace.borrow("a", (4,)):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    touch(workspace, "a", (4,))
    assert workspace.allocations == 1


# What somebody holds is not overwritten


class Keep(torch.autograd.Function):
    """x · k that keeps k as an attribute, unseen by autograd."""

    @staticmethod
    def forward(ctx, x, k):
        ctx.k = k
        return x * k

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.k, None


def lean_graph(t):
    with leangrad.saving(min_bytes=0):
        return (torch.ones(4, requires_grad=True) * t).sum()


HOLDERS = {
    "the tensor": lambda t: t,
    "a view": lambda t: t[1:2],
    "a detached view": lambda t: t[:1].detach(),
    "the storage": lambda t: t.untyped_storage(),
    "numpy": lambda t: t.numpy(),
    "dlpack": lambda t: t.__dlpack__(),
    "data": lambda t: t.data,
    "a closure": lambda t: lambda: t,
    "a graph": lambda t: (torch.ones(4, requires_grad=True) * t).sum(),
    "a graph on a view": lambda t: (torch.ones(2, requires_grad=True) * t[2:]).sum(),
    "a graph that was begun in it": lambda t: t.copy_(torch.ones(4, requires_grad=True)).square(),
    "a context": lambda t: Keep.apply(torch.ones(4, requires_grad=True), t),
    "a ledger": lean_graph,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_is_held_is_left_to_its_holder(holder):
    workspace = Workspace()
    with workspace.borrow("a", (4,)) as borrowed:
        address = borrowed.tensor.data_ptr()
        held = HOLDERS[holder](borrowed.tensor.fill_(2))
    with workspace.borrow("a", (4,)) as again:
        assert again.tensor.data_ptr() != address
        assert (workspace.allocations, workspace.bytes) == (2, 16)  # the first is its holder's now
        other = again.tensor.data_ptr()
    del held
    gc.collect()
    assert touch(workspace, "a", (4,)) == other
    assert workspace.allocations == 2


def test_gradients_through_borrowed_buffers_are_plains():
    """Every product is saved by autograd, in buffers of one name: each must live until its backward."""
    workspace = Workspace()
    x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    factors = [torch.randn(6, 5, dtype=torch.float64) for _ in range(4)]

    def chain(scale):
        y = x
        for factor in factors:
            y = y.tanh() * scale(factor)
        return y

    def pooled(factor):
        with workspace.borrow("scaled", factor.shape, like=factor) as borrowed:
            torch.mul(factor, 3, out=borrowed.tensor)
            return borrowed.tensor

    grad = torch.randn(6, 5, dtype=torch.float64)
    for _ in range(2):
        expected = torch.autograd.grad(chain(lambda factor: factor * 3), x, grad)
        found = torch.autograd.grad(chain(pooled), x, grad)
        assert same_bits(found[0], expected[0])


def test_behind_the_counts_stands_autograds_own_check(monkeypatch):
    """Were the counts ever wrong, the version that all borrows of one memory share would make backward raise."""
    monkeypatch.setattr(module._Buffer, "is_held", False)
    workspace = Workspace()
    x = torch.ones(4, requires_grad=True)
    with workspace.borrow("a", (4,)) as borrowed:
        y = x * borrowed.tensor.fill_(2)
    touch(workspace, "a", (4,))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_where_counts_do_not_tell_all_memory_is_new(monkeypatch):
    monkeypatch.setattr(module, "reference_counts", lambda _: None)
    workspace = Workspace()
    for _ in range(3):
        touch(workspace, "a", (4,))
    assert workspace.allocations == 3


def test_a_graph_in_a_borrowed_buffer_does_not_reach_the_next_borrower():
    workspace = Workspace()
    x = torch.ones(4, requires_grad=True)
    with workspace.borrow("a", (4,)) as borrowed:
        borrowed.tensor.copy_(x)
        assert borrowed.tensor.requires_grad
    with workspace.borrow("a", (4,)) as borrowed:
        assert not borrowed.tensor.requires_grad
    assert workspace.allocations == 1


def test_inference_mode_and_training_share():
    workspace = Workspace()
    with torch.inference_mode():
        address = touch(workspace, "a", (4,))
    x = torch.ones(4, requires_grad=True)
    with workspace.borrow("a", (4,)) as borrowed:
        assert borrowed.tensor.data_ptr() == address
        (x * borrowed.tensor.fill_(2)).sum().backward()
    assert x.grad.eq(2).all()


# Where memory is not used again


def test_a_compiler_gets_new_memory(monkeypatch):
    monkeypatch.setattr(module, "is_traced", lambda: True)
    workspace = Workspace()
    with workspace.borrow("a", (3,)) as first, workspace.borrow("a", (3,)) as second:
        assert first.tensor.data_ptr() != second.tensor.data_ptr()
    assert (workspace.allocations, workspace.bytes) == (0, 0)
    with pytest.raises(StaleError):
        _ = first.tensor


def test_compiled_code_borrows():
    workspace = Workspace()

    def f(a, b):
        with workspace.borrow("product", (a.shape[0], b.shape[1]), like=a) as product:
            torch.mm(a, b, out=product.tensor)
            return product.tensor.sum()

    a, b = torch.randn(3, 4), torch.randn(4, 5)
    assert torch.compile(f, backend="eager", fullgraph=True)(a, b) == f(a, b)
    assert workspace.allocations == 1


def test_transforms_get_new_memory():
    workspace = Workspace()

    def f(x):
        with workspace.borrow("a", x.shape, like=x) as borrowed:
            return x * borrowed.tensor.fill_(2)

    assert torch.func.vmap(f)(torch.ones(3, 4)).eq(2).all()
    assert torch.func.grad(lambda x: f(x).sum())(torch.ones(3)).eq(2).all()
    assert workspace.bytes == 0


def test_fake_tensors_are_never_lent_to_others():
    from torch._subclasses.fake_tensor import FakeTensorMode

    workspace = Workspace()
    with FakeTensorMode():
        touch_fake = workspace.borrow("a", (4,))
        assert type(touch_fake.tensor) is not torch.Tensor
    del touch_fake
    with workspace.borrow("a", (4,)) as borrowed:
        assert type(borrowed.tensor) is torch.Tensor


# Memory comes back


def test_clear_returns_memory():
    workspace = Workspace()
    touch(workspace, "a", (1000,))
    assert workspace.bytes == 4096
    found = leangrad.measure(workspace.clear, timed_runs=0)
    assert workspace.bytes == 0
    assert [event.bytes for event in found.timeline] == [-4096]
    touch(workspace, "a", (1000,))
    assert (workspace.allocations, workspace.bytes, workspace.high_water) == (2, 4096, 4096)


def test_clear_does_not_break_a_live_borrow():
    workspace = Workspace()
    with workspace.borrow("a", (4,)) as borrowed:
        borrowed.tensor.fill_(3)
        workspace.clear()
        assert workspace.bytes == 0
        touch(workspace, "a", (4,))
        assert borrowed.tensor.eq(3).all()


def test_copies_are_empty():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.workspace = Workspace()

    block = Block()
    touch(block.workspace, "a", (4,))
    pickled = pickle.loads(pickle.dumps(block.workspace))
    for other in (copy.deepcopy(block).workspace, copy.copy(block.workspace), pickled):
        assert other is not block.workspace
        assert other.bytes == other.allocations == 0
        touch(other, "a", (4,))


# Threads


def test_each_thread_has_its_own_buffers_which_end_with_it():
    workspace = Workspace()
    address = touch(workspace, "a", (4,))
    others = []

    def work():
        borrowed = workspace.borrow("a", (4,))
        others.append((borrowed.tensor.data_ptr(), workspace.bytes))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert others[0][0] != address
    assert others[0][1] == 32
    assert (workspace.bytes, workspace.high_water, workspace.allocations) == (16, 32, 2)


def test_threads_never_meet_in_one_memory():
    """Each thread fills what it borrows with its number; one of them clears all the while."""
    workspace, errors, n = Workspace(), [], 4
    barrier = threading.Barrier(n)

    def work(number):
        barrier.wait()
        for i in range(150):
            with workspace.borrow("a", (64 + i % 3, 64)) as outer, workspace.borrow("a", (64, 64)) as inner:
                outer.tensor.fill_(number)
                inner.tensor.fill_(-number)
                if number == 1 and i % 10 == 0:
                    workspace.clear()
                if not (outer.tensor.eq(number).all() and inner.tensor.eq(-number).all()):
                    errors.append(number)

    threads = [threading.Thread(target=work, args=(i + 1,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    del threads
    assert workspace.bytes == 0


def test_a_borrow_may_be_given_back_by_another_thread():
    workspace = Workspace()
    borrowed = workspace.borrow("a", (4,))
    thread = threading.Thread(target=borrowed.release)
    thread.start()
    thread.join()
    touch(workspace, "a", (4,))
    assert workspace.allocations == 1
