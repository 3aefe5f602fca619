"""A converted model is used as no trace of it foresaw: it computes what the plain model computes, or was left alone."""

from __future__ import annotations

import copy
import io
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from leangrad import lean, pack_gradients
from leangrad.compiled import compile_lean
from leangrad.ledger.observe.unseen_writes import may_write_unseen
from leangrad.measure import measure
from leangrad.nn.abn import ABN
from leangrad.nn.abn.converted import ConvertedNorm
from leangrad.nn.convert import convert_abn
from tests.support import forwards, same_bits
from tests.support.converted import Base, Use, assert_alike, call, image, is_fused, plain_and_converted

# ------------------------------------------------------------------------------------------- who calls the parts


class Block(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.bn(self.conv(x))))

    def before_activation(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x))


def sequence() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.SiLU(), nn.Conv2d(3, 3, 1))


USES: dict[str, tuple[Callable[[], nn.Module], Use]] = {
    "another method": (Block, lambda m, x: m.before_activation(x)),  # type: ignore[operator, union-attr]
    "the norm alone": (Block, lambda m, x: m.bn(m.conv(x))),  # type: ignore[operator, union-attr]
    "norm, then activation": (Block, lambda m, x: m.act(m.bn(m.conv(x)))),  # type: ignore[operator, union-attr]
    "a slice": (sequence, lambda m, x: m[:2](x)),  # type: ignore[index]
    "a slice with the activation": (sequence, lambda m, x: m[:3](x)),  # type: ignore[index]
    "an element": (sequence, lambda m, x: m[1](m[0](x))),  # type: ignore[index]
    "a sequence of its children": (sequence, lambda m, x: nn.Sequential(*list(m.children())[:2])(x)),
}


@pytest.mark.parametrize("name", USES)
def test_parts_that_are_called_by_others_mean_what_they_meant(name: str) -> None:
    make, use = USES[name]
    plain, converted = plain_and_converted(make())
    assert is_fused(converted, call)
    assert_alike(plain, converted, use)
    assert_alike(plain, converted, call)


def test_converted_norms_are_batch_norms() -> None:
    plain, converted = plain_and_converted(nn.Sequential(sequence(), Block()))
    for norm in (converted[0][1], converted[1].bn):  # type: ignore[index]
        assert isinstance(norm, nn.BatchNorm2d)
        assert isinstance(norm, ABN)
    assert [name for name, _ in plain.named_modules()] == [name for name, _ in converted.named_modules()]
    batches = [image() for _ in range(3)]
    for model in (plain, converted):
        torch.optim.swa_utils.update_bn(batches, model)
    for one, other in zip(plain.buffers(), converted.buffers(), strict=True):
        torch.testing.assert_close(one, other)
    assert converted[1].bn.weight is dict(converted.named_parameters())["1.bn.weight"]  # type: ignore[index]


@pytest.mark.parametrize("part", ["bn", "act"])
def test_hooks_that_come_later_see_what_they_would_see(part: str) -> None:
    plain, converted = plain_and_converted(nn.Sequential(Block(), nn.Sequential(nn.BatchNorm2d(3), nn.ReLU())))
    seen: dict[int, list[Tensor]] = {}
    for model in (plain, converted):
        notes = seen.setdefault(id(model), [])
        getattr(model[0], part).register_forward_hook(lambda m, i, o, notes=notes: notes.append(o.detach().clone()))
        model[1][part == "act"].register_forward_hook(lambda m, i, o, notes=notes: notes.append(o.detach().clone()))
    assert_alike(plain, converted, call)
    assert len(seen[id(plain)]) == 4
    torch.testing.assert_close(seen[id(converted)], seen[id(plain)])


def test_global_hooks_see_each_module() -> None:
    plain, converted = plain_and_converted(Block())
    outputs: list[Tensor] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, i, o: outputs.append(o.detach().clone()))
    try:
        plain(x := image())
        half = len(outputs)
        converted(x)
    finally:
        handle.remove()
    torch.testing.assert_close(outputs[half:], outputs[:half])


def _swap(model: nn.Module) -> None:
    model.act = nn.Tanh()


def _other_forward(model: nn.Module) -> None:
    model.act.forward = torch.cos  # type: ignore[union-attr, assignment]


def _other_norm(model: nn.Module) -> None:
    norm = nn.GroupNorm(3, 3).double()
    norm.weight, norm.bias = model.bn.weight, model.bn.bias  # type: ignore[union-attr, assignment]
    model.bn = norm


def _no_norm(model: nn.Module) -> None:
    model.bn = nn.Identity()


@pytest.mark.parametrize("change", [_swap, _other_forward, _other_norm, _no_norm])
def test_parts_that_are_replaced_later(change: Callable[[nn.Module], None]) -> None:
    plain, converted = plain_and_converted(Block())
    for model in (plain, converted):
        change(model)
    assert_alike(plain, converted, call)


@pytest.mark.parametrize("sequential", [False, True])
def test_an_activation_whose_slope_changes(sequential: bool) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.LeakyReLU(0.2)) if sequential else Block()
    if not sequential:
        model.act = nn.LeakyReLU(0.2)
    plain, converted = plain_and_converted(model)
    assert_alike(plain, converted, call)
    for one in (plain, converted):
        (one[1] if sequential else one.act).negative_slope = 0.7  # type: ignore[index, union-attr]
    assert_alike(plain, converted, call)


@pytest.mark.parametrize("kind", [nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SiLU, nn.GELU, nn.Hardswish])
def test_subclasses_of_activations_are_not_taken_for_them(kind: type[nn.Module]) -> None:
    class Other(kind):  # type: ignore[valid-type, misc]
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x) + x
            return out

    assert_alike(*plain_and_converted(nn.Sequential(nn.BatchNorm2d(3), Other()), fused=False), call)
    block = Block()
    block.act = Other()
    assert_alike(*plain_and_converted(block, fused=False), call)


def test_a_class_whose_forward_is_replaced() -> None:
    class Patched(Block):
        pass

    plain, converted = plain_and_converted(Patched())
    Patched.forward = lambda self, x: self.bn(self.conv(x)).tanh()  # type: ignore[method-assign, assignment]
    assert_alike(plain, converted, call)


@pytest.mark.parametrize("place", ["class", "instance"])
def test_a_method_that_is_replaced(place: str) -> None:
    class Calls(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.end(self.act(self.bn(self.conv(x))))

        def end(self, x: Tensor) -> Tensor:
            return self.last(x)

    plain, converted = plain_and_converted(Calls())
    assert is_fused(converted, call)
    for model in (plain, converted):
        if place == "class":
            Calls.end = lambda self, x: x * 2  # type: ignore[method-assign, assignment]
        else:
            model.end = torch.tanh  # type: ignore[assignment]
    assert_alike(plain, converted, call)


def test_norms_are_synchronized_after_the_conversion() -> None:
    plain, converted = plain_and_converted(Block())
    plain, converted = (nn.SyncBatchNorm.convert_sync_batchnorm(model) for model in (plain, converted))
    assert_alike(plain.eval(), converted.eval(), call)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies(how: str) -> None:
    def copied(model: nn.Module) -> nn.Module:
        if how == "deepcopy":
            return copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded: nn.Module = torch.load(file, weights_only=False)
        return loaded

    model = nn.Sequential(Adds(), nn.BatchNorm2d(3), nn.Hardtanh(-0.5, 0.5, inplace=True), Block())
    plain, converted = plain_and_converted(model)
    again = copied(converted)
    assert is_fused(again, call)
    assert_alike(plain, again, call)
    assert_alike(plain, copied(again), call)


# --------------------------------------------------------------------------------------- what forward depends on


class Optional(Base):
    def forward(self, x: Tensor, other: Tensor | None = None, factor: float = 1.0, *, twice: bool = False) -> Tensor:
        x = self.act(self.bn(self.conv(x)))
        if other is not None:
            x = x + other
        return self.last(x * factor) if not twice else self.last(x) * 2


ARGUMENTS: dict[str, Callable[[Tensor], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "defaults": lambda x: ((x,), {}),
    "by name": lambda x: ((), {"x": x}),
    "the default": lambda x: ((x, None), {"twice": False}),
    "another": lambda x: ((x, x * 2), {}),
    "another by name": lambda x: ((x,), {"other": x * 2}),
    "a number": lambda x: ((x, None, 3.0), {}),
    "a flag": lambda x: ((x,), {"twice": True}),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_with_defaults(name: str) -> None:
    def use(model: nn.Module, x: Tensor) -> Tensor:
        args, named = ARGUMENTS[name](x)
        out: Tensor = model(*args, **named)
        return out

    plain, converted = plain_and_converted(Optional())
    assert_alike(plain, converted, use)
    assert is_fused(converted, use) == (name in ("defaults", "by name", "the default"))
    with pytest.raises(TypeError, match="unexpected keyword"):
        converted(image(), unknown=1)


class NoneIsAllowed(Base):
    def forward(self, x: Tensor, other: Tensor | None) -> Tensor:
        x = self.act(self.bn(self.conv(x)))
        return self.last(x) if other is None else self.last(x + other)


def test_none_for_an_argument_without_a_default() -> None:
    plain, converted = plain_and_converted(NoneIsAllowed())
    assert_alike(plain, converted, lambda m, x: m(x, x * 2))
    assert_alike(plain, converted, lambda m, x: m(x, None))


class Reads(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.bn(self.conv(x))) * self.alpha
        if self.wide:
            x = x * 3
        if self.scale is not None:
            x = x * self.scale
        for conv in self.many:
            x = conv(x)
        return F.dropout(self.last(x), 0.5, self.training and self.alpha > 1)


class ReadsClass(Base):
    factor = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.bn(self.conv(x)))) * self.factor * getattr(self, "more", 1)


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (Reads, "alpha", -2.0),
        (Reads, "wide", True),
        (Reads, "scale", nn.Parameter(torch.full((1,), 3.0, dtype=torch.float64))),
        (Reads, "scale", 4),
        (Reads, "many", nn.ModuleList()),
        (Reads, "last", nn.Identity()),
        (Reads, "training", False),
        (ReadsClass, "factor", 5),
        (ReadsClass, "more", 7),
    ],
)
def test_what_forward_reads_changes_later(make: type[Base], name: str, value: Any) -> None:
    plain, converted = plain_and_converted(make())
    assert is_fused(converted, call)
    for model in (plain, converted):
        model.train(value) if name == "training" else setattr(model, name, copy.deepcopy(value))
    assert_alike(plain, converted, call)


def test_a_list_of_modules_grows() -> None:
    plain, converted = plain_and_converted(Reads())
    for model in (plain, converted):
        model.many.append(nn.Tanh())  # type: ignore[union-attr, operator]
    assert_alike(plain, converted, call)


class UsesTraining(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.bn(self.conv(x)))
        return self.last(x) if self.training else self.last(x) * 2


@pytest.mark.parametrize("converted_in_training", [False, True])
def test_forward_asks_whether_it_trains(converted_in_training: bool) -> None:
    plain, converted = plain_and_converted(UsesTraining().train(converted_in_training))
    for training in (True, False, True):
        assert_alike(plain.train(training), converted.train(training), call)
        assert is_fused(converted, call) == training


SCALES = [2.0]
SCALE = 3.0
OPTIONS = {"negative": False}


def scaled(x: Tensor) -> Tensor:
    return x * SCALE


class Attributes(Base):
    """Reads what may change without being written to."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.bn(self.conv(x)))
        return x * 2 if self.options["double"] else x


class Appends(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.bn(self.conv(x)))
        self.seen.append(x)
        return x


class Globals(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x))) * SCALES[0]


class Dictionary(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.bn(self.conv(x)))
        return -x if OPTIONS.get("negative") else x


class Helper(Base):
    def forward(self, x: Tensor) -> Tensor:
        return scaled(self.act(self.bn(self.conv(x))))


class OfAnotherModule(Base):
    def forward(self, x: Tensor) -> Tensor:
        return forwards.settled(self.act(self.bn(self.conv(x))))


class Draws(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x))) + torch.randn(1).double()


class DrawsInPlace(Base):
    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.empty(1).uniform_()
        return self.act(self.bn(self.conv(x))) if drawn > 0.5 else x


class Constant(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x))) + torch.arange(6.0)


class Clock(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x))) * (time.time() % 2)


class Dice(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x))) * rolled()


def rolled() -> float:
    return generator.random()


generator = random.Random(0)


class GradMode(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.bn(self.conv(x)))
        return x if torch.is_grad_enabled() else x * 2


class Checkpointed(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.bn(self.conv(x)))
        return checkpoint(self.last, x, use_reentrant=False)


class Children(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.bn(self.conv(x)))
        for child in self.many.children():
            x = child(x)
        return x if len(list(self.children())) > 2 else -x


class Identity(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.act(self.bn(self.conv(x))))
        return x if y is None else y


class ReplacedIfNone(Base):
    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        if other is None:
            other = self.last(x)
        return self.act(self.bn(self.conv(x))) + other


class AskedTooLate(Base):
    """What a child returns may be None; in a trace it never is."""

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        if self.alpha > 0:
            other = self.last(x)
        y = self.act(self.bn(self.conv(x)))
        return y if other is None else y + other


class Closure(Base):
    forward = forwards.forward_of_a_closure([2.0])


class Variadic(Base):
    def forward(self, *xs: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(xs[0])))


class Mutable(Base):
    def forward(self, x: Tensor, memory: list[int] = []) -> Tensor:  # noqa: B006
        memory.append(1)
        return self.act(self.bn(self.conv(x))) * len(memory)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Attributes, "reads `.options`, a dict"),
        (Appends, "reads `.seen`, a list"),
        (Globals, "the global `SCALES`"),
        (Dictionary, "the global `OPTIONS`"),
        (Helper, "`scaled` has the global `SCALE`"),
        (OfAnotherModule, "`settled` has the global `SETTINGS`"),
        (Draws, "randn"),
        (DrawsInPlace, "calls aten"),
        (Constant, "aten.arange"),
        (Clock, "built-in function time"),
        (Dice, "the global `generator`"),
        (GradMode, "`torch.is_grad_enabled`"),
        (Checkpointed, "torch.utils.checkpoint"),
        (Children, "calls `.children` of a module"),
        (Identity, "an `is`"),
        (AskedTooLate, "an `is`"),
        (Closure, "around it"),
        (Variadic, "takes `*xs`"),
        (Mutable, "the default of `memory`"),
    ],
)
def test_what_may_change_unseen_is_left_alone(make: type[Base], reason: str) -> None:
    model = make()
    state = torch.get_rng_state()
    with pytest.warns(UserWarning, match="converted none"):
        converted = convert_abn(model)
    assert type(converted) is make
    assert type(converted.bn) is nn.BatchNorm2d
    assert reason in converted.abn_conversions[0].reason, converted.abn_conversions  # type: ignore[index]
    assert not [name for name in vars(model) if name.startswith("_tensor_constant")]
    assert same_bits(torch.get_rng_state(), state)


def test_an_argument_that_is_replaced_if_it_is_none() -> None:
    plain, converted = plain_and_converted(ReplacedIfNone())
    assert_alike(plain, converted, call)
    assert_alike(plain, converted, lambda m, x: m(x, x * 2))


def test_an_empty_sequence() -> None:
    plain, converted = plain_and_converted(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.Sequential()))
    assert_alike(plain, converted, call)


class Renews(Base):
    def forward(self, x: Tensor) -> Tensor:
        if self.wide:
            self.renew()
        return self.act(self.bn(self.conv(x)))

    def renew(self) -> None:
        self.conv.weight.data.mul_(2)


@pytest.mark.parametrize("make", [Block, Renews])
def test_a_lean_model_looks_into_the_forward_that_was_rewritten(make: type[Base]) -> None:
    """It may run: a write past version counters in it must be found."""
    plain, converted = plain_and_converted(make())
    assert may_write_unseen(plain) == may_write_unseen(converted) == (make is Renews)
    assert_alike(plain, lean(converted), call)
    for model in (plain, converted):
        model.wide = True
    assert_alike(plain, converted, call)


# --------------------------------------------------------------------------------------------- writes in place


class Adds(Base):
    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.bn(self.conv(x))
        identity = self.last(identity)
        out += identity
        return self.act(out)


class ChangesTheInput(Base):
    """The activation is not right behind the norm, and in between the norm's input is changed."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x) * 2
        y = self.bn(x)
        x += 1
        return self.last(self.act(y)) + x


class ChangesAView(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x) * 2
        flat = x.flatten(1)
        y = self.bn(x)
        flat.mul_(3)
        return self.last(self.act(y)) + flat.view_as(y)


class ChangesTheResidual(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        residual = x * 2
        y = self.bn(x) + residual
        residual.add_(5)
        return self.act(y) + residual


class KeepsAnotherName(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.last(x) * 2
        kept = y
        y += 1
        y *= 3
        return self.act(self.bn(self.conv(x))) + kept


class ChangesTheArgument(Base):
    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return self.act(self.bn(self.conv(x)))


class Counts(Base):
    """Numbers have no memory that `+=` could write to."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        first = n
        n += 1
        return self.act(self.bn(self.conv(x))) * n + first


class AddsToItself(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(x))
        return self.act(y + y)


class AddsScaled(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(torch.add(self.bn(self.conv(x)), x, alpha=2))


class AddsANumber(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)) + x.shape[1])


class AddsWider(Base):
    """The sum is larger than the norm's output."""

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)) + torch.stack([x, 2 * x]))


class AddsNarrower(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)) + x.mean((2, 3), keepdim=True))


class BothUsed(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(x))
        return self.act(y.clone()) + y


@pytest.mark.parametrize(
    "make",
    [Adds, ChangesTheResidual, KeepsAnotherName, ChangesTheArgument, Counts,
     AddsToItself, AddsScaled, AddsANumber, AddsWider, AddsNarrower, BothUsed],
)  # fmt: skip
def test_writes_and_sums(make: type[Base]) -> None:
    plain, converted = plain_and_converted(make(), fused=None)
    assert isinstance(converted.bn, ConvertedNorm), converted.abn_conversions
    use = (lambda m, x: m(x * 1)) if make is ChangesTheArgument else call
    assert_alike(plain, converted, use)
    if make is ChangesTheArgument:
        x = image()
        before = x.clone()
        converted(x)
        assert same_bits(x, before + 1), "the caller's tensor is changed, as by the plain model"


@pytest.mark.parametrize("make", [ChangesTheInput, ChangesAView])
def test_an_input_that_changes_before_the_activation(make: type[Base]) -> None:
    """Of which the plain model has no gradient."""
    plain, converted = plain_and_converted(make(), fused=None)
    x = image()
    with torch.no_grad():
        torch.testing.assert_close(converted(x), plain(x))


class AddsWiderDtype(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(x.to(torch.bfloat16)) + x)


class AddsWiderDtypeInPlace(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(x.to(torch.bfloat16)).add_(x))


@pytest.mark.parametrize("make", [AddsWiderDtype, AddsWiderDtypeInPlace])
def test_a_residual_of_another_dtype(make: type[Base]) -> None:
    plain = make()
    converted = convert_abn(copy.deepcopy(plain))
    assert converted.abn_conversions[0].residual  # type: ignore[index]
    x = image().float()
    one, other = plain(x), converted(x)
    assert one.dtype == other.dtype
    torch.testing.assert_close(other, one, rtol=0.02, atol=0.02)


# ------------------------------------------------------------------------------- norms that apply an activation too


class NormAct(nn.BatchNorm2d):
    """As in model libraries: one class for norm and activation, with a place for a layer in between."""

    def __init__(self, channels: int, act: nn.Module | None = None, **named: Any) -> None:
        super().__init__(channels, **named)
        self.drop = nn.Identity()
        self.act = nn.ReLU(inplace=True) if act is None else act

    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.ndim == 4, f"expected four dimensions, got {x.ndim}")
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        tracked = not self.training or self.track_running_stats
        batch = self.training or self.running_mean is None
        mean, var = (self.running_mean, self.running_var) if tracked else (None, None)
        x = F.batch_norm(x, mean, var, self.weight, self.bias, batch, factor, self.eps)
        return self.act(self.drop(x))


class WithoutCount(NormAct):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, True, 0.1, self.eps)


class OtherWeight(NormAct):
    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked.add_(1)
        mean, var = self.running_mean, self.running_var
        return self.act(F.batch_norm(x, mean, var, self.bias, self.weight, True, self.momentum, self.eps))


class MoreThanThat(NormAct):
    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked.add_(1)
        mean, var = self.running_mean, self.running_var
        return self.act(2 * F.batch_norm(x, mean, var, self.weight, self.bias, True, self.momentum, self.eps))


class UsesItTwice(NormAct):
    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked.add_(1)
        mean, var = self.running_mean, self.running_var
        x = F.batch_norm(x, mean, var, self.weight, self.bias, True, self.momentum, self.eps)
        self.act(x)
        return x


def norm_act_net(**named: Any) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 1), NormAct(4, **named), nn.Conv2d(4, 3, 1))


ACTS: dict[str, Callable[[], nn.Module]] = {
    "identity": nn.Identity, "relu": nn.ReLU, "silu": lambda: nn.SiLU(inplace=True), "hardswish": nn.Hardswish,
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}], ids=str)
@pytest.mark.parametrize("act", ACTS)
def test_norms_that_apply_an_activation_too(act: str, options: dict[str, bool]) -> None:
    plain, converted = plain_and_converted(norm_act_net(act=ACTS[act](), **options), fused=act != "identity")
    assert isinstance(converted[1], NormAct)  # type: ignore[index]
    assert list(plain.state_dict()) == list(converted.state_dict())
    assert is_fused(converted, call)
    for training in (True, False, True):
        assert_alike(plain.train(training), converted.train(training), call)
    again = copy.deepcopy(converted)
    assert is_fused(again, call)
    assert_alike(plain, again, call)
    assert convert_abn(again).abn_conversions == ()


def _set_drop(norm: Any) -> None:
    norm.drop = nn.Hardtanh(-0.5, 0.5)


def _set_act(norm: Any) -> None:
    norm.act = nn.Sigmoid()


def _set_momentum(norm: Any) -> None:
    norm.momentum = 0.5


def _set_eps(norm: Any) -> None:
    norm.eps = 0.3


def _hook(norm: Any) -> None:
    norm.act.register_forward_hook(lambda m, i, o: 3 * o)


@pytest.mark.parametrize("change", [_set_drop, _set_act, _set_momentum, _set_eps, _hook])
def test_a_norm_with_an_activation_changes_later(change: Callable[[Any], None]) -> None:
    plain, converted = plain_and_converted(norm_act_net())
    for model in (plain, converted):
        change(model[1])  # type: ignore[index]
    assert_alike(plain, converted, call)


@pytest.mark.parametrize("make", [WithoutCount, OtherWeight, MoreThanThat, UsesItTwice])
def test_norms_that_compute_something_else_are_left_alone(make: type[NormAct]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), make(4))
    with pytest.warns(UserWarning, match="converted none"):
        converted = convert_abn(model)
    assert type(converted[1]) is make  # type: ignore[index]
    assert converted.abn_conversions[0].reason.startswith("its forward")  # type: ignore[index]


def test_a_norm_with_an_activation_keeps_one_map() -> None:
    plain, converted = plain_and_converted(norm_act_net(act=nn.SiLU()))
    x = torch.randn(8, 3, 32, 32, dtype=torch.float64)
    kept = [measure(lambda m=m: m(x).sum().backward(), timed_runs=0).kept_bytes for m in (plain, converted)]
    one_map = 8 * 4 * 32 * 32 * 8
    assert kept[0] >= 3 * one_map
    assert kept[1] <= 1.1 * one_map


class AlwaysTrains(NormAct):
    """What it passes on is written in it, and not read from the module."""

    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked.add_(1)
        mean, var = self.running_mean, self.running_var
        return self.act(F.batch_norm(x, mean, var, self.weight, self.bias, True, 0.1, 1e-5))


def _set_eval(norm: Any) -> None:
    norm.eval()


def _stop_tracking(norm: Any) -> None:
    norm.track_running_stats = False


@pytest.mark.parametrize("change", [_set_eval, _set_momentum, _set_eps, _stop_tracking])
def test_a_norm_that_does_not_read_its_settings(change: Callable[[Any], None]) -> None:
    plain, converted = plain_and_converted(nn.Sequential(nn.Conv2d(3, 4, 1), AlwaysTrains(4), nn.Conv2d(4, 3, 1)))
    assert_alike(plain, converted, call)
    for model in (plain, converted):
        change(model[1])  # type: ignore[index]
    assert_alike(plain, converted, call)


def test_channels_that_were_cut_off() -> None:
    """As pruning does, which leaves `num_features` as it was; batch norm does not look at that."""
    plain, converted = plain_and_converted(Block())
    for model in (plain, converted):
        model.conv.weight = nn.Parameter(model.conv.weight.detach()[:2])  # type: ignore[union-attr, index, operator]
        model.conv.bias = nn.Parameter(model.conv.bias.detach()[:2])  # type: ignore[union-attr, index, operator]
        for name in ("weight", "bias"):
            setattr(model.bn, name, nn.Parameter(getattr(model.bn, name).detach()[:2]))
        for name in ("running_mean", "running_var"):
            setattr(model.bn, name, getattr(model.bn, name)[:2])
        model.last.weight = nn.Parameter(model.last.weight.detach()[:, :2])  # type: ignore[union-attr, index, operator]
    assert_alike(plain, converted, call)


def test_a_norm_with_an_attribute_of_the_same_name_is_left_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), NormAct(4))
    model[1].invert = True
    with pytest.warns(UserWarning, match="it has an attribute `invert`"):
        converted = convert_abn(model)
    assert type(converted[1]) is NormAct  # type: ignore[index]


COMPANY: dict[str, Callable[[nn.Module], nn.Module]] = {
    "lean": lean,
    "lean, no logits": lambda model: lean(model, exact=False),
    "packed": lambda model: pack_gradients(model) and model,
    "compiled": lambda model: torch.compile(model, backend="aot_eager"),  # type: ignore[dict-item, return-value]
    "compiled, exact": lambda model: torch.compile(  # type: ignore[dict-item, return-value]
        model, backend=compile_lean, options={"leangrad.exact": True}
    ),
}


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", COMPANY)
def test_norms_with_an_activation_in_company(name: str, checkpointed: bool) -> None:
    plain, converted = plain_and_converted(norm_act_net(act=nn.SiLU()))
    wrapped = COMPANY[name](converted)

    def step(model: nn.Module, x: Tensor) -> list[Tensor]:
        model.zero_grad()
        out = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
        out.square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]

    for _ in range(3):
        x = image().requires_grad_()
        torch.testing.assert_close(step(wrapped, x), step(plain, x))
