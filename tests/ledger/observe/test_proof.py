"""The proof that autograd records every change: what it admits, what it refuses, and when its facts no longer hold."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from enum import Enum, StrEnum
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leangrad.ledger.learn.early_end import ForwardCode
from leangrad.ledger.observe.proof import Facts, prove, sizes_of, why_not
from leangrad.ledger.observe.proof.source import tree_of


class Other(property):
    """A property whose class may run code of its own."""


class Asked(nn.Module):
    def __getattr__(self, name: str) -> Any:
        return 1


class Layer(nn.Module):
    """What a test puts into `run` is a part of its forward."""

    def __init__(self, run: Callable[[Layer, Tensor], Any]) -> None:
        super().__init__()
        self.run = run
        self.conv, self.norm, self.act = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU(inplace=True)
        self.blocks = nn.ModuleList([nn.Conv2d(3, 3, 1), nn.Sequential(nn.GELU(), nn.Identity())])
        self.scale = nn.Parameter(torch.ones(3, 1, 1))
        self.register_buffer("shift", torch.ones(3, 1, 1))
        self.plain, self.name, self.count, self.none = torch.ones(3, 1, 1), "mean", 0, None
        self.is_on, self.off, self.sizes, self.pair = True, False, [1, 2], (F.relu, F.gelu)
        self.late: Any = None
        self.kinds, self.asked = (nn.Conv2d, nn.Linear), Asked()
        self.named = nn.ModuleDict({"a": nn.GELU()})
        self.mode, self.pick = Mode.FAST, nn.ModuleList([nn.GELU(), nn.SiLU()])[::-1]

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)

    @property
    def twice(self) -> Tensor:
        return self.scale * 2

    @Other
    def other(self) -> Tensor:
        return self.scale * 2

    def helper(self, x: Tensor, *others: Tensor, gain: float = 1.0) -> Tensor:
        return x * gain + sum(others)

    @staticmethod
    def doubled(x: Tensor) -> Tensor:
        return 2 * x


class Kind(Enum):
    MEAN = "mean"
    SUM = "sum"


class Mode(StrEnum):
    FAST = "fast"


class Derived(Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x.abs())


def pool(x: Tensor, kind: Kind = Kind.MEAN) -> Tensor:
    if kind is Kind.MEAN:
        return x.mean((2, 3))
    return x.data if kind == Kind.SUM else x


def chained(layer: Layer, x: Tensor) -> Tensor:
    h = layer.act(layer.norm(layer.conv(x)))
    for n, block in enumerate(layer.blocks):
        h = block(h) if n else h + block(h)
        if h.shape[0] > 64:
            break
    else:
        h = -h
    return h


def gathered(layer: Layer, x: Tensor) -> Tensor:
    features = [layer.conv(x)]
    for block in layer.blocks:
        features.append(block(features[-1]))
    features += [y.sigmoid() for y in features if y is not None]
    out = torch.cat(features, 1)
    out[:, 0] = out[:, 1] * 2
    out += 1
    return out


def switched(layer: Layer, x: Tensor) -> Tensor:
    if layer.none is not None or layer.off:
        x = layer.none(x).data
    if not layer.is_on or layer.name == "sum" or torch.jit.is_scripting():
        return x.data
    while x.ndim < 4:
        x = x.unsqueeze(0)
    return x if layer.late is None else layer.late.data


def unpacked(layer: Layer, x: Tensor) -> Tensor:
    b, c, *_ = x.shape
    (first, act), (_second, other) = zip(layer.blocks, layer.pair, strict=True)
    y = act(first(x)).view(b, c, -1)
    return other(torch.stack([part.roll(1, 0) for part in y.chunk(c, dim=1)])).reshape(c, b, -1)


class Plain(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 2.0) -> dict[str, Any]:
        if mask is not None:
            x = x.masked_fill(mask, 0.0)
        if x.ndim != 4:
            raise ValueError(f"{x.shape}")
        return {"out": x * scale, "size": tuple(x.size())}


PROVEN: dict[str, Callable[[Layer, Tensor], Any]] = {
    "layers": chained,
    "lists": gathered,
    "switches": switched,
    "rows": unpacked,
    "helpers": lambda layer, x: layer.helper(x, x, gain=3.0) + layer.doubled(x) + layer.twice,
    "star": lambda layer, x: layer.helper(*(x, x)).permute(*range(x.ndim)),
    "an enum": lambda layer, x: pool(x) + pool(x, Kind.MEAN),
    "getattr": lambda layer, x: getattr(layer, "conv")(x) if hasattr(layer, "conv") else x.data,  # noqa: B009
    "a number of the model as an index": lambda layer, x: layer.pair[layer.count](x) + layer.pick[layer.count](x),
    "an item": lambda layer, x: layer.blocks[0](x) + layer.blocks[-1](x) + layer.pair[0](x),
    "a forward": lambda layer, x: layer.blocks[1].forward(x),
    "statistics": lambda layer, x: F.batch_norm(x, layer.norm.running_mean, layer.norm.running_var, training=True),
    "counts": lambda layer, x: layer.norm(x) * layer.norm.num_batches_tracked.add_(1),
}


@pytest.mark.parametrize("name", PROVEN)
def test_what_is_admitted(name: str) -> None:
    for kind in (Layer, Derived):
        layer = kind(PROVEN[name])
        found = why_not(layer)
        assert isinstance(found, Facts), found
        assert found.hold()


def test_arguments_and_torchs_own_layers() -> None:
    assert isinstance(why_not(Plain()), Facts)
    assert isinstance(why_not(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU(inplace=True))), Facts)
    assert isinstance(why_not(nn.Linear(2, 2)), Facts)


def no_gradient(layer: Layer, x: Tensor) -> Tensor:
    y = x.sin()
    with torch.no_grad():
        y.mul_(2)
    return y


def caught(layer: Layer, x: Tensor) -> Tensor:
    try:
        return x.sin()
    except ValueError:
        return x


def inner(layer: Layer, x: Tensor) -> Tensor:
    def change(y: Tensor) -> Tensor:
        return y

    return change(x)


def listed(layer: Layer, x: Tensor) -> Tensor:
    calls: list[Any] = []
    others = calls
    others.append(nogradient_alias)
    return calls[0](x)


def aliased(layer: Layer, x: Tensor) -> Tensor:
    held: list[Tensor] = []
    also = held
    also.append(x)
    for one in held:
        one.mul_(2)
    return x


def in_a_dictionary(layer: Layer, x: Tensor) -> Tensor:
    held: list[Tensor] = []
    table = {"held": held}
    held.append(x)
    table["held"][0].mul_(2)
    return x


def by_an_iterator(layer: Layer, x: Tensor) -> Tensor:
    held = [x.sin()]
    for n, one in enumerate(held):
        one.mul_(2)
        if n < 1:
            held.append(x)
    return x


def keywords(layer: Layer, x: Tensor, **more: Any) -> Tensor:
    more["scale"] = 2.0
    return x.data if "scale" in more else x


def keys_of_a_container(layer: Layer, x: Tensor) -> Tensor:
    for key in layer.named:
        if isinstance(key, str):
            x = x.data
    return x


def an_iterator_twice(layer: Layer, x: Tensor) -> Tensor:
    pairs = enumerate((1, 2))
    if not isinstance(pairs, tuple):
        x = x.data
    return x


def in_a_set(layer: Layer, x: Tensor) -> Tensor:
    held = set()  # type: ignore[var-annotated]
    held.add(x)
    for one in held:
        one.mul_(2)
    return x


def by_an_update(layer: Layer, x: Tensor) -> Tensor:
    held = layer.sizes
    held += [x]  # type: ignore[list-item]
    layer.sizes[0].mul_(2)  # type: ignore[attr-defined]
    return x


def in_a_tuple(layer: Layer, x: Tensor) -> Tensor:
    pair: tuple[Any, ...] = (x.sin(),)
    held: list[Tensor] = []
    pair += (held,)
    held.append(x)
    pair[1][0].mul_(2)
    return x


def named(layer: Layer, x: Tensor, **more: Any) -> Tensor:
    return more["x"].mul_(2)  # type: ignore[no-any-return]


def by_a_layer(layer: Layer, x: Tensor) -> Tensor:
    held: list[Tensor] = []
    same = layer.blocks[1][1](held)
    held.append(x)
    same[0].mul_(2)
    return x


def by_a_slice(layer: Layer, x: Tensor) -> Tensor:
    held: list[Tensor] = []
    held[:] = (x, x.sin())
    held[0].mul_(2)
    return x


def positional(x: Tensor, /, **more: Any) -> Tensor:
    return x.mul_(2)


def later(layer: Layer, x: Tensor) -> Tensor:
    made: list[Tensor] = [x.sin()]
    for _ in range(3):
        made[-1].mul_(2)
        made.append(x)
    return x


def chosen(layer: Layer, x: Tensor) -> Tensor:
    a: list[Tensor] = []
    b: list[Tensor] = []
    c = a if x.ndim else b
    a.append(x)
    c[0].mul_(2)
    return x


def counted(layer: Layer, x: Tensor) -> Tensor:
    return (F.relu, torch.Tensor.detach, F.gelu)[layer.count](x)  # the number may be another later


def assigned(layer: Layer, x: Tensor) -> Tensor:
    layer.late = x
    return x


@torch.no_grad()
def decorated(x: Tensor) -> Tensor:
    return x.mul_(2)


nogradient_alias = torch.no_grad()(torch.Tensor.mul_)
METHOD = torch.Tensor.detach
TABLE = {"mean": torch.mean}
ONES = torch.ones(3, 1, 1)
OTHER = nn.ReLU()

REFUSED: dict[str, Callable[[Layer, Tensor], Any]] = {
    "no_grad": no_gradient,
    "decorated": lambda layer, x: decorated(x),
    "an alias": lambda layer, x: nogradient_alias(x, 2),
    "detach": lambda layer, x: x.sin().detach(),
    "a cast in another memory format": lambda layer, x: Tensor.to(x, torch.float64, memory_format=torch.channels_last),
    "float in another memory format": lambda layer, x: Tensor.float(x, memory_format=torch.contiguous_format),
    "by another name": lambda layer, x: METHOD(x.sin()),
    "data": lambda layer, x: x.sin().data,
    "in a branch": lambda layer, x: x if x.ndim == 4 else x.data,
    "getattr": lambda layer, x: getattr(x, layer.name)(),
    "a table": lambda layer, x: TABLE[layer.name](x),
    "try": caught,
    "one of several classes": lambda layer, x: x.data if isinstance(layer.conv, (nn.Linear, (nn.Conv2d,))) else x,
    "a class that is chosen": lambda layer, x: x if isinstance(layer.conv, layer.kinds[layer.count]) else x.data,
    "an attribute that is made when it is asked for": lambda layer, x: x.data if hasattr(layer.asked, "a") else x,
    "keywords": keywords,
    "keywords of another": lambda layer, x: named(layer, x.sin(), y=x),
    "keys of a container": keys_of_a_container,
    "an iterator twice": an_iterator_twice,
    "the argument, in a set": in_a_set,
    "the argument, by an update": by_an_update,
    "the argument, in a tuple": in_a_tuple,
    "the argument, in what a layer returns": by_a_layer,
    "the argument, in a slice": by_a_slice,
    "the argument, by its position": lambda layer, x: positional(x, x=x.sin()),
    "a partial": lambda layer, x: functools.partial(torch.add, alpha=2)(x, x),
    "a name in an expression": lambda layer, x: (y := layer.conv(x)) + y.relu_(),
    "a text enum": lambda layer, x: x if layer.mode == "fast" else x.data,
    "the default dtype": lambda layer, x: x.sin().view(torch.get_default_dtype()),
    "a dtype in a dictionary": lambda layer, x: x.sin().view({"a": 1}.get("a", torch.int32)),
    "the argument, in a list twice": lambda layer, x: [one.mul_(2) for one in [x] * 2],
    "the argument, in a dictionary": in_a_dictionary,
    "the argument, by an iterator": by_an_iterator,
    "the argument, by a generator": lambda layer, x: list(y.mul_(2) for y in (x,)),  # noqa: C400
    "a generator that runs later": lambda layer, x: zip((y for y in x), x, strict=True),
    "inplace among any": lambda layer, x: F.relu(*[x.sin(), True]),
    "an in-place op with strides of its own": lambda layer, x: x.sin().cumsum_(1),
    "a memory format": lambda layer, x: x.sin().double(memory_format=torch.channels_last),
    "statistics in a list": lambda layer, x: layer.norm(x) * {"m": [layer.norm.running_mean]}["m"][0][0],
    "a property of another kind": lambda layer, x: layer.other,
    "a function inside": inner,
    "a lambda": lambda layer, x: (lambda y: y)(x),
    "a list of functions": listed,
    "a view with a dtype": lambda layer, x: x.sin().view(torch.int32),
    "a view with the dtype of another": lambda layer, x: x.sin().view(layer.scale.long().dtype),
    "out": lambda layer, x: torch.mul(x, 2, out=layer.shift),
    "max_norm": lambda layer, x: F.embedding(x.long(), layer.scale.view(3, 1), max_norm=1.0),
    "a number of the model": counted,
    "an attribute": assigned,
    "the argument": lambda layer, x: x.add_(1),
    "a view of the argument": lambda layer, x: x.view(-1).mul_(2),
    "the argument, in a list": aliased,
    "the argument, in a list later": later,
    "the argument, in one of two lists": chosen,
    "the argument, by a layer": lambda layer, x: layer.act(x),
    "the argument, by a function": lambda layer, x: F.relu(x, True) + F.relu(x, inplace=layer.is_on),
    "a buffer": lambda layer, x: layer.shift.mul_(0.9) * x,
    "a parameter": lambda layer, x: layer.scale[0].copy_(x[0]),
    "a plain attribute": lambda layer, x: layer.plain * x,
    "a global tensor": lambda layer, x: ONES * x,
    "a global module": lambda layer, x: OTHER(x),
    "statistics that are read": lambda layer, x: layer.norm(x) * layer.norm.running_var[0],
    "a checkpoint": lambda layer, x: torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=True),
    "torch.func": lambda layer, x: torch.func.vmap(torch.sin)(x),
    "an op of a library": lambda layer, x: torch.ops.aten.mul_(x.sin(), 2),
    "keys": lambda layer, x: sorted([1, 2], key=METHOD),
    "a missing name": lambda layer, x: missing(x),  # type: ignore[name-defined]  # noqa: F821
    "two lambdas in a line": (lambda layer, x: x, lambda layer, x: x)[0],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    layer = Layer(REFUSED[name])
    assert isinstance(why_not(layer), str)


class Calls(Layer):
    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args)


class Attributes(Layer):
    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)


class Items(nn.Sequential):
    def __iter__(self) -> Any:
        return iter([nn.Identity()])


class Own(nn.Parameter):
    """A tensor that may run code of its own."""


def test_modules_that_are_not_called_as_torchs_are() -> None:
    def run(layer: Layer, x: Tensor) -> Tensor:
        return layer.conv(x)

    for kind in (Calls, Attributes):
        assert isinstance(why_not(kind(run)), str)
    assert isinstance(why_not(Items(nn.ReLU())), str)
    hooked, own, special, inside = Layer(run), Layer(run), Layer(run), Layer(run)
    hooked.conv.register_forward_hook(lambda *args: None)
    own.conv.forward = lambda x: x.data  # type: ignore[method-assign]
    special.conv.weight = Own(special.conv.weight.data)
    inside.register_forward_pre_hook(lambda *args: None)
    for model in (hooked, own, special, inside):
        assert isinstance(why_not(model), str)


def helped(layer: Layer, x: Tensor) -> Tensor:
    return changeable(x) if layer.late is None and not hasattr(layer, "lately") else layer.conv(x)


def changeable(x: Tensor, scale: float = 2.0) -> Tensor:
    return x * scale


def other_helper(x: Tensor, scale: float = 2.0) -> Tensor:
    return x.data * scale


def closed_over(function: Callable[[Tensor], Tensor]) -> Callable[[Layer, Tensor], Tensor]:
    def run(layer: Layer, x: Tensor) -> Tensor:
        return function(x)

    return run


def set_bias(layer: Layer) -> None:
    layer.conv.bias = None


CHANGES: dict[str, Callable[[Layer, pytest.MonkeyPatch], None]] = {
    "a switch": lambda layer, patch: setattr(layer, "late", 1),
    "a function of the file": lambda layer, patch: patch.setitem(globals(), "changeable", other_helper),
    "its code": lambda layer, patch: patch.setattr(changeable, "__code__", other_helper.__code__),
    "its defaults": lambda layer, patch: patch.setattr(changeable, "__defaults__", (3.0,)),
    "the function of the model": lambda layer, patch: setattr(layer, "run", chained),
    "its forward": lambda layer, patch: patch.setattr(Layer, "forward", Derived.forward),
    "how it is called": lambda layer, patch: patch.setattr(Layer, "__call__", nn.Module.__repr__),
    "a layer's forward": lambda layer, patch: patch.setattr(nn.Conv2d, "forward", nn.Identity.forward),
    "a parameter's class": lambda layer, patch: setattr(layer, "scale", Own(torch.ones(3, 1, 1))),
    "a buffer": lambda layer, patch: setattr(layer, "shift", layer.norm.running_mean),
    "a method of tensors": lambda layer, patch: patch.setattr(Tensor, "abs", Tensor.detach),
    "what a layer calls": lambda layer, patch: patch.setattr(F, "gelu", other_helper),
    "an attribute of the class": lambda layer, patch: patch.setattr(Layer, "lately", 1, raising=False),
    "a function of torch": lambda layer, patch: patch.setattr(F, "relu", torch.Tensor.detach),
}


def test_the_facts_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for change in CHANGES.values():
        layer = Layer(lambda layer, x: layer.blocks[1](F.relu(layer.conv(helped(layer, x))) * layer.scale).abs())
        found = why_not(layer)
        assert isinstance(found, Facts), found
        assert found.hold()
        layer.count, layer.training = 5, layer.training  # numbers may change
        assert found.hold()
        with monkeypatch.context() as patch:
            change(layer, patch)
            assert not found.hold(), change
    run = closed_over(changeable)

    layer = Layer(run)
    found = prove(layer)
    assert found is not None
    run.__closure__[0].cell_contents = other_helper  # type: ignore[index]
    assert not found.hold()


def test_the_class_of_a_layer_and_a_method_of_a_single_one() -> None:
    layer = Layer(chained)
    before = ForwardCode(layer)
    assert not before.has_changed()
    layer.conv.__class__ = nn.Identity  # type: ignore[assignment]
    assert before.has_changed()
    layer = Layer(chained)
    before = ForwardCode(layer)
    layer.conv._conv_forward = other_helper  # type: ignore[method-assign,assignment]
    assert before.has_changed()
    assert isinstance(why_not(layer), str)


def test_none_in_place_of_a_parameter() -> None:
    layer = Layer(lambda layer, x: layer.conv(x) if layer.conv.bias is not None else x.data)
    found = why_not(layer)
    assert isinstance(found, Facts), found
    set_bias(layer)
    assert not found.hold()


def test_lists_of_numbers_may_not_get_others() -> None:
    layer = Layer(lambda layer, x: x.mean(layer.sizes))
    found = why_not(layer)
    assert isinstance(found, Facts), found
    layer.sizes.append(torch.ones(2))  # type: ignore[arg-type]
    assert not found.hold()


def test_the_facts_keep_no_module_alive() -> None:
    gc.disable()
    try:
        layer = Layer(chained)
        found, at = prove(layer), weakref.ref(layer)
        assert found is not None
        del layer
        assert at() is None
        assert not found.hold()
    finally:
        gc.enable()


def test_arguments() -> None:
    x = torch.ones(2, 3)
    assert sizes_of([[x, 1, "a"], {"mask": None, "xs": (x, x)}]) == [6, 0, 6, 6]
    for other in (F.relu, torch.float32, Own(x), {1, 2}, {"f": F.relu}, (x, [F.relu])):
        assert sizes_of([other]) is None


def test_source_that_is_not_the_code() -> None:
    made: dict[str, Any] = {}
    exec(compile("def f(x):\n    return x.data\n", __file__, "exec"), made)
    assert tree_of(made["f"]) is None
    assert tree_of(changeable) is not None
    assert tree_of(copy.copy(changeable)) is not None


# ------------------------------------------------------------------------------------------------- the eps of the norms


class Norms(nn.Module):
    """Calls what a test gives it, and has norms whose eps is 1e-3."""

    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.run, self.eps, self.other, self.none = run, 1e-3, 1e-3, None
        self.norm, self.rms, self.batch = nn.LayerNorm(4, 1e-3), nn.RMSNorm(4), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)

    @property
    def found(self) -> float:
        return self.other


LAYER, RMS = "NativeLayerNormBackward0", "FusedRmsNormBackward0"
ONE_EPS: dict[str, tuple[Callable[[Any, Tensor], Any], dict[str, Any]]] = {
    "a layer": (lambda net, x: net.norm(x), {LAYER: 1e-3}),
    "two layers": (lambda net, x: net.rms(net.norm(x)), {LAYER: 1e-3, RMS: None}),
    "an attribute": (lambda net, x: F.layer_norm(net.norm(x), (4,), None, None, net.eps), {LAYER: 1e-3}),
    "a keyword": (lambda net, x: torch.layer_norm(net.norm(x), (4,), eps=net.eps), {LAYER: 1e-3}),
    "a number": (lambda net, x: F.layer_norm(x, (4,), None, None, 1e-3), {LAYER: 1e-3}),
    "the default": (lambda net, x: F.layer_norm(x, (4,)), {LAYER: 1e-5}),
    "a row": (lambda net, x: F.layer_norm(*(x, (4,), None, None, net.eps)), {LAYER: 1e-3}),
    "batch norm": (lambda net, x: net.batch(x), {}),
    "the default and another": (lambda net, x: F.layer_norm(net.norm(x), (4,)), {}),
    "another attribute": (lambda net, x: F.layer_norm(x, (4,), None, None, net.other), {}),
    "a property": (lambda net, x: F.layer_norm(x, (4,), None, None, net.found), {}),
    "a sum": (lambda net, x: F.layer_norm(x, (4,), None, None, net.eps + 1e-3), {}),
    "one of two": (lambda net, x: F.layer_norm(x, (4,), None, None, net.eps if x.ndim else 1.0), {}),
    "an integer": (lambda net, x: F.layer_norm(F.layer_norm(x, (4,), eps=1), (4,), eps=1.0), {}),
    "not a number": (lambda net, x: F.layer_norm(x, (4,), eps=NAN), {}),
}
NAN = float("nan")


@pytest.mark.parametrize("name", ONE_EPS)
def test_the_one_eps_of_the_norms(name: str) -> None:
    run, expected = ONE_EPS[name]
    net = Norms(run)
    found = why_not(net)
    assert isinstance(found, Facts), found
    assert {node: eps for (node, name), eps in found.of_nodes.items() if name == "eps"} == expected
    assert found.hold()


FORMATS: dict[str, tuple[Callable[[Any, Tensor], Any], Any]] = {
    "none": (lambda net, x: x.sin(), torch.contiguous_format),
    "torch's own": (lambda net, x: x.transpose(0, 1).reshape(-1), torch.contiguous_format),
    "contiguous": (lambda net, x: x.mT.contiguous() + Tensor.contiguous(x.mT), torch.contiguous_format),
    "clone": (lambda net, x: x.clone(), None),
    "torch.clone": (lambda net, x: torch.clone(x), None),
    "Tensor.clone": (lambda net, x: Tensor.clone(x), None),
    "clone, contiguous": (lambda net, x: x.clone(memory_format=torch.contiguous_format), torch.contiguous_format),
    "channels_last": (lambda net, x: x.contiguous(memory_format=torch.channels_last), None),
    "Tensor.contiguous": (lambda net, x: Tensor.contiguous(x, memory_format=torch.channels_last), None),
    "group norm": (lambda net, x: F.group_norm(x, 2), None),
    "a group norm": (lambda net, x: net.group(x), None),
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_one_memory_format_of_copies(name: str) -> None:
    run, expected = FORMATS[name]
    net = Norms(run)
    net.group = nn.GroupNorm(2, 4)
    found = why_not(net)
    assert isinstance(found, Facts), found
    assert found.of_nodes.get(("CloneBackward0", "memory_format")) == expected


BIASES: dict[str, tuple[Callable[[Any, Tensor], Any], bool]] = {
    "none": (lambda net, x: F.batch_norm(x, None, None, net.gain, None, True), True),
    "the default": (lambda net, x: F.batch_norm(x, None, None, weight=net.gain, training=True), True),
    "a parameter that is None": (lambda net, x: F.batch_norm(x, None, None, net.gain, net.bias, True), True),
    "a layer without": (lambda net, x: net.plain(x), True),
    "a layer": (lambda net, x: net.batch(F.batch_norm(x, None, None, net.gain, None, True)), False),
    "a gain as bias": (lambda net, x: F.batch_norm(x, None, None, net.gain, net.gain, True), False),
    "computed": (lambda net, x: F.batch_norm(x, None, None, net.gain, bias=net.gain * 2, training=True), False),
    "an instance norm": (lambda net, x: F.instance_norm(x), False),
}


@pytest.mark.parametrize("name", BIASES)
def test_no_batch_norm_has_a_bias(name: str) -> None:
    run, has_none = BIASES[name]
    net = Norms(run)
    net.gain, net.plain = nn.Parameter(torch.ones(4)), nn.BatchNorm2d(4, affine=False)
    net.register_parameter("bias", None)
    found = why_not(net)
    assert isinstance(found, Facts), found
    assert (("NativeBatchNormBackward0", "bias") in found.of_nodes) is has_none
    assert found.hold()
    net.bias = net.plain.bias = nn.Parameter(torch.ones(4), requires_grad=False)
    assert found.hold() is (name not in ("a parameter that is None", "a layer without"))


def test_a_norm_with_any_number_of_arguments_is_refused() -> None:
    assert "any number of arguments" in str(why_not(Norms(lambda net, x: F.layer_norm(*x))))


@pytest.mark.parametrize("run", [ONE_EPS["a layer"][0], ONE_EPS["an attribute"][0]])
@pytest.mark.parametrize("value", [1e-5, 1, None])
def test_an_eps_is_a_fact(run: Callable[[Any, Tensor], Any], value: Any) -> None:
    net = Norms(run)
    found = prove(net)
    assert found is not None
    assert found.hold()
    net.norm.eps = value
    assert not found.hold()
    net.norm.eps = 0.001
    assert found.hold()


def norm(x: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, (4,), None, None, eps)


def keyword(x: Tensor, *, alpha: float = 1e-5, eps: float = 1e-3) -> Tensor:
    return F.layer_norm(x * alpha, (4,), eps=eps)


class Shared(nn.Module):
    """Two parts whose eps is one object, and a function that both call with it."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, one = nn.ModuleList([nn.GELU(), nn.GELU()]), 1e-3
        for part in self.parts:
            part.eps = one

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = norm(part(x), part.eps)  # type: ignore[arg-type]
        return x


@pytest.mark.parametrize("part", [0, 1])
def test_each_module_that_holds_the_same_eps_is_a_fact(part: int) -> None:
    net = Shared()
    found = prove(net)
    assert found is not None
    assert found.of_nodes[LAYER, "eps"] == 1e-3
    net.parts[part].eps = 0.5
    assert not found.hold()


def test_an_eps_that_is_an_index_is_a_fact() -> None:
    net = Norms(lambda net, x: (F.relu, Tensor.detach, F.gelu)[net.eps](x))
    net.eps = 0
    found = prove(net)
    assert found is not None
    assert found.hold()
    net.eps = 1
    assert not found.hold()
    assert prove(net) is None


def test_defaults_that_change_places(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Norms(lambda net, x: keyword(x))
    found = prove(net)
    assert found is not None
    assert found.of_nodes[LAYER, "eps"] == 1e-3
    alpha, eps = keyword.__kwdefaults__.values()
    monkeypatch.setattr(keyword, "__kwdefaults__", {"eps": alpha, "alpha": eps})
    assert not found.hold()
    monkeypatch.setattr(keyword, "__kwdefaults__", {"alpha": alpha})
    assert not found.hold()


@pytest.mark.parametrize("name", ["a layer", "the default", "two layers"])
def test_what_torchs_own_norms_and_layers_are_is_a_fact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = Norms(ONE_EPS[name][0])
    found = prove(net)
    assert found is not None
    monkeypatch.setattr(F.layer_norm, "__defaults__", (None, None, 0.5))
    assert not found.hold()
    monkeypatch.undo()
    assert found.hold()
    for patched in (("layer_norm", F.group_norm), ("rms_norm", F.group_norm)):
        monkeypatch.setattr(F, *patched)
    assert not found.hold()
    monkeypatch.undo()
    if name != "the default":
        monkeypatch.setattr("torch.nn.modules.normalization.F", F.__class__("other"))
        assert not found.hold()
        monkeypatch.undo()
        monkeypatch.setattr(nn.LayerNorm.forward, "__code__", nn.GELU.forward.__code__)
        assert not found.hold()
        monkeypatch.undo()
        assert found.hold()
        monkeypatch.setattr(nn.LayerNorm, "eps", property(lambda self: 0.5), raising=False)
        assert not found.hold()
        assert prove(net) is None
