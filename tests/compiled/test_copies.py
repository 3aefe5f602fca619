"""Readers in backward that compute a recomputed value once more: ReLU's derivative, a sigmoid's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from leangrad.compiled import compile_lean
from leangrad.compiled.copies import NamedCopy, insert_copies
from leangrad.compiled.joint_graph import op_name
from leangrad.compiled.partitioner import Settings
from tests.support.compiling import is_near, no_caches
from tests.support.partitions import Partition, Partitions, moved_by_backward

CONVOLUTION = torch.ops.aten.convolution_backward.default


def network(activation: type[nn.Module], layers: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), activation()) for _ in range(layers)
    ]
    return nn.Sequential(nn.Conv2d(3, 8, 1), *blocks, nn.Conv2d(8, 2, 1))


def cut(model: nn.Module, x: Tensor, *, autocast: bool = False) -> Partition:
    found = Partitions(Settings(slowdown=10.0))
    torch._dynamo.reset()
    step = torch.compile(model, backend=found.backend)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = step(x)
    out.float().square().sum().backward()
    (part,) = found.found
    assert part.compared > 0
    assert not part.differences
    return part


def read_by_products(graph: fx.Graph) -> set[fx.Node]:
    return {node.args[1] for node in graph.find_nodes(op="call_function", target=CONVOLUTION)}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Sigmoid, nn.Tanh])
def test_the_derivative_does_not_read_what_the_product_read(activation: type[nn.Module], autocast: bool) -> None:
    part = cut(network(activation), torch.randn(2, 3, 16, 16), autocast=autocast)
    graph = part.backward.graph
    made = [node for node in read_by_products(graph) if node.op != "placeholder"]
    assert len(made) == 3 + autocast  # the cast of the batch too
    for node in made:
        assert {user.target for user in node.users} == {CONVOLUTION}, (node, list(node.users))


def test_each_kernel_has_its_own_copy() -> None:
    """Nodes that several kernels read would get a buffer: with a copy they are computed from more memories."""
    part = cut(network(nn.ReLU), torch.randn(2, 3, 16, 16))
    masks = [node for node in part.backward.graph.nodes if op_name(node) == "le"]
    assert len(masks) > 3
    assert all(len(node.users) == 1 for node in masks)


def test_gradients_under_inductor() -> None:
    x = torch.randn(2, 3, 16, 16)
    expected, model = network(nn.ReLU), network(nn.ReLU)
    with no_caches():
        torch.compile(model, backend=compile_lean, options={"leangrad.slowdown": 10.0})(x).square().sum().backward()
    expected(x).square().sum().backward()
    for ours, plain in zip(model.parameters(), expected.parameters(), strict=True):
        assert is_near(ours.grad, plain.grad)


def test_only_the_named_readers_use_a_copy() -> None:
    """Of two readers of ``v`` one is named. It gets nodes of its own; the other one reads ``v`` itself."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        v = torch.relu(torch.sin(x))
        return torch.mul(v, y), torch.add(v, y)

    module = fx.symbolic_trace(function)
    graph = module.graph
    one = NamedCopy("relu", frozenset({"relu", "sin"}), frozenset({"mul"}), frozenset(), frozenset({"mul"}))
    insert_copies(graph, [one])
    module.recompile()
    nodes = {node.name: node for node in graph.nodes}
    assert nodes["add"].args[0].name == "relu"
    assert nodes["mul"].args[0].name not in ("relu", "sin")
    assert [str(node.target.__name__) for node in graph.nodes if node.op == "call_function"].count("relu") == 2
    x, y = torch.randn(5), torch.randn(5)
    for ours, plain in zip(module(x, y), function(x, y), strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=0)


def test_a_copy_with_a_node_that_is_gone_or_that_defines_a_size_is_left_out() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.mul(torch.relu(x), x)

    for change in ("gone", "size"):
        graph = fx.symbolic_trace(function).graph
        (relu,) = graph.find_nodes(op="call_function", target=torch.relu)
        ops = frozenset({"relu", *(("sin",) if change == "gone" else ())})
        if change == "size":
            relu.meta["unbacked_bindings"] = {"u0": ()}
        insert_copies(graph, [NamedCopy("relu", ops, frozenset({"mul"}), frozenset(), frozenset({"mul"}))])
        assert len(graph.find_nodes(op="call_function", target=torch.relu)) == 1


@pytest.mark.parametrize("change", ["static", "dynamic", "concatenated"])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Sigmoid])
def test_inductor_moves_fewer_bytes(activation: type[nn.Module], change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the scheduler's own count, with its rules for a GPU: a copy that got a buffer of its own would move more."""
    monkeypatch.setattr("torch._inductor.ir.is_cpu", lambda value: False)
    model = Dense(activation) if change == "concatenated" else network(activation)
    moved = []
    for insert in (insert_copies, lambda graph, copies: None):
        monkeypatch.setattr("leangrad.compiled.partitioner.insert_copies", insert)
        moved.append(moved_by_backward(model, torch.randn(2, 3, 16, 16), dynamic=change == "dynamic").nbytes)
    layers, size = 3, 2 * 8 * 16 * 16 * 4
    assert moved[0] <= moved[1] - layers * size


class Dense(nn.Module):
    """Each layer reads the results of all before it, so its norm reads many memories."""

    def __init__(self, activation: type[nn.Module], layers: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.activation = nn.Conv2d(3, 8, 1), activation()
        self.norms = nn.ModuleList(nn.BatchNorm2d(8 * (n + 1)) for n in range(layers))
        self.convolutions = nn.ModuleList(nn.Conv2d(8 * (n + 1), 8, 3, padding=1) for n in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        found = [self.first(x)]
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            found.append(convolution(self.activation(norm(torch.cat(found, 1)))))
        return torch.cat(found, 1)
