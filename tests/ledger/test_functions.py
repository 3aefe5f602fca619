"""Autograd Functions of our own inside a ledger's region: their outputs are rebuilt, their buffers stay their own."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import leangrad
import leangrad.nn as lnn
from leangrad import is_lean, lean, ledger_of, pack_gradients, plain, saving
from leangrad.errors import ChangedError, ConsumedError
from leangrad.ledger.origins.graph_walk import COPIED_BYTES
from leangrad.measure import measure
from leangrad.nn.abn.recipe import _partly_lean
from tests.support import same_bits

Net = Callable[[], nn.Module]


def gradients(model: nn.Module, x: Tensor, steps: int = 4) -> list[list[Tensor]]:
    """Of every step, those of the input and of all parameters."""
    found = []
    for n in range(steps):
        model.zero_grad()
        x.grad = None
        torch.manual_seed(n)
        model(x).square().sum().backward()
        found.append([t.grad.clone() for t in (x, *model.parameters()) if t.grad is not None])
    return found


def assert_same_bits(a: list[list[Tensor]], b: list[list[Tensor]]) -> None:
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        assert len(one) == len(other)
        for x, y in zip(one, other, strict=True):
            assert same_bits(x, y)


def built(make: Net) -> nn.Module:
    torch.manual_seed(0)
    return make()


class Block(nn.Module):
    """Two layers and a residual sum before the activation."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.bn1(self.conv1(x)))
        z: Tensor = self.act(self.bn2(self.conv2(y)) + x)
        return z


def residual_net(act: Callable[[], nn.Module] = nn.ReLU) -> nn.Module:
    stem = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), act(), nn.MaxPool2d(2))
    return lnn.convert_abn(nn.Sequential(*stem, Block(act()), Block(act()), Block(act()), nn.Conv2d(8, 4, 1)))


def image(*shape: int, **options: object) -> Tensor:
    return torch.randn(shape or (4, 3, 34, 34), generator=torch.Generator().manual_seed(1), **options)  # type: ignore[call-overload, no-any-return]


def kept_and_rebuilt(model: nn.Module, op: str) -> tuple[int, int]:
    recorder = ledger_of(model)._recorded
    assert recorder is not None
    entries = [e for e in recorder.entries if e.op == op]
    return tuple(sum(e.nbytes for e in entries if e.outcome == what) for what in ("kept", "rebuilt"))  # type: ignore[return-value]


# ------------------------------------------------------------------------------------------------------ batch norm


@pytest.mark.parametrize("act", [nn.ReLU, nn.SiLU, nn.GELU, nn.Hardswish, lambda: nn.LeakyReLU(0.1)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_outputs_of_converted_norms_are_rebuilt_bit_for_bit(act: Callable[[], nn.Module], channels_last: bool) -> None:
    x = image(requires_grad=True)
    if channels_last:
        x = x.detach().to(memory_format=torch.channels_last).requires_grad_()
    alone, both = built(lambda: residual_net(act)), lean(built(lambda: residual_net(act)))
    assert_same_bits(gradients(alone, x), gradients(both, x))
    kept, rebuilt = kept_and_rebuilt(both, "ABNFunctionBackward")
    assert kept == 0
    assert rebuilt > 0
    ledger = ledger_of(both)
    assert ledger.trace is not None, "steps with such layers are followed, not recorded anew"
    assert "ABNFunction" in ledger.summary()


def test_norms_in_eval_mode_and_a_frozen_input() -> None:
    def make() -> nn.Module:
        model = residual_net()
        for module in model.modules():
            if isinstance(module, lnn.ABN):
                module.eval()
        return model

    x = image()  # it needs no gradient: the first layer has no edge for what it saves
    assert_same_bits(gradients(built(make), x), gradients(lean(built(make)), x))


def test_a_layer_over_an_input_that_needs_no_gradient() -> None:
    def make() -> nn.Module:
        return nn.Sequential(lnn.ABN(3, activation="relu"), nn.Conv2d(3, 4, 1))

    x = image()
    model = lean(built(make))
    assert_same_bits(gradients(built(make), x), gradients(model, x))
    assert kept_and_rebuilt(model, "ABNFunctionBackward")[0] == 0


def test_an_activation_of_the_users_runs_again_in_its_own_backward_only() -> None:
    calls = 0

    def activation(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x * x

    model = lean(nn.Sequential(nn.Conv2d(3, 8, 3), lnn.ABN(8, activation=activation), nn.Conv2d(8, 4, 1)))
    model(image()).sum().backward()
    assert calls == 2, "in forward, and in backward for its derivative; its output is kept"
    assert kept_and_rebuilt(model, "ABNFunctionBackward")[1] == 0


def test_an_input_that_was_changed_after_forward_is_an_error() -> None:
    conv, abn, last = nn.Conv2d(3, 8, 3), lnn.ABN(8, activation="relu"), nn.Conv2d(8, 4, 1)
    with saving():
        y = conv(image())
        out = last(abn(y))
    with torch.no_grad():
        y.zero_()
    with pytest.raises(ChangedError, match="modified by an inplace operation"):
        out.sum().backward()


def test_backward_runs_again_over_a_kept_graph() -> None:
    alone, both = built(residual_net), lean(built(residual_net))
    x = image(requires_grad=True)
    for _ in range(3):
        found = []
        for model in (alone, both):
            model.zero_grad()
            out = model(x).square().sum()
            out.backward(retain_graph=True)
            out.backward()
            found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        assert_same_bits(found[:1], found[1:])


def test_the_inverted_layer_shares_its_output_with_the_convolution() -> None:
    def make() -> nn.Module:
        layers = [m for _ in range(4) for m in (nn.Conv2d(8, 8, 3, padding=1), lnn.InPlaceABN(8))]
        return nn.Sequential(nn.Conv2d(3, 8, 3), lnn.InPlaceABN(8), *layers)

    x = image(requires_grad=True)
    alone, both = built(make), lean(built(make))
    assert_same_bits(gradients(alone, x), gradients(both, x))
    peaks = [measure(lambda m=m: m(x).square().sum().backward(), timed_runs=0).peak_bytes for m in (alone, both)]  # type: ignore[misc]
    assert peaks[1] <= 1.01 * peaks[0]


def test_running_statistics_that_a_recipe_reads_are_not_lost() -> None:
    """A frozen use of the statistics before a layer changes them: the recipe reads what they were."""
    channels = COPIED_BYTES // 4 + 1  # smaller operands are copied
    abn = lnn.ABN(channels, activation="relu")
    w = image(4, channels, requires_grad=True)
    results = []
    for region in (None, saving(min_bytes=0)):
        torch.manual_seed(3)
        abn.reset_parameters()
        w.grad = None
        for _ in range(3):
            if region is not None:
                region.__enter__()
            y = ((w + abn.running_mean).exp() * w).sin()  # type: ignore[operator]
            z = abn(y)
            if region is not None:
                region.__exit__(None, None, None)
            (z.square().sum() + y.sum()).backward()
        assert w.grad is not None
        results.append([w.grad.clone()])
    assert_same_bits(results[:1], results[1:])


def test_a_converted_model_with_lean_parts_runs_in_one_region() -> None:
    def make() -> nn.Module:
        model = residual_net()
        for part in model.children():
            if isinstance(part, Block):
                lean(part)
        return model

    x = image(requires_grad=True)
    alone, parts = built(residual_net), built(make)
    assert_same_bits(gradients(alone, x), gradients(parts, x))
    assert parts in _partly_lean
    peaks = [measure(lambda m=m: m(x).square().sum().backward(), timed_runs=0).peak_bytes for m in (alone, parts)]  # type: ignore[misc]
    assert peaks[1] <= 1.02 * peaks[0]
    for part in parts.children():
        plain(part)
    assert_same_bits(gradients(alone, x, 2), gradients(parts, x, 2))
    assert parts not in _partly_lean


# ---------------------------------------------------------------------------------------------- nodes of their own


def dense(activation: str) -> Net:
    return lambda: nn.Sequential(
        nn.LayerNorm(64), lnn.Dense(64, 128, activation=activation), lnn.Dense(128, 64, activation=activation)
    )


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "swiglu"])
def test_a_dense_layers_output_is_rebuilt_from_what_its_node_keeps(activation: str) -> None:
    x = torch.randn(128, 64, requires_grad=True)
    model = lean(built(dense(activation)))
    assert_same_bits(gradients(built(dense(activation)), x), gradients(model, x))
    if activation != "relu":  # which keeps its output
        assert kept_and_rebuilt(model, "_NodeBackward") == (0, 128 * 128 * 4)


def test_what_a_reader_may_still_want_is_not_overwritten() -> None:
    """A branch that is read after the layer's own backward: plain reads the tensor that it saved, so must we."""
    layer, w = lnn.Dense(64, 128, activation="swiglu"), torch.randn(128, 128, requires_grad=True)
    x = torch.randn(128, 64, requires_grad=True)
    expected = None
    for region in (None, saving(min_bytes=0)):
        for _ in range(3):
            if region is not None:
                region.__enter__()
            y = layer(x)
            branch = y * w
            other = y.sin()
            if region is not None:
                region.__exit__(None, None, None)
            other.sum().backward()  # the layer's node writes over what it keeps, if nobody else holds it
            (found,) = torch.autograd.grad(branch.sum(), w)  # reads the output
            expected = found if expected is None else expected
            assert same_bits(found, expected)


def test_a_second_backward_without_a_kept_graph_is_refused_as_ever() -> None:
    model = lean(built(dense("gelu")))
    out = model(torch.randn(128, 64)).sum()
    out.backward()
    with pytest.raises((ConsumedError, RuntimeError)):
        out.backward()


def test_a_second_derivative_through_a_dense_layer() -> None:
    x = torch.randn(128, 64, requires_grad=True)
    found = []
    for model in (built(dense("gelu")), lean(built(dense("gelu")))):
        for _ in range(3):
            (g,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            (h,) = torch.autograd.grad(g.square().sum(), x)
        found.append([h])
    assert_same_bits(found[:1], found[1:])


def test_a_graph_that_is_dropped_frees_everything() -> None:
    model = lean(built(dense("gelu")))
    x = torch.randn(128, 64)
    model(x).sum().backward()
    gc.collect()
    gc.disable()
    try:
        refs = []
        for _ in range(2):
            out = model(x)
            recording = out.grad_fn.recording
            refs += [weakref.ref(recording), *(weakref.ref(t) for t in recording.kept if t is not None)]
            del out, recording
        assert [ref() for ref in refs] == [None] * len(refs)
    finally:
        gc.enable()


def test_blocks_are_one_node_in_the_recorded_step_too() -> None:
    block = lean(lnn.TransformerBlock(64, 4))
    x = torch.randn(8, 128, 64)
    names = [type(block(x).grad_fn).__name__ for _ in range(2)]
    assert names == ["_NodeBackward"] * 2
    child = lean(lnn.TransformerBlock(64, 4))
    lean(child.ffn)
    assert type(child(x).grad_fn).__name__ == "_NodeBackward", "a child that is lean is still as it was made"
    child.ffn.register_forward_hook(lambda *_: None)
    assert type(child(x).grad_fn).__name__ != "_NodeBackward"


def test_packed_products_keep_no_cast_for_a_ledger() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    packed = pack_gradients(model)
    lean(model)
    x = torch.randn(8, 256)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        out.float().sum().backward()

    for _ in range(3):
        step()
    kept = measure(step, timed_runs=0).kept_bytes
    assert kept < 4 * 256 * 256  # below half of the casts, 2 bytes each
    assert packed is not None


class Checkpointed(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("lean_parts", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
def test_a_node_saves_as_many_tensors_when_a_checkpoint_runs_it_again(activation: str, lean_parts: bool) -> None:
    """Inside a lean model as well, where the ledger's hooks are set around it in one of the two runs only."""

    def make() -> nn.Module:
        mlp = lnn.MLP([64, 512, 64], activation, output_activation="gelu")
        return Checkpointed(nn.Sequential(nn.LayerNorm(64), mlp), dense(activation)())

    x = torch.randn(512, 64, requires_grad=True)
    model = built(make)
    for module in model.parts if lean_parts else [model]:  # type: ignore[union-attr]
        lean(module)
    assert_same_bits(gradients(built(make), x), gradients(model, x))


def test_what_other_hooks_hand_back_is_not_overwritten() -> None:
    """A hook that hands out a tensor which it keeps, by its name alone."""
    mlp, x, handed = lnn.MLP([64, 512, 64], "swiglu"), torch.randn(512, 64), []

    def hand_out(t: Tensor) -> Tensor:
        handed.append((t, t.clone()))
        return t

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), hand_out):
        y = mlp(x)
    y.sum().backward()
    assert len(handed) >= 3
    assert all(same_bits(now, then) for now, then in handed)


# --------------------------------------------------------------------------------------------------- backward hooks


def test_recipes_pass_through_backward_hooks() -> None:
    class Doubled(nn.Module):
        """Its sine keeps 2x, which is made from what the hook hands on and nobody saves."""

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(x * 2)

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.GELU(), Doubled(), nn.Linear(64, 64))

    x = torch.randn(128, 64, requires_grad=True)
    model, seen = lean(built(make)), []
    model[2].register_full_backward_hook(lambda module, given, made: seen.append(made[0].clone()))
    model[1].register_full_backward_pre_hook(lambda module, made: seen.append(made[0].clone()))
    assert_same_bits(gradients(built(make), x), gradients(model, x))
    assert len(seen) == 8
    assert kept_and_rebuilt(model, "MulBackward0") == (0, 128 * 64 * 4)


def test_lean_and_backward_hooks_on_one_module() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

    x = torch.randn(128, 64, requires_grad=True)
    model = built(make)
    model.register_full_backward_hook(lambda *_: None)
    lean(model)
    guards = []

    def make_anew(module: nn.Module, args: tuple[Any, ...]) -> None:
        guards.append((type(args)(*args).guard, args.guard))  # type: ignore[attr-defined]

    model.register_forward_pre_hook(make_anew)
    assert_same_bits(gradients(built(make), x), gradients(model, x))
    assert all(new is old is not None for new, old in guards)
    guards.clear()
    assert kept_and_rebuilt(model, "GeluBackward0")[1] > 0, "the region was open while forward ran"
    assert is_lean(model)


def test_the_disguise_is_only_for_our_own_hooks() -> None:
    assert all(hook.is_leangrads for hook in (leangrad.lean.__globals__["Enter"], leangrad.lean.__globals__["Leave"]))
