"""`convert_abn` on models written in the ways that people write them: outputs, gradients, names, bytes, reasons."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from leangrad.errors import LeangradError
from leangrad.measure import measure
from leangrad.nn.abn import ABN, InPlaceABNSync
from leangrad.nn.abn.converted import ConvertedNorm
from leangrad.nn.abn.pool import RebuiltMaxPool2d
from leangrad.nn.abn.recipe import MAX_DEPTH, Recipe, Session
from leangrad.nn.convert import convert_abn
from tests.support import same_bits


class Bottleneck(nn.Module):
    """In the style of the well-known ResNet: one in-place ReLU for three norms, the last after the addition."""

    def __init__(self, inplanes: int, planes: int, stride: int = 1, downsample: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, planes * 4, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(planes * 4)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        identity = x

        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)

        out = self.conv2(out)
        out = self.bn2(out)
        out = self.relu(out)

        out = self.conv3(out)
        out = self.bn3(out)

        if self.downsample is not None:
            identity = self.downsample(x)

        out += identity
        out = self.relu(out)

        return out


class ResNet(nn.Module):
    def __init__(self, layers: tuple[int, int], width: int = 4) -> None:
        super().__init__()
        self.inplanes = width
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = self._make_layer(width, layers[0], 1)
        self.layer2 = self._make_layer(2 * width, layers[1], 2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(8 * width, 10)

    def _make_layer(self, planes: int, blocks: int, stride: int) -> nn.Sequential:
        shortcut = (nn.Conv2d(self.inplanes, planes * 4, 1, stride, bias=False), nn.BatchNorm2d(planes * 4))
        first = Bottleneck(self.inplanes, planes, stride, nn.Sequential(*shortcut))
        self.inplanes = planes * 4
        return nn.Sequential(first, *(Bottleneck(self.inplanes, planes) for _ in range(1, blocks)))

    def _forward_impl(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        x = self.bn1(x)
        x = self.relu(x)
        x = self.maxpool(x)

        x = self.layer1(x)
        x = self.layer2(x)

        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        return self.fc(x)

    def forward(self, x: Tensor) -> Tensor:
        return self._forward_impl(x)


class Functional(nn.Module):
    """Activations as functions and methods, norms in a list, a pre-activation, a norm whose output is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(7))
        self.last = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.norms[0](self.conv(x)), 0.3)
        x = x + F.gelu(self.norms[1](x), approximate="tanh")
        x = self.norms[2](x).relu_()
        x = torch.relu(x + self.norms[3](self.last(x)))
        x = F.elu(self.norms[4](self.last(x)), alpha=0.5, inplace=True)
        y = self.norms[5](x)
        x = F.silu(y) + y
        h = self.last(x)
        x = x * 2
        x += self.norms[6](h)
        return F.relu(x)


def sequential() -> nn.Module:
    first = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ELU())
    rest = (nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Hardswish(inplace=True), nn.BatchNorm2d(4), nn.Dropout(0.0))
    return nn.Sequential(first, *rest)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet": lambda: ResNet((3, 2)),
    "deeper than a recipe": lambda: ResNet((MAX_DEPTH + 2, 1), width=2),
    "functional": Functional,
    "sequential": sequential,
}


def shake(model: nn.Module) -> nn.Module:
    for p in model.parameters():
        nn.init.normal_(p, std=0.4)
    return model


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(2)
def test_same_outputs_gradients_statistics_and_names(name: str, training: bool) -> None:
    plain = shake(MODELS[name]()).double().train(training)
    lean = convert_abn(copy.deepcopy(plain))
    assert all(c.activation is not None for c in lean.abn_conversions), lean.abn_conversions
    assert isinstance(lean, type(plain))
    assert list(lean.state_dict()) == list(plain.state_dict())
    for _ in range(2):
        x = torch.randn(4, 3, 32, 32, dtype=torch.float64)
        xs = [x.clone().requires_grad_() for _ in range(2)]
        outs = [model(x) for model, x in zip((plain, lean), xs, strict=True)]
        torch.testing.assert_close(outs[1], outs[0])
        dz = torch.randn_like(outs[0])
        for out in outs:
            out.backward(dz)
        torch.testing.assert_close(xs[1].grad, xs[0].grad)
        for (key, a), b in zip(lean.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, msg=lambda m, key=key: f"{key}: {m}")
        for a, b in zip(lean.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(a, b)


def test_what_is_said_of_a_resnet() -> None:
    model = convert_abn(ResNet((1, 1)))
    block = [
        "{}.bn1: norm + relu",
        "{}.bn2: norm + relu",
        "{}.bn3: norm + residual + relu",
        "{}.downsample.1: norm + identity",
    ]
    expected = ["bn1: norm + relu", *(line.format(f"layer{i}.0") for i in (1, 2) for line in block)]
    assert [str(c) for c in model.abn_conversions] == expected
    assert type(model.layer1[0].relu) is nn.ReLU
    assert sum(isinstance(m, ABN) for m in model.modules()) == 9


def test_plain_checkpoints_load_both_ways() -> None:
    plain, lean = shake(ResNet((1, 1))), convert_abn(shake(ResNet((1, 1))))
    lean.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(lean.eval()(x), plain.eval()(x))
    plain.load_state_dict(lean.state_dict())


def test_copies_and_pickles() -> None:
    lean = convert_abn(shake(ResNet((2, 1)))).eval()
    x = torch.randn(2, 3, 32, 32)
    file = io.BytesIO()
    torch.save(lean, file)
    file.seek(0)
    for again in (copy.deepcopy(lean), torch.load(file, weights_only=False)):
        assert same_bits(again(x), lean(x))
        assert again.abn_conversions == lean.abn_conversions
        assert again.layer1[0].bn1.weight is not lean.layer1[0].bn1.weight


def test_converting_twice_changes_nothing() -> None:
    lean = convert_abn(shake(ResNet((1, 1))))
    x = torch.randn(2, 3, 32, 32)
    before = lean.eval()(x)
    assert convert_abn(lean).abn_conversions == ()
    assert same_bits(lean(x), before)
    lean.train()(x).sum().backward()


def test_synchronized_norms_stay_synchronized() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU()))
    assert isinstance(convert_abn(model)[1], InPlaceABNSync)


# ---- bytes ----------------------------------------------------------------------------------------------------------


def test_kept_bytes_are_the_convolutions_outputs() -> None:
    """And what is no norm's: the pooling's output, but not the places of its maxima, and what the head keeps."""
    plain = ResNet((3, 3), width=8)
    lean = convert_abn(copy.deepcopy(plain))
    x = torch.randn(4, 3, 64, 64)
    outputs: list[int] = []
    for m in plain.modules():
        if isinstance(m, nn.Conv2d):
            m.register_forward_hook(lambda m, i, o: outputs.append(o.nbytes))
    plain(x)
    pooled = 4 * 8 * 16 * 16
    vectors = 16 * sum(m.num_features for m in lean.modules() if isinstance(m, ABN))
    predicted = sum(outputs) + pooled * 4 + vectors
    dy = torch.randn(4, 10)
    measured = measure(lambda: lean(x).backward(dy), timed_runs=1).kept_bytes
    head = 4 * 64 * 4 + 4 * 10 * 4  # the input and the output of the last layer
    assert predicted <= measured <= predicted + head


def test_pooling_finds_its_maxima_again() -> None:
    """Bit for bit, ties included: a relu gives many zeros to choose the first of."""
    lean = convert_abn(ResNet((1, 1)).double())
    x, w = torch.randn(2, 3, 32, 32, dtype=torch.float64), lean.conv1.weight
    gradients = []
    for kind in (RebuiltMaxPool2d, nn.MaxPool2d):
        lean.maxpool.__class__ = kind
        out = lean(x)
        dy = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
        gradients.append(torch.autograd.grad(out, w, dy)[0])
    assert same_bits(*gradients)
    lean.maxpool.__class__ = RebuiltMaxPool2d
    (first,) = torch.autograd.grad(lean(x).square().sum(), w, create_graph=True)
    with pytest.raises(LeangradError, match="differentiated twice"):
        first.sum().backward()


def test_a_chain_is_held_as_far_as_backward_has_made_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six blocks of one size: the first outputs are rebuilt again and again, until enough was released to hold some."""
    model = convert_abn(ResNet((6, 1), width=8))
    x, dy = torch.randn(4, 3, 64, 64), torch.randn(4, 10)

    def step() -> None:
        model(x).backward(dy)
        model.zero_grad()

    counts, peaks = [], []
    rebuild = Recipe.rebuild
    for hold in (True, False):
        if not hold:
            monkeypatch.setattr(Session, "may_hold", lambda self, n_bytes: False)
        sessions: list[Session] = []  # not the recipes, which would keep their maps alive
        monkeypatch.setattr(Recipe, "rebuild", lambda self, s=sessions: s.append(self.session) or rebuild(self))
        peaks.append(measure(step, timed_runs=0).peak_bytes)
        counts.append(len(sessions))
        assert all(s is sessions[0] for s in sessions)
        assert sessions[0].held_bytes == 0, "something is still held"
    assert counts[0] < counts[1]
    assert peaks[0] <= peaks[1], "what is held raised the peak"


def test_each_output_is_rebuilt_once_in_the_order_of_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's output is read by two convolutions: it is held between the two, and then dropped."""
    model = convert_abn(ResNet((1, 1)))
    names = {id(m.weight): name for name, m in model.named_modules() if isinstance(m, ABN)}
    layer_of: dict[int, str] = {}
    forward = ConvertedNorm.forward

    def noted(self: ConvertedNorm, *args: Any, **named: Any) -> Tensor:
        out = forward(self, *args, **named)
        layer_of[id(out.grad_fn.recipe)] = names[id(self.weight)]
        return out

    monkeypatch.setattr(ConvertedNorm, "forward", noted)
    order: list[str] = []
    rebuild = Recipe.rebuild
    monkeypatch.setattr(Recipe, "rebuild", lambda self: order.append(layer_of[id(self)]) or rebuild(self))
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert order == [
        "layer2.0.downsample.1",  # for the mask of layer2.0.bn3
        *("layer1.0.bn3", "layer1.0.downsample.1"),  # for the shortcut's convolution, held for layer2.0.conv1
        *("layer2.0.bn2", "layer2.0.bn1"),
        "layer1.0.downsample.1",  # for the mask of layer1.0.bn3
        *("layer1.0.bn2", "layer1.0.bn1", "bn1"),
    ]


def test_checkpointing_around_and_inside() -> None:
    """Where other saved-tensor hooks are in force the model stays out of their way."""
    plain = shake(ResNet((2, 1))).double()
    lean = convert_abn(copy.deepcopy(plain))
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64, requires_grad=True)
    for wrapped in (
        lambda x: checkpoint(lean, x, use_reentrant=False),
        lambda x: lean.layer2(
            checkpoint(lean.layer1, lean.maxpool(F.relu(lean.bn1(lean.conv1(x)))), use_reentrant=False)
        ),
    ):
        out = wrapped(x)
        dz = torch.randn_like(out)
        (dx,) = torch.autograd.grad(out, x, dz)
        whole = (
            plain(x) if out.dim() == 2 else plain.layer2(plain.layer1(plain.maxpool(F.relu(plain.bn1(plain.conv1(x))))))
        )
        torch.testing.assert_close(dx, torch.autograd.grad(whole, x, dz)[0])


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def test_checkpointed_parts_keep_nothing_of_their_own() -> None:
    """Inside of other hooks a layer saves as any op does, so that checkpointing can drop it."""
    stem = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    plain = nn.Sequential(*stem, *(Checkpointed(Bottleneck(8, 2)) for _ in range(2))).double()
    lean = convert_abn(copy.deepcopy(plain))
    x, dy = (torch.randn(4, c, 32, 32, dtype=torch.float64) for c in (3, 8))
    for model in (plain, lean):
        model(x).backward(dy)
    for a, b in zip(lean.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    kept = [measure(lambda m=m: m(x).backward(dy), timed_runs=0).kept_bytes for m in (plain, lean)]
    vectors = 4 * 8 * 8
    assert kept[1] <= kept[0] + vectors


def test_changed_anchor_raises() -> None:
    model = convert_abn(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1)))
    seen: list[Tensor] = []
    model[0].register_forward_hook(lambda m, i, o: seen.append(o))
    y = model(torch.randn(2, 3, 5, 5))
    seen[0].detach().zero_()
    with pytest.raises(RuntimeError, match="changed in place"):
        y.sum().backward()


def test_compiles() -> None:
    plain = shake(ResNet((1, 1))).eval()
    lean = convert_abn(copy.deepcopy(plain))
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(torch.compile(lean, backend="eager")(x), plain(x))


# ---- what is left alone ---------------------------------------------------------------------------------------------


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.steps = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), 0


class Counts(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return F.relu(self.bn(self.conv(x)))


class NoGrad(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.conv(x)
        return F.relu(self.bn(x))


class Branches(Base):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(x)) if x.sum() > 0 else x


class Hidden(Base):
    def forward(self, x: Tensor) -> Tensor:
        return helper(self, x)


def helper(module: Base, x: Tensor) -> Tensor:
    return F.relu(module.bn(x)) if isinstance(x, Tensor) else x


class Twice(Base):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(x)) + F.relu(self.bn(x * 2))


class AddsToOther(Base):
    """`x += bn(...)` changes x, which is read again: the norm is converted, the addition stays."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        h = self.conv(y)
        y += self.bn(h)
        return F.relu(y) + y


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Counts, "a write to `.steps`"),
        (NoGrad, "a with statement"),
        (Branches, "cannot be traced"),
        (Hidden, "`isinstance`"),
        (Twice, "calls it 2 times"),
    ],
)
def test_code_that_a_trace_does_not_see_is_left_alone(kind: type[Base], reason: str) -> None:
    with pytest.warns(UserWarning, match=rf"converted none of the 1 batch norms of this {kind.__name__}"):
        model = convert_abn(kind())
    assert type(model) is kind
    assert type(model.bn) is nn.BatchNorm2d
    (conversion,) = model.abn_conversions
    assert conversion.activation is None
    assert reason in str(conversion)


def test_addition_into_another_tensor_is_not_fused() -> None:
    plain = AddsToOther().double()
    lean = convert_abn(copy.deepcopy(plain))
    assert str(lean.abn_conversions[0]) == "bn: norm + identity"
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(lean(x), plain(x))


def test_hooks_and_shared_norms_are_left_alone() -> None:
    shared = nn.BatchNorm2d(3)
    hooked = nn.BatchNorm2d(3)
    hooked.register_forward_hook(lambda m, i, o: None)
    watched = nn.ReLU()
    watched.register_forward_hook(lambda m, i, o: None)
    model = nn.Sequential(shared, nn.ReLU(), shared, hooked, nn.ReLU(), nn.BatchNorm2d(3), watched)
    reasons = {c.name: str(c) for c in convert_abn(model).abn_conversions}
    assert "more than one name" in reasons["0"]
    assert "has hooks" in reasons["3"]
    assert reasons["5"] == "5: norm + identity"
    assert model[6] is watched


# ---- what the user is told


@pytest.mark.parametrize("shared", [nn.AvgPool2d(3, 1, 1), nn.ReLU()], ids=["pool", "relu"])
def test_what_stands_in_a_sequential_twice(shared: nn.Module) -> None:
    """Only what really follows a norm is fused with it."""
    torch.manual_seed(0)
    plain = nn.Sequential(
        shared, nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), shared, nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), shared
    )
    converted = convert_abn(copy.deepcopy(plain))
    x = torch.randn(4, 3, 8, 8)
    expected, found = plain(x), converted(x)
    assert torch.allclose(expected, found, atol=1e-5)
    gradients = [
        torch.autograd.grad(out.square().sum(), [*model.parameters()])
        for out, model in ((expected, plain), (found, converted))
    ]
    assert all(torch.allclose(a, b, atol=1e-3, rtol=1e-3) for a, b in zip(*gradients, strict=True))
    activations = [conversion.activation for conversion in converted.abn_conversions]
    assert activations == (["relu", "relu"] if isinstance(shared, nn.ReLU) else ["identity", "identity"])


def test_conversions_read_as_a_table() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU(), Twice(), nn.BatchNorm2d(3))
    assert str(convert_abn(model).abn_conversions).splitlines() == [
        "convert_abn converted 2 of 3 batch norms",
        "  1     norm + relu",
        "  4     norm + identity",
        "  3.bn  not converted, its parent's forward calls it 2 times",
    ]


def test_what_was_left_alone_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="leangrad"):
        convert_abn(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), Twice()))
        convert_abn(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()))
    partly, fully = caplog.records
    assert (partly.levelname, fully.levelname) == ("WARNING", "INFO")
    assert "left 1 of 2 batch norms as they were (2.bn: its parent's forward calls it 2 times)" in partly.getMessage()
    assert "print(model.abn_conversions)" in partly.getMessage()
    assert "converted 1 batch norms" in fully.getMessage()


def test_a_model_without_batch_norms_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"found no batch norm in this Sequential: nothing was converted"):
        convert_abn(nn.Sequential(nn.Linear(2, 2)))


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"convert_abn\(\) expects an nn\.Module .*, got NoneType"):
        convert_abn(None)  # type: ignore[arg-type]
