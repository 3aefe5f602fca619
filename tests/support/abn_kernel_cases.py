"""The kernels of activated batch norm against the eager ops in float64; run by test_abn_kernels.py, also as a script.

As a script, under `TRITON_INTERPRET=1`, the kernels take CPU tensors. Shapes are tiny: the interpreter is slow.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from leangrad.errors import ChangedError
from leangrad.kernels import abn as kernels
from leangrad.kernels import serves
from leangrad.nn.abn import ABN, InPlaceABN, invertibility
from leangrad.nn.abn.recipe import rebuilding
from leangrad.ops import abn as ops
from tests.support import same_bits

SHAPES = {
    "rows": (37, 3),
    "planes": (3, 3, 13),
    "channels_last": (2, 5, 3, 4),
    "wide rows": (5, 67),
    "many tiles": (4, 2, 40, 30),
}


def case(layout: str, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    maps = [torch.randn(SHAPES[layout]) for _ in range(3)]
    maps[0] = maps[0] * 2 + 5
    if layout == "channels_last":
        maps = [t.contiguous(memory_format=torch.channels_last) for t in maps]
    x, dz, residual = (t.to(device=device, dtype=dtype) for t in maps)
    assert serves(x)
    return x, dz, residual


def close(what: str, ours: Tensor, truth: Tensor, dtype: torch.dtype) -> None:
    """Within a few roundings of the largest value."""
    error = (ours.double().cpu() - truth.double().cpu()).abs().max().item()
    allowed = 8 * max(torch.finfo(dtype).eps, 2e-6) * max(1.0, truth.abs().max().item())
    assert error <= allowed, f"{what}: {error:.2e} > {allowed:.2e}"


def check_stats(layout: str, device: str) -> None:
    x, _, _ = case(layout, torch.float32, device)
    x = x + 1000
    mean, var = ops.stats(x)
    dims = [d for d in range(x.dim()) if d != 1]
    truth = x.double()
    close("mean", mean, truth.mean(dims), torch.float32)
    close("var", var, truth.var(dims, correction=0), torch.float32)


def check_passes(
    layout: str, act: ops.Activation, dtype: torch.dtype, device: str, inverted: bool, added: bool
) -> None:
    """Kernels on these maps, eager ops on the same maps in float64, which the kernels do not serve."""
    x, dz, residual = case(layout, dtype, device)
    C = x.shape[1]
    mean, var = ops.stats(x)
    weight = torch.linspace(-1.2, 1.3, C, device=device)
    v = torch.stack((mean, (var + 1e-5).rsqrt(), weight, torch.linspace(0.3, -0.2, C, device=device)))
    exact_v = v.double()
    r, exact_r = (residual, residual.double()) if added else (None, None)
    z = ops.normalize(x, v, act, residual=r, out=torch.empty_like(x))
    exact_z = ops.normalize(x.double(), exact_v, act, residual=exact_r, out=torch.empty_like(x, dtype=torch.float64))
    close("z", z, exact_z, dtype)
    kept = ops.Kept(z if inverted else x, inverted, r)
    # From the very z that was stored: the rounding of z is not the kernel's error.
    exact = ops.Kept(kept.map.double(), inverted, exact_r)
    dy, exact_dy = torch.empty_like(dz), torch.empty_like(dz, dtype=torch.float64)
    sums = ops.backward_sums(kept, dz, v, act, dy_out=dy)
    exact_sums = ops.backward_sums(exact, dz.double(), exact_v, act, dy_out=exact_dy)
    close("dy", dy, exact_dy, dtype)
    close("sums", sums, exact_sums, torch.float32)
    count = x.numel() // C
    for used, exact_used in ((sums, exact_sums), (None, None)):
        dx = ops.backward_input(kept, dz, v, act, used, count, out=torch.empty_like(dz))
        exact_dx = ops.backward_input(exact, dz.double(), exact_v, act, exact_used, count, out=exact_dy)
        close("dx", dx, exact_dx, dtype)


def check_module(device: str) -> None:
    """The whole layer, in place, owned gradient, spare channel, and a held output."""
    for kind, name, absolute in ((InPlaceABN, "leaky_relu", False), (ABN, "relu", True)):
        layer = kind(3, activation=name, absolute=absolute).to(device)
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([0.0, -0.9, 1.1]))
        exact = kind(3, activation=name, absolute=absolute).to(device, torch.float64)
        exact.load_state_dict(layer.state_dict())
        x, dz, _ = case("planes", torch.float32, device)
        x.requires_grad_()
        xd = x.detach().double().requires_grad_()
        z, zd = layer(x * 1), exact(xd * 1)
        held = z.detach().clone()
        (z * 2).backward(dz)
        (zd * 2).backward(dz.double())
        assert same_bits(z, held)
        pairs = [(z, zd), (x.grad, xd.grad), (layer.weight.grad, exact.weight.grad), (layer.bias.grad, exact.bias.grad)]
        pairs += list(zip(layer.buffers(), exact.buffers(), strict=True))
        for ours, truth in pairs:
            close(f"{kind.__name__} {name}", ours.detach(), truth.detach(), torch.float32)


def check_layer(layout: str, name: str, dtype: torch.dtype, device: str, kind: type[ABN], added: bool) -> None:
    """Two launches forward and two backward, against the same layer in float64, from the same rounded maps."""
    x, dz, residual = case(layout, dtype, device)
    C = x.shape[1]
    layer = kind(C, activation=name, activation_param=0.3).to(device)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-1.2, 1.3, C))
        layer.bias.copy_(torch.linspace(0.3, -0.2, C))
    exact = kind(C, activation=name, activation_param=0.3).to(device, torch.float64)
    exact.load_state_dict(layer.state_dict())
    maps = [t.requires_grad_() for t in ((x, residual) if added else (x,))]
    exact_maps = [t.detach().double().requires_grad_() for t in maps]
    truth = exact(*exact_maps)
    with rebuilding():
        z = layer(*(t * 1 for t in maps))
        again = z.grad_fn.recipe.rebuild() if z.grad_fn.recipe is not None else z
    assert same_bits(again, z), "a rebuilt output has other bits"
    close("z", z.detach(), truth.detach(), dtype)
    ours = torch.autograd.grad(z, [*maps, *layer.parameters()], dz)
    theirs = torch.autograd.grad(truth, [*exact_maps, *exact.parameters()], dz.double())
    for what, a, b in zip(("dx", "dr", "dγ", "dβ") if added else ("dx", "dγ", "dβ"), ours, theirs, strict=True):
        close(f"{kind.__name__} {name} {layout} {what}", a, b, dtype)
    for a, b in zip(layer.buffers(), exact.buffers(), strict=True):
        close("running statistics", a, b, torch.float32)


def check_frozen_input(device: str) -> None:
    """Of data, only the gradients of γ and β are wanted: then there is no second pass, and they keep their dtypes."""
    x, dz, _ = case("channels_last", torch.float32, device)
    for kind in (ABN, InPlaceABN):
        for dtype in (torch.float32, torch.bfloat16):
            layer = kind(5, dtype=dtype, device=device)
            exact = kind(5, dtype=torch.float64, device=device)
            ours = torch.autograd.grad(layer(x), [*layer.parameters()], dz)
            theirs = torch.autograd.grad(exact(x.double()), [*exact.parameters()], dz.double())
            for a, b in zip(ours, theirs, strict=True):
                assert a.dtype == dtype
                close(f"{kind.__name__} over data", a, b, dtype)


def check_odd_parameters(device: str) -> None:
    """Kernels get what they can read: strided weights, another dtype of a buffer and a wrong size go the plain way."""
    x, dz, _ = case("rows", torch.float32, device)
    x.requires_grad_()
    layer = ABN(3, activation="relu").to(device)
    strided = torch.linspace(0.5, 2.0, 6, device=device)[::2]
    want = torch.autograd.grad(torch.func.functional_call(layer, {"weight": strided.clone()}, (x,)), x, dz)[0]
    found = torch.autograd.grad(torch.func.functional_call(layer, {"weight": strided}, (x,)), x, dz)[0]
    close("dx with a strided weight", found, want, torch.float32)
    layer.num_batches_tracked = layer.num_batches_tracked.int()
    layer.running_mean = layer.running_mean.double()
    before = layer.num_batches_tracked.item()
    close("dx with odd buffers", torch.autograd.grad(layer(x), x, dz)[0], reference(x, dz), torch.float32)
    assert layer.num_batches_tracked.item() == before + 1
    try:
        torch.func.functional_call(layer, {"weight": torch.ones(2, device=device)}, (x,))
    except RuntimeError:
        return
    raise AssertionError("a weight of the wrong size was taken")


def reference(x: Tensor, dz: Tensor) -> Tensor:
    y = torch.nn.functional.batch_norm(x.double(), None, None, training=True)
    return torch.autograd.grad(y.relu(), x, dz.double())[0]


def check_one_question(device: str) -> None:
    """However many layers invert, the device is asked once in a step; and again once parameters could have changed."""
    asked: list[list[Tensor]] = []
    take = invertibility.Roll.take_question
    roll = lambda: next(iter(invertibility._rolls.of.values()))  # noqa: E731

    def listen(self: invertibility.Roll) -> object:
        taken = take(self)
        if taken is not None:
            asked.append([a.weight for a in self.asked_for])
        return taken

    invertibility.Roll.take_question = listen
    try:
        model = torch.nn.Sequential(InPlaceABN(3), InPlaceABN(3, activation="elu"), InPlaceABN(3)).to(device)
        with torch.no_grad():
            model[0].weight[1] = 0.0  # keeps its input
        x, dz, _ = case("planes", torch.float32, device)
        x.requires_grad_()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            del asked[:]
            model(x * 1).backward(dz)
            optimizer.step()
        assert [{id(t) for t in weights} >= {id(m.weight) for m in model} for weights in asked] == [True]
        del asked[:]
        with torch.no_grad():
            model(x * 1)  # nobody will go backward
        assert not asked
        # As sharding leaves it between two forwards: a parameter without memory is not read.
        model[2].weight.untyped_storage().resize_(0)
        model[:2](x * 1)
        assert [any(t is model[2].weight for t in weights) for weights in asked] == [False]
        assert any(t is model[1].weight for t in asked[0])
        before = len(roll().answers)
        del model, optimizer, asked[:]
        gc.collect()
        assert len(roll().answers) == before - 3, "a layer that died is still asked for"
    finally:
        invertibility.Roll.take_question = take


def check_every_dtype_of_parameters(device: str) -> None:
    """The question reads what the layer reads: one γ of 0, and one that is too small beside its β."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for weights, expected in (([1.0, 0.0, 2.0], [1]), ([1.0, -2.0, 0.5], None), ([1.0, 1.0, -0.1], [2])):
            layer = InPlaceABN(3, dtype=dtype, device=device)
            with torch.no_grad():
                layer.weight.copy_(torch.tensor(weights))
                layer.bias.fill_(0.5)
            answer = invertibility.ask(
                layer, layer.weight, layer.bias, invertibility.limits_of("leaky_relu", 0.01, dtype, 0.0)
            )
            channels = answer.channels()
            assert not answer.roll.open, "asked twice"
            assert answer.roll is not None, "the kernel was not asked"
            assert answer.roll.says_all_invert(answer.slot, answer.mark) == (expected is None)
            assert (None if channels is None else channels.tolist()) == expected
        # Whoever is too late for a word finds no answer in it, and looks for itself.
        invertibility.ask(layer, layer.weight, layer.bias, answer.limits)
        assert not answer.roll.says_all_invert(answer.slot, answer.mark - 1)


def check_more_layers_than_words(device: str) -> None:
    """Whoever has no word in the roll finds out for itself."""
    x, dz, _ = case("planes", torch.float32, device)
    x.requires_grad_()
    words = invertibility.LAYERS
    invertibility.LAYERS = 1
    try:
        layers = [InPlaceABN(3).to(device) for _ in range(3)]
        for layer in layers:
            with torch.no_grad():
                layer.weight[2] = 0.0
        for _ in range(2):
            for layer in layers:
                ours = torch.autograd.grad(layer(x * 1), [x, *layer.parameters()], dz)
                exact = torch.autograd.grad(layer(x), [x, *layer.parameters()], dz)  # keeps its input
                for a, b in zip(ours, exact, strict=True):
                    close("with few words", a, b, torch.float32)
    finally:
        invertibility.LAYERS = words


def check_change_behind_the_counter(device: str) -> None:
    """Parameters that are written through `.data` after backward, as simple optimizers do, are asked for again."""
    layer = InPlaceABN(3).to(device)
    x, dz, _ = case("planes", torch.float32, device)
    x.requires_grad_()
    for weight in (1.0, 0.0, 2.0, 1e-30):
        layer.weight.data[1] = weight
        version = layer.weight._version
        ours = torch.autograd.grad(layer(x * 1), [x, *layer.parameters()], dz)
        exact = torch.autograd.grad(layer(x), [x, *layer.parameters()], dz)
        assert layer.weight._version == version
        for a, b in zip(ours, exact, strict=True):
            close(f"with a weight of {weight}", a, b, torch.float32)


def check_hidden_write(device: str) -> None:
    """A weight that is written through `.data` after the device was asked raises, or gives NaN if the host is ahead."""
    layers = [InPlaceABN(3).to(device) for _ in range(2)]
    x = case("planes", torch.float32, device)[0].requires_grad_()
    for layer in (*layers, layers[0]):
        layer(x * 1)  # the second asks for both, the third finds an answer
    for ahead in (True, False):
        with torch.no_grad():
            layers[1].weight.fill_(1.0)
        layers[0](x * 1)  # asks for both
        layers[1].weight.data[1] = 1e-30
        layers[1].bias.data[1] = 0.5
        z = layers[1](x * 1)
        assert z.isfinite().all()
        if device == "cuda":
            torch.cuda.synchronize()
        late = z.grad_fn.call.answer.roll.late_word
        assert late.value == 3
        if ahead:
            late.value = 0
            (dw,) = torch.autograd.grad(z.square().sum(), layers[1].weight)
            assert dw.isfinite().tolist() == [True, False, True]
        else:
            with pytest.raises(ChangedError, match="over 3 channels was changed"):
                torch.autograd.grad(z.square().sum(), layers[1].weight)
    (dw,) = torch.autograd.grad(layers[1](x * 1).square().sum(), layers[1].weight)  # asked afresh
    assert dw.isfinite().all()


def check_all(device: str) -> None:
    for layout in SHAPES:
        check_stats(layout, device)
    for name in ops.Activation.NAMES:
        act = ops.Activation(name, 0.3)
        check_passes("rows", act, torch.float32, device, inverted=False, added=name == "relu")
        if act.inverts:
            check_passes("planes", act, torch.float32, device, inverted=True, added=False)
    for dtype in (torch.bfloat16, torch.float16):
        check_passes("channels_last", ops.Activation("leaky_relu", 0.3), dtype, device, inverted=True, added=False)
        check_passes("planes", ops.Activation("relu"), dtype, device, inverted=False, added=True)
    check_passes("many tiles", ops.Activation("leaky_relu", 0.3), torch.float32, device, inverted=True, added=False)
    check_passes("wide rows", ops.Activation("silu"), torch.float32, device, inverted=False, added=True)
    check_module(device)
    check_frozen_input(device)
    check_odd_parameters(device)
    check_one_question(device)
    check_every_dtype_of_parameters(device)
    check_hidden_write(device)
    check_more_layers_than_words(device)
    check_change_behind_the_counter(device)
    check_layers(device)
    with planned(ONCE=0):  # as for large maps
        check_module(device)
        check_layers(device)


def check_layers(device: str) -> None:
    for name in ops.Activation.NAMES:
        check_layer("channels_last", name, torch.float32, device, ABN, added=name in ("relu", "identity"))
        check_layer("planes", name, torch.float32, device, InPlaceABN, added=False)
    for layout in SHAPES:
        check_layer(layout, "relu", torch.bfloat16, device, ABN, added=True)
        check_layer(layout, "leaky_relu", torch.float32, device, InPlaceABN, added=False)


@contextmanager
def planned(**names: object) -> Iterator[None]:
    """Inside, layers are planned with other constants or functions of `leangrad.kernels.abn`."""
    before = {name: getattr(kernels, name) for name in names}

    def change(values: dict[str, object]) -> None:
        for name, value in values.items():
            setattr(kernels, name, value)
        kernels.layer.cache_clear()
        ops._fused.clear()

    change(names)
    try:
        yield
    finally:
        change(before)


def check_wide_offsets() -> None:
    """The 64-bit path of the offsets, on a small map."""
    plan = kernels.plan
    with planned(plan=lambda *args: plan(*args)._replace(wide=True)):
        for layout in ("rows", "planes"):
            check_passes(layout, ops.Activation("relu"), torch.float32, "cpu", inverted=False, added=False)
            check_layer(layout, "leaky_relu", torch.float32, "cpu", InPlaceABN, added=False)


if __name__ == "__main__":
    check_all("cpu")
    check_wide_offsets()
    print("all kernels agree", file=sys.stdout)
