"""Forwards whose trace would not be what they do: they are left alone, or the converted model computes the same."""

from __future__ import annotations

import cProfile
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leangrad.errors import LeangradError
from leangrad.nn.convert import convert_abn
from tests.support import forwards, same_bits
from tests.support.converted import Base, assert_alike, call, image, is_fused, plain_and_converted

reverse = forwards.Reverse.apply


class UsesFunction(Base):
    def forward(self, x: Tensor) -> Tensor:
        return reverse(self.act(self.bn(self.conv(x))))


class UsesFunctionOfHelper(Base):
    def forward(self, x: Tensor) -> Tensor:
        return forwards.reversed_gradient(self.act(self.bn(self.conv(x))))


class Hashes(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.bn(self.conv(x)))
        return y * 2 if x.dtype in {torch.float16, torch.float64} else y


class LooksUp(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x))) * {3: 5.0}.get(x.shape[1], 1.0)


class Formats(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.bn(self.conv(x)))
        return y * 2 if "cpu" in str(x.device) else y


class NamesByShape(Base):
    scale3 = 4.0

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x))) * getattr(self, f"scale{x.shape[1]}", 1.0)


class Matches(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.bn(self.conv(x)))
        match x:
            case Tensor():
                return y * 2
        return y


class Two(NamedTuple):
    value: Tensor
    aux: Tensor | None


class GivesTwo(nn.Module):
    def forward(self, x: Tensor) -> Two:
        return Two(x * 2, None)


class AsksForNone(Base):
    def __init__(self) -> None:
        super().__init__()
        self.two = GivesTwo()

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.bn(self.conv(x)))
        out = self.two(y)
        return y if out.aux is None else y + out.aux


def merged(x: Tensor, aux: Tensor | None) -> Tensor:
    return x if aux is None else x + aux


class AsksInHelper(Base):
    def forward(self, x: Tensor) -> Tensor:
        return merged(self.act(self.bn(self.conv(x))), self.last(x))


class SetsSeed(Base):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return self.act(self.bn(self.conv(x)))


class SetsGradMode(Base):
    def forward(self, x: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        return self.act(self.bn(self.conv(x)))


LOG: list[Any] = []


def noted(x: Tensor) -> Tensor:
    LOG.append(x)
    return x


class Notes(Base):
    def forward(self, x: Tensor) -> Tensor:
        return noted(self.act(self.bn(self.conv(x))))


def counted(x: Tensor, memory: list[int] = []) -> Tensor:  # noqa: B006
    memory.append(1)
    return x * len(memory)


class MutableDefaultOfHelper(Base):
    def forward(self, x: Tensor) -> Tensor:
        return counted(self.act(self.bn(self.conv(x))))


class Constants:
    scale = 2.0


class ClassAttribute(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x))) * Constants.scale


class OwnClass(Base):
    factor = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x))) * self.__class__.factor


class LooseTensor(Base):
    def __init__(self) -> None:
        super().__init__()
        self.anchors = torch.ones(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x))) * len(self.anchors)


class TwoNames(Base):
    def __init__(self) -> None:
        super().__init__()
        self.other = self.act

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.last(self.act(self.bn(self.conv(x)))))


class Doubled(nn.Conv2d):
    def __call__(self, x: Tensor) -> Tensor:
        return nn.Module.__call__(self, x) * 2


class OwnCall(Base):
    def __init__(self) -> None:
        super().__init__()
        self.last = Doubled(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.bn(self.conv(x))))


class Lists(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(1))])

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.bn(self.conv(x)))
        for scale in self.scales:
            x = x * scale
        return x


class Ordered(Base):
    def forward(self, x: Tensor) -> OrderedDict[str, Tensor]:
        return OrderedDict(out=self.act(self.bn(self.conv(x))))


k = 3.0


class ShadowsAGlobal(Base):
    def forward(self, x: Tensor) -> Tensor:
        scales = [k + 1 for k in range(2)]
        return self.act(self.bn(self.conv(x))) * k * scales[0]


class UnknownAttribute(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.bn(self.conv(x)))
        return y * getattr(y, "scale", 2.0)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (UsesFunction, "the global `reverse`"),
        (UsesFunctionOfHelper, "autograd function"),
        (Hashes, "hashes a property"),
        (LooksUp, "hashes a property"),
        (Formats, "formats a property"),
        (NamesByShape, "formats a property"),
        (Matches, "a match statement"),
        (AsksForNone, "an `is`"),
        (AsksInHelper, "`merged` has an `is`"),
        (SetsSeed, "`torch.manual_seed`"),
        (SetsGradMode, "`torch.set_grad_enabled`"),
        (Notes, "`noted` has the global `LOG`"),
        (MutableDefaultOfHelper, "`counted` has a default that may change"),
        (ClassAttribute, "the class attribute `Constants.scale`"),
        (OwnClass, "`.__class__`"),
        (LooseTensor, "reads `.anchors`, a Tensor"),
        (TwoNames, "which has other names too"),
        (OwnCall, "a `__call__` of its own"),
        (Lists, "the length or the keys of `scales`"),
        (Ordered, "returns a OrderedDict"),
        (ShadowsAGlobal, "the global `k`"),
        (UnknownAttribute, "what may be no tensor"),
    ],
)
def test_what_a_trace_would_lose_is_left_alone(make: type[Base], reason: str) -> None:
    model = make()
    state, profile = torch.get_rng_state(), sys.getprofile()
    with pytest.warns(UserWarning, match="converted none"):
        converted = convert_abn(model)
    assert type(converted) is make
    assert type(converted.bn) is nn.BatchNorm2d
    assert reason in converted.abn_conversions[0].reason, converted.abn_conversions  # type: ignore[index]
    assert torch.is_grad_enabled()
    assert same_bits(torch.get_rng_state(), state)
    assert sys.getprofile() is profile
    assert not LOG
    assert len(counted.__defaults__[0]) == 0  # type: ignore[index, arg-type]


class Weighted(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + 0.5 * b


class ChildNamedAdd(Base):
    def __init__(self) -> None:
        super().__init__()
        self.add = Weighted()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.add(self.bn(self.conv(x)), x))


class ShapeThatChanges(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.bn(self.conv(x)))
        z = y * 1
        shape = z.shape
        z.unsqueeze_(0)
        return y * shape[0]


class ResidualChangesLater(Base):
    def forward(self, x: Tensor) -> Tensor:
        other = self.last(x)
        y = self.act(self.bn(self.conv(x)) + other)
        other.mul_(3)
        return y + other


@pytest.mark.parametrize("make", [ChildNamedAdd, ShapeThatChanges, ResidualChangesLater])
def test_forwards_that_are_converted_in_part(make: type[Base]) -> None:
    assert_alike(*plain_and_converted(make(), fused=None), call)


class Scaler:
    def __init__(self) -> None:
        self.factor = 2.0

    def apply(self, x: Tensor) -> Tensor:
        return x * self.factor


class MethodOfAnother(Base):
    def __init__(self) -> None:
        super().__init__()
        self.function = Scaler().apply

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.act(self.bn(self.conv(x))))


class ClassMethod(Base):
    factor = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.act(self.bn(self.conv(x))))

    @classmethod
    def scaled(cls, x: Tensor) -> Tensor:
        return x * cls.factor


class Owned(nn.Module):
    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        vars(self)["owner"] = owner

    def factor(self) -> float:
        return float(self.owner.alpha)  # type: ignore[union-attr, arg-type]


class AsksItsOwner(Base):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Owned(Base())

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x))) * self.inner.factor()


class AsksForTheClass(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.bn(self.conv(x)))
        return y * 2 if x.__class__ == Tensor else y


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (MethodOfAnother, "a method of another object"),
        (ClassMethod, "a method of another object"),
        (AsksItsOwner, "a module that is no child"),
        (AsksForTheClass, "`.__class__`"),
    ],
)
def test_what_others_may_change_is_left_alone(make: type[Base], reason: str) -> None:
    with pytest.warns(UserWarning, match="converted none"):
        converted = convert_abn(make())
    assert reason in converted.abn_conversions[0].reason, converted.abn_conversions  # type: ignore[index]


# ------------------------------------------------------------------------------------------------- what changes later


class Attribute(Base):
    def __init__(self) -> None:
        super().__init__()
        self.function = F.relu

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.act(self.bn(self.conv(x))) - 0.2))


class Inner(nn.Module):
    def encode(self, x: Tensor) -> Tensor:
        return x * 2


class OtherInner(nn.Module):
    def encode(self, x: Tensor) -> Tensor:
        return x * 3


class CallsMethodOfChild(Base):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.encode(self.act(self.bn(self.conv(x))))


def doubled(x: Tensor) -> Tensor:
    return x * 2


class CallsGlobal(Base):
    def forward(self, x: Tensor) -> Tensor:
        return doubled(self.act(self.bn(self.conv(x))))


class CallsFunctionOfModule(Base):
    def forward(self, x: Tensor) -> Tensor:
        return forwards.halved(self.act(self.bn(self.conv(x))))


def _set_function(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.function = F.silu


def _set_inner(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.inner = OtherInner()


def _set_global(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys.modules[__name__], "doubled", lambda x: x * 5)


def _set_in_module(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(forwards, "halved", lambda x: x * 5)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (Attribute, _set_function),
        (CallsMethodOfChild, _set_inner),
        (CallsGlobal, _set_global),
        (CallsFunctionOfModule, _set_in_module),
    ],
)
def test_code_that_is_replaced(
    make: type[Base], change: Callable[[Any, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, converted = plain_and_converted(make())
    assert is_fused(converted, call)
    assert_alike(plain, converted, call)
    for model in (plain, converted):
        change(model, monkeypatch)
    assert_alike(plain, converted, call)


class Noise(Base):
    @property
    def noise(self) -> Tensor:
        return torch.randn_like(self.last.weight).mean()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x))) * self.noise


class Normalized(Base):
    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.utils.parametrizations.spectral_norm(self.last)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(self.act(self.bn(self.conv(x))), self.last.weight)


class WritesToAttributes(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.last(x) * 2
        turned = y.mT
        turned += 1
        return self.act(self.bn(self.conv(x))) + y


class ReadsStatistics(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(x))
        mean = self.bn.running_mean.view(1, 3, 1, 1) * 1
        return self.act(y) * mean


@pytest.mark.parametrize("make", [Noise, Normalized, WritesToAttributes, ReadsStatistics])
def test_what_is_read_is_computed_once_and_in_its_place(make: type[Base]) -> None:
    plain, converted = plain_and_converted(make(), fused=None)
    for _ in range(2):
        found = []
        x = image()
        for model in (plain, converted):
            torch.manual_seed(0)
            out = call(model, x)
            found.append((out, torch.rand(1), *model.buffers()))
        torch.testing.assert_close(*found)


class Moves(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(x))
        x += 1
        return self.act(y) + x


@pytest.mark.parametrize("hooked", [False, True])
def test_the_maker_of_a_norms_input_is_replaced(hooked: bool) -> None:
    plain, converted = plain_and_converted(Moves())
    for model in (plain, converted):
        if hooked:
            model.conv.register_forward_hook(lambda m, args, out: args[0])  # type: ignore[union-attr]
        else:
            model.conv = nn.Identity()
    x = image()
    with torch.no_grad():
        torch.testing.assert_close(converted(x.clone()), plain(x.clone()))


class Reversed(nn.Sequential):
    def __iter__(self) -> Any:
        return iter(list(self._modules.values())[::-1])


def test_a_sequence_with_an_order_of_its_own() -> None:
    model = Reversed(nn.ReLU(), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1))
    both = nn.Sequential(Whole(), model)
    plain, converted = plain_and_converted(both)
    assert_alike(plain, converted, call)


class Clamps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x)
        y.data.clamp_(max=0.3)
        return self.conv(y)


def test_a_write_past_version_counters_in_a_module_that_was_not_traced() -> None:
    assert_alike(*plain_and_converted(Clamps()), call)


# --------------------------------------------------------------------------------------------------------- statistics


class Whole(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.bn(self.conv(x))))


def _no_tracking(model: Any) -> None:
    model.bn.track_running_stats = False


def _no_count(model: Any) -> None:
    model.bn.num_batches_tracked = None


def _cumulative(model: Any) -> None:
    model.bn.momentum = None


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("change", [_no_tracking, _no_count, _cumulative])
def test_statistics_are_tracked_as_by_batch_norm(change: Callable[[Any], None], before: bool) -> None:
    model = Whole()
    if before:
        change(model)
    plain, converted = plain_and_converted(model)
    if not before:
        for one in (plain, converted):
            change(one)
    for training in (True, False, True):
        assert_alike(plain.train(training), converted.train(training), call)


@pytest.mark.parametrize("how", ["grad", "backward to named inputs", "backward"])
@pytest.mark.parametrize("linear", [False, True])
def test_second_derivatives_raise_however_they_are_asked_for(how: str, linear: bool) -> None:
    """Also where all that follows is linear, so that its gradient does not depend on the layer's output."""
    _, converted = plain_and_converted(Whole())
    x = image().requires_grad_()
    out = converted(x).sum() if linear else converted(x).square().sum()
    (g,) = torch.autograd.grad(out, x, create_graph=True)
    loss, parameters = g.square().sum(), list(converted.conv.parameters())  # type: ignore[union-attr]
    run = {
        "grad": lambda: torch.autograd.grad(loss, parameters, allow_unused=True),
        "backward to named inputs": lambda: loss.backward(inputs=parameters),
        "backward": loss.backward,
    }[how]
    with pytest.raises(LeangradError, match="differentiated twice"):
        run()


# ------------------------------------------------------------------------------------------------- where models run


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_transforms_inference_mode_meta_tensors_and_traces() -> None:
    plain, converted = plain_and_converted(Whole())
    x = image()
    expected = torch.func.grad(lambda x: plain.eval()(x).square().sum())(x)
    torch.testing.assert_close(torch.func.grad(lambda x: converted.eval()(x).square().sum())(x), expected)
    traced = torch.jit.trace(converted.eval(), x)
    torch.testing.assert_close(traced(x), plain.eval()(x))
    with torch.inference_mode():
        torch.testing.assert_close(converted.train()(x), plain.train()(x))
    assert converted.to("meta")(x.to("meta")).shape == x.shape


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="cProfile leaves the profile function of a thread free")
def test_a_profiler_leaves_models_alone() -> None:
    profile = cProfile.Profile()
    profile.enable()
    try:
        with pytest.warns(UserWarning, match="a profiler runs"):
            model = convert_abn(Whole())
        assert sys.getprofile() is not None
    finally:
        profile.disable()
    assert type(model) is Whole


def test_classes_that_register_their_subclasses() -> None:
    registry: dict[str, type] = {}

    class Registered(Whole):
        def __init_subclass__(cls, *, key: str, **named: Any) -> None:
            registry[key] = cls

    class Named(Registered, key="named"):
        pass

    assert_alike(*plain_and_converted(Named()), call)
    assert registry == {"named": Named}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_child() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU(), torch.jit.script(nn.Conv2d(3, 3, 1).double())
    )
    converted = convert_abn(model.double())
    assert converted.abn_conversions[0].activation == "relu"  # type: ignore[index]
    converted(image()).sum().backward()
