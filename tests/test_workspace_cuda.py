"""Workspaces on CUDA: streams, the thread of backward, captured graphs."""

import threading

import pytest
import torch

from leangrad.workspace import Workspace
from tests.support import same_bits

pytestmark = pytest.mark.gpu


def test_streams_have_buffers_of_their_own():
    workspace, side = Workspace(), torch.cuda.Stream()
    with workspace.borrow("a", (4,), device="cuda") as first, torch.cuda.stream(side):
        with workspace.borrow("a", (4,), device="cuda:0") as second:
            assert first.tensor.data_ptr() != second.tensor.data_ptr()
        first.release()
        with workspace.borrow("a", (4,), device="cuda") as third:
            assert third.tensor.data_ptr() != 0
    assert workspace.allocations == 2


def test_a_borrower_on_another_stream_is_waited_for():
    """The side stream reads late; the next borrower of the buffer must not write before it has."""
    workspace, side = Workspace(), torch.cuda.Stream()
    n = 1 << 20
    copies = []
    for i in range(5):
        with workspace.borrow("a", (n,), device="cuda") as borrowed:
            torch.cuda._sleep(10_000_000)
            borrowed.tensor.fill_(i)
            with torch.cuda.stream(side):
                tensor = borrowed.tensor  # waits for the fill
                torch.cuda._sleep(50_000_000)
                copies.append(tensor.clone())
                del tensor
    torch.cuda.synchronize()
    assert workspace.allocations == 1
    assert [copy.unique().tolist() for copy in copies] == [[float(i)] for i in range(5)]


def test_backward_on_its_own_thread_has_buffers_of_its_own():
    workspace, addresses = Workspace(), []

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            with workspace.borrow("a", x.shape, like=x) as borrowed:
                addresses.append((threading.get_ident(), borrowed.tensor.data_ptr()))
                return torch.mul(x, 2, out=borrowed.tensor).clone()

        @staticmethod
        def backward(ctx, grad):
            with workspace.borrow("a", grad.shape, like=grad) as borrowed:
                addresses.append((threading.get_ident(), borrowed.tensor.data_ptr()))
                return torch.mul(grad, 2, out=borrowed.tensor).clone()

    x = torch.randn(64, device="cuda", requires_grad=True)
    for _ in range(3):
        grad = torch.randn(64, device="cuda")
        (found,) = torch.autograd.grad(Scaled.apply(x), x, grad)
        assert same_bits(found, 2 * grad)
    assert len(set(addresses)) == 2
    assert workspace.allocations == 2


def test_a_captured_graph_gets_memory_of_its_own():
    workspace = Workspace()
    x = torch.ones(64, device="cuda")
    with workspace.borrow("a", (64,), like=x):
        pass
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), workspace.borrow("a", (64,), like=x) as borrowed:
        y = torch.mul(x, 2, out=borrowed.tensor).clone()
    assert workspace.bytes == 256
    x.fill_(3)
    graph.replay()
    assert y.eq(6).all()
