"""The zoo is what it says: thirty models that train, repeat bit for bit, and keep enough to show a saving."""

import copy
import doctest
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import zoo
from tests.support import same_bits
from tests.zoo import CASES, HF, SMALL, TAGS, Case, FastBFloat16, bfloat16, case

every_case = pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)


def seeded(one: Case) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return one.make(), one.batch()


def train_once(one: Case) -> tuple[nn.Module, Tensor]:
    """A fresh model after one forward and backward, and its loss."""
    model, batch = seeded(one)
    loss = one.step(model, batch)
    loss.backward()
    return model, loss.detach()


def saved_bytes(one: Case) -> tuple[dict[int, int], int]:
    """Bytes of each storage that autograd keeps, parameters aside, and the bytes of the parameters."""
    model, batch = seeded(one)
    parameters = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    packed: list[weakref.ref[Tensor]] = []

    def pack(tensor: Tensor) -> Tensor:
        held = tensor.detach()
        packed.append(weakref.ref(held))
        return held

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = one.step(model, batch)
    # What a branch without a gradient had saved is gone by now (t5 detaches a maximum); the graph holds the rest.
    storages = [tensor.untyped_storage() for ref in packed if (tensor := ref()) is not None]
    kept = {storage.data_ptr(): storage.nbytes() for storage in storages if storage.data_ptr() not in parameters}
    assert loss.grad_fn is not None
    return kept, sum(parameters.values())


def graph_nodes(loss: Tensor) -> Iterator[torch.autograd.graph.Node]:
    seen, stack = set(), [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack += [following for following, _ in node.next_functions]
            yield node


def test_twenty_small_and_ten_real() -> None:
    assert len(SMALL) == 20
    assert len(HF) == 10
    assert CASES == SMALL + HF
    names = [one.name for one in CASES]
    assert len(set(names)) == 30
    assert all(name.startswith("hf_") for name in names[20:])
    assert all(one.tags <= TAGS.keys() for one in CASES)
    assert set(TAGS) == frozenset().union(*(one.tags for one in CASES))


def test_case_by_name() -> None:
    assert [case(one.name) for one in CASES] == list(CASES)
    with pytest.raises(KeyError, match=r"'alexnet'; there are resnet_inplace, .*hf_clip"):
        case("alexnet")


def test_example_runs() -> None:
    assert doctest.testmod(zoo) == (0, 3)  # failed, attempted
    assert doctest.testmod(bfloat16) == (0, 1)


def test_import_leaves_transformers_alone() -> None:
    code = "import sys, tests.zoo; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(24, 72, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*self.qkv(x).chunk(3, dim=-1))


def products(kind: str) -> tuple[nn.Module, Tensor]:
    if kind == "attention":
        return Attention(), torch.randn(3, 2, 20, 24)
    if kind == "conv":
        return nn.Conv2d(24, 8, 3), torch.randn(6, 24, 5, 5)
    return nn.Linear(24, 8), torch.randn(6, 5, 24)


def train_bfloat16(model: nn.Module, x: Tensor, mode: AbstractContextManager[Any]) -> tuple[list[Tensor], list[Any]]:
    """Output and gradients of one autocast step (plain in float64), and the kinds of tensors that autograd saved."""
    saved: list[Any] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append((tensor.dtype, tensor.shape))
        return tensor

    leaf = x.clone().requires_grad_()
    with mode, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16, enabled=x.dtype == torch.float32):
            y = model(leaf)
        y.backward(torch.arange(y.numel(), dtype=torch.float32).cos().view(y.shape).to(y.dtype))
    gradients = [leaf.grad, *(parameter.grad for parameter in model.parameters())]
    return [y.detach(), *(grad for grad in gradients if grad is not None)], saved


# Said by `mkldnn.flags` itself; with oneDNN off a product in bfloat16 leaves the process as it was.
@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
@pytest.mark.parametrize("kind", ["linear", "conv", "attention"])
def test_fast_bfloat16_is_bfloat16(kind: str) -> None:
    model, x = products(kind)
    slow, saved = train_bfloat16(copy.deepcopy(model), x, torch.backends.mkldnn.flags(enabled=False))
    fast, saved_fast = train_bfloat16(copy.deepcopy(model), x, FastBFloat16())
    exact, _ = train_bfloat16(copy.deepcopy(model).double(), x.double(), nullcontext())
    assert [t.dtype for t in fast] == [t.dtype for t in slow]
    assert saved_fast == saved
    for ours, truth in zip(fast, exact, strict=True):
        # A value passes a handful of roundings to bfloat16, each of 2⁻⁹ of it at most.
        assert (ours - truth).abs().max() <= 8 * 2**-9 * truth.abs().max()


@every_case
@pytest.mark.sampled(3)
def test_every_parameter_learns_and_runs_repeat(one: Case) -> None:
    model, loss = train_once(one)
    again, same_loss = train_once(one)
    assert loss.shape == ()
    assert loss.isfinite()
    assert same_bits(loss, same_loss)
    assert all(module.training for module in model.modules()) or one.name == "frozen"

    repeated = dict(again.named_parameters())
    nonzero = 0
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for name, parameter in trainable:
        grad, same_grad = parameter.grad, repeated[name].grad
        assert grad is not None, name
        assert same_grad is not None, name
        assert grad.isfinite().all(), name
        assert same_bits(grad, same_grad), name
        nonzero += bool(grad.any())
    assert nonzero >= 0.9 * len(trainable)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)

    buffers = dict(again.named_buffers())
    for name, buffer in model.named_buffers():
        assert same_bits(buffer, buffers[name]), name


@every_case
@pytest.mark.sampled(3)
def test_bfloat16_autocast(one: Case) -> None:
    model, batch = seeded(one)
    with FastBFloat16():
        with torch.autocast("cpu", torch.bfloat16):
            loss = one.step(model, batch)
        loss.backward()
    assert loss.isfinite()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert parameter.grad.dtype == torch.float32
            assert parameter.grad.isfinite().all(), name


@every_case
def test_sizes(one: Case) -> None:
    kept, parameter_bytes = saved_bytes(one)
    total = sum(kept.values())
    assert 5e6 < total < 60e6
    assert total > 2 * parameter_bytes
    # The maps of 64 KiB and more hold nearly everything: what is small does not hide a saving.
    large = [size for size in kept.values() if size >= 64 * 1024]
    # (A recurrent net keeps a few KiB for each moment of time as well.)
    assert sum(large) > 0.9 * total or "recurrent" in one.tags
    assert max(large) >= 256 * 1024


@every_case
def test_tags_tell_the_truth(one: Case) -> None:
    model, batch = seeded(one)
    calls: dict[nn.Module, int] = {}
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_hook(lambda module, _, __: calls.update({module: calls.get(module, 0) + 1}))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    parameters = list(model.named_parameters(remove_duplicate=False))
    random_state = torch.get_rng_state()

    loss = one.step(model, batch)
    drew = not same_bits(random_state, torch.get_rng_state())
    called_again = any(count > 1 for count in calls.values())
    nodes = list(graph_nodes(loss))
    torch.set_rng_state(random_state)
    second_loss = one.step(model, batch)

    found = {
        "conv": any(isinstance(module, (nn.Conv1d, nn.Conv2d)) for module in model.modules()),
        "batchnorm": any(not same_bits(buffer, buffers[name]) for name, buffer in model.named_buffers()),
        "views": any("CopySlices" in node.name() for node in nodes),
        "dropout": drew,
        "scalar": not same_bits(loss, second_loss),
        "tied": len({parameter for _, parameter in parameters}) < len(parameters),
        "shared": called_again,
        "frozen": any(not parameter.requires_grad for _, parameter in parameters),
        "custom": any(isinstance(node, torch.autograd.function.BackwardCFunction) for node in nodes),
    }
    assert {tag for tag, true in found.items() if true} == one.tags & found.keys()
