"""`linear_cross_entropy`: what it equals, what it refuses, and everything around it but how exact it is."""

from __future__ import annotations

import copy
import gc
import itertools
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import leangrad
from leangrad import linear_cross_entropy
from leangrad.errors import LeangradError
from leangrad.ops import linear_cross_entropy as ops
from tests.support import same_bits
from tests.support.loss import OPTIONS, Case, leaves, plain, results

ALL = {"linear_bias": True, "weight": True, "label_smoothing": 0.1, "z_loss": 0.01, "softcap": 5.0, "logit_scale": True}


def assert_same(case: Case, g: Any = 1.7, function: Any = linear_cross_entropy) -> None:
    """The loss and all gradients are plain's, in float64."""
    x, weight, target, options = case.draw()
    options = {k: v.double() if isinstance(v, Tensor) else v for k, v in options.items()}
    if options.get("reduction") == "none":
        g = torch.randn(case.tokens, dtype=torch.float64)
    ours = results(function, x.double(), weight.double(), target, options, g)
    other = results(plain, x.double(), weight.double(), target, options, g)
    for mine, theirs in zip(ours, other, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12, equal_nan=True)


@pytest.fixture
def filled_with_nan() -> Iterator[None]:
    """`torch.empty` gives NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# Values


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradcheck(reduction: str) -> None:
    x, weight, target, options = Case(tokens=5, hidden=3, classes=4, options=ALL, ignored=3).draw()
    inputs = {name: t.double().requires_grad_() for name, t in leaves(x, weight, options).items()}
    options["weight"] = options["weight"].double()

    def loss(x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
        given = {**options, "linear_bias": bias, "logit_scale": scale, "reduction": reduction}
        return linear_cross_entropy(x, weight, target, **given)

    assert torch.autograd.gradcheck(loss, tuple(inputs.values()))
    if reduction == "none":
        assert torch.autograd.gradgradcheck(loss, tuple(inputs.values()))


@pytest.mark.usefixtures("filled_with_nan")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("on", list(itertools.product((False, True), repeat=6)), ids=str)
def test_every_combination_of_options(on: tuple[bool, ...], reduction: str) -> None:
    options = {key: value for (key, value), is_on in zip(ALL.items(), on, strict=True) if is_on}
    assert_same(Case(tokens=9, hidden=5, classes=7, options={**options, "reduction": reduction}))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("needs", list(itertools.product((False, True), repeat=4)), ids=str)
def test_every_combination_of_gradients(needs: tuple[bool, ...], reduction: str) -> None:
    x, weight, target, options = Case(options={**ALL, "reduction": reduction}).draw()
    found = []
    for function in (linear_cross_entropy, plain):
        given = [t.detach().clone() for t in (x, weight, options["linear_bias"], options["logit_scale"])]
        for tensor, needed in zip(given, needs, strict=True):
            tensor.requires_grad_(needed)
        loss = function(given[0], given[1], target, **{**options, "linear_bias": given[2], "logit_scale": given[3]})
        assert loss.requires_grad == any(needs)
        if any(needs):
            loss.sum().backward()
        found.append([loss.detach(), *(t.grad for t in given)])
    for ours, other, needed in zip(*found, (True, *needs), strict=True):
        assert (ours is not None) == needed
        if needed:
            torch.testing.assert_close(ours, other)


def test_layouts() -> None:
    """Dimensions in any number, and tensors that do not lie row by row."""
    x = torch.randn(6, 4, 5, dtype=torch.float64).transpose(0, 1).requires_grad_()
    weight = torch.randn(5, 14, dtype=torch.float64)[:, ::2].t().requires_grad_()
    target = torch.randint(7, (6, 4)).t()
    for reduction in ("mean", "none"):
        loss = linear_cross_entropy(x, weight, target, reduction=reduction)
        other = plain(x, weight, target, reduction=reduction)
        assert loss.shape == other.shape == (target.shape if reduction == "none" else ())
        g = torch.randn_like(loss)
        for ours, theirs in zip(
            torch.autograd.grad(loss, (x, weight), g), torch.autograd.grad(other, (x, weight), g), strict=True
        ):
            torch.testing.assert_close(ours, theirs)
    for reduction in ("mean", "sum", "none"):
        one = linear_cross_entropy(x[0, 0], weight, target[0, 0], reduction=reduction)
        torch.testing.assert_close(one, F.cross_entropy(weight @ x[0, 0], target[0, 0], reduction=reduction))


@pytest.mark.parametrize("name", [None, "smoothing", "z_loss", "class weights", "bias"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("in_checkpoint", [False, True])
def test_no_valid_target(name: str | None, reduction: str, in_checkpoint: bool) -> None:
    options = {**OPTIONS.get(name or "", {}), "reduction": reduction}
    x, weight, target, options = Case(options=options, ignored=1).draw()
    assert target.eq(-100).all()

    def function(*args: Any, **kwargs: Any) -> Tensor:
        if in_checkpoint:
            return checkpoint(linear_cross_entropy, *args, use_reentrant=False, **kwargs)
        return linear_cross_entropy(*args, **kwargs)

    loss, *gradients = results(function, x, weight, target, options, 1.0)
    assert loss.isnan().all() if reduction == "mean" else loss.eq(0).all()
    assert all(gradient.eq(0).all() for gradient in gradients)


def test_class_weights_of_zero_are_what_they_are_to_plain() -> None:
    classes = torch.zeros(40)
    x, weight, target, options = Case(options={"weight": classes}).draw()
    for function in (linear_cross_entropy, plain):
        loss, _, gradient = results(function, x, weight, target, options, 1.0)
        assert loss.isnan()  # 0/0
        assert gradient.isnan().all()
    classes[::2] = 1
    assert_same(Case(options={"weight": classes}))


@pytest.mark.usefixtures("filled_with_nan")
def test_no_token() -> None:
    for reduction in ("mean", "sum", "none"):
        assert_same(Case(tokens=0, options={"reduction": reduction, "linear_bias": True}, ignored=0))


def test_another_index_is_ignored() -> None:
    assert_same(Case(options={"ignore_index": 3}, ignored=0))
    x, weight, _, _ = Case(tokens=4).draw()
    target = torch.tensor([1, 40, 40, 2])  # a class that there is not, as in Hugging Face's older models
    torch.testing.assert_close(
        linear_cross_entropy(x, weight, target, ignore_index=40),
        F.cross_entropy(x[[0, 3]] @ weight.t(), target[[0, 3]]),
    )


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_losses_of_tokens_can_be_changed_in_place(shape: tuple[int, ...], z_loss: float) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(*shape, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    target, mask = torch.randint(0, 9, shape), torch.rand(shape)
    found = []
    for in_place in (False, True):
        losses = linear_cross_entropy(x, weight, target, reduction="none", z_loss=z_loss)
        losses = losses.mul_(mask) if in_place else losses * mask
        found.append((losses, *torch.autograd.grad(losses.sum(), (x, weight))))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_what_is_no_number_in_the_gradient_of_an_ignored_token_stays_out() -> None:
    x, weight, _, _ = Case(tokens=4).draw()
    target, g = torch.tensor([1, -100, 3, -100]), torch.ones(4)
    g[1], g[3] = torch.nan, torch.inf
    x, weight = x.float(), weight.float()
    found = []
    for function in (linear_cross_entropy, lambda x, w, t, **named: F.cross_entropy(x @ w.t(), t, **named)):
        leaves = [t.detach().clone().requires_grad_() for t in (x, weight)]
        losses = function(*leaves, target, reduction="none")
        found.append(torch.autograd.grad(losses, leaves, g))
    assert all(t.isfinite().all() for t in found[1])
    torch.testing.assert_close(*found)


def test_classes_that_minus_infinity_takes_out() -> None:
    x, weight, _, _ = Case(tokens=4).draw()
    bias = torch.zeros(40)
    bias[10:] = -torch.inf
    ours, other = (
        results(function, x, weight, torch.arange(4), {"linear_bias": bias}, 1.0)
        for function in (linear_cross_entropy, plain)
    )
    for mine, theirs in zip(ours, other, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_huge_logits_do_not_overflow() -> None:
    x, weight, target, _ = Case(spread=1e4).draw()
    for mine, theirs in zip(
        *(results(f, x, weight, target, {}, 1.0) for f in (linear_cross_entropy, plain)), strict=True
    ):
        assert mine.isfinite().all()
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_uint8_targets_are_taken_as_cross_entropy_takes_them() -> None:
    x, weight, target, _ = Case(ignored=0).draw()
    assert same_bits(linear_cross_entropy(x, weight, target.byte()), linear_cross_entropy(x, weight, target))


def test_results_are_the_same_every_time() -> None:
    x, weight, target, options = Case(tokens=300, dtype=torch.bfloat16, options=ALL).draw()
    first, second = (results(linear_cross_entropy, x, weight, target, options, 1.3) for _ in range(2))
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))


# Refusals

FLOAT8 = torch.float8_e5m2


def call(**changed: Any) -> Tensor:
    given: dict[str, Any] = {
        "input": torch.ones(2, 3),
        "linear_weight": torch.ones(5, 3),
        "target": torch.ones(2).long(),
    }
    return linear_cross_entropy(**{**given, **changed})


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"input": torch.ones(2, 4)}, ValueError, r"expected \(\.\.\., D\) and \(V, D\), got \(2, 4\) and \(5, 3\)"),
        ({"input": torch.ones(())}, ValueError, r"got \(\) and \(5, 3\)"),
        ({"linear_weight": torch.ones(3)}, ValueError, r"got \(2, 3\) and \(3,\)"),
        ({"input": [1.0]}, TypeError, "input: expected a tensor, got list"),
        ({"input": torch.ones(2, 3).long()}, TypeError, r"input: expected a floating dtype, got torch\.int64"),
        ({"linear_weight": None}, TypeError, "linear_weight: expected a tensor, got NoneType"),
        ({"linear_weight": torch.ones(5, 3).half()}, TypeError, "expected one dtype, got torch.float32, torch.flo"),
        ({"input": torch.ones(2, 3).to(FLOAT8), "linear_weight": torch.ones(5, 3).to(FLOAT8)}, TypeError,
         "expected float16, bfloat16, float32 or float64"),
        ({"target": torch.ones(3).long()}, ValueError, r"target: expected \(2,\), an index for each row"),
        ({"target": torch.ones(2).int()}, TypeError, r"got torch\.int32; convert it with target\.long\(\)"),
        ({"target": torch.ones(2, 5)}, TypeError, "class probabilities are as large as the logits"),
        ({"target": None}, TypeError, "target: expected a tensor"),
        ({"target": torch.tensor([0, 5])}, IndexError, "Target 5 is out of bounds: expected 0 to 4, or -100"),
        ({"target": torch.tensor([0, -1])}, IndexError, "Target -1 is out of bounds"),
        ({"linear_bias": torch.ones(4)}, ValueError, r"linear_bias: expected \(5,\), a number for each class"),
        ({"linear_bias": torch.ones(5, dtype=torch.float64)}, TypeError, "expected one dtype"),
        ({"weight": torch.ones(4)}, ValueError, r"weight: expected \(5,\)"),
        ({"weight": torch.ones(5).long()}, TypeError, "weight: expected a floating dtype"),
        ({"weight": torch.ones(5, requires_grad=True)}, ValueError, r"pass weight\.detach\(\)"),
        ({"weight": torch.ones(5, device="meta")}, ValueError, "weight is on meta, input on cpu"),
        ({"target": torch.ones(2, device="meta").long()}, ValueError, "target is on meta, input on cpu"),
        ({"reduction": "average"}, ValueError, "expected 'none', 'mean' or 'sum', got 'average'"),
        ({"label_smoothing": -0.1}, ValueError, "label_smoothing: expected a number from 0 to 1, got -0.1"),
        ({"label_smoothing": 1.5}, ValueError, "got 1.5"),
        ({"softcap": 0.0}, ValueError, "softcap: expected a number above 0, or None for no cap, got 0.0"),
        ({"softcap": -3.0}, ValueError, "softcap"),
        ({"logit_scale": torch.ones(2)}, ValueError, r"logit_scale: .* got torch\.float32 of \(2,\)"),
        ({"logit_scale": torch.tensor(2)}, ValueError, "logit_scale"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_input(changed: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call(**changed)


# Around it


def test_second_backward() -> None:
    x, weight, target, options = Case(options=ALL).draw()
    for reduction in ("mean", "none"):
        given = {**options, "reduction": reduction}
        tensors = [t.requires_grad_() for t in (x, weight)]
        loss = linear_cross_entropy(x, weight, target, **given).sum()
        first = torch.autograd.grad(loss, tensors, torch.tensor(3.0), retain_graph=True)
        kept = [gradient.clone() for gradient in first]
        second = torch.autograd.grad(loss, tensors, torch.tensor(6.0), retain_graph=True)
        third = torch.autograd.grad(loss, tensors, torch.tensor(3.0))
        for a, b, c, d in zip(kept, first, second, third, strict=True):
            assert same_bits(a, b)
            assert same_bits(2 * a, c)
            assert same_bits(a, d)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(loss, tensors)


def test_double_backward_is_refused_or_right() -> None:
    x, weight, target, _ = Case().draw()
    x.requires_grad_()
    loss = linear_cross_entropy(x, weight, target)
    with pytest.raises(LeangradError, match=r"create_graph=True.*reduction='none'"):
        torch.autograd.grad(loss, x, create_graph=True)
    found = []
    for function in (linear_cross_entropy, plain):
        (g,) = torch.autograd.grad(function(x, weight, target, reduction="none").mean(), x, create_graph=True)
        found.append(torch.autograd.grad(g.square().sum(), x)[0])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("is_hooked", [False, True])
def test_double_backward_of_an_argument_that_is_passed_twice(is_hooked: bool) -> None:
    """Each place has its gradient once, and hooks of an argument run once."""
    found = []
    for function in (linear_cross_entropy, plain):
        torch.manual_seed(0)
        leaf = torch.randn(20, 8, requires_grad=True)
        z = leaf * 1
        if is_hooked:
            z.register_hook(lambda grad: 2 * grad)
        loss = function(z, z, torch.arange(20), reduction="none").sum()
        (g,) = torch.autograd.grad(loss, leaf, create_graph=True)
        found.append((g, torch.autograd.grad(g.square().sum(), leaf)[0]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_double_backward_under_autocast() -> None:
    x, weight, target, _ = Case().draw()
    x.requires_grad_()
    found = []
    for function in (linear_cross_entropy, plain):
        with torch.autocast("cpu", torch.bfloat16):
            loss = function(x, weight, target, reduction="none").mean()
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        found.append(torch.autograd.grad(g.square().sum(), x)[0])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_batched_gradients(reduction: str) -> None:
    x, weight, target, _ = Case().draw()
    x.requires_grad_()
    weight.requires_grad_()
    loss = linear_cross_entropy(x, weight, target, reduction=reduction)
    g = torch.randn(3, *loss.shape)
    batched = torch.autograd.grad(loss, (x, weight), g, is_grads_batched=True, retain_graph=True)
    for n in range(3):
        for one, all_ in zip(torch.autograd.grad(loss, (x, weight), g[n], retain_graph=True), batched, strict=True):
            torch.testing.assert_close(all_[n], one)


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)  # torch's own, for forward mode
def test_transforms_run_plain() -> None:
    x, weight, target, _ = Case(ignored=0).draw()
    expected = results(plain, x, weight, target, {}, 1.0)
    by_grad = torch.func.grad(linear_cross_entropy, argnums=(0, 1))(x, weight, target)
    for ours, other in zip(by_grad, expected[1:], strict=True):
        torch.testing.assert_close(ours, other)
    each = torch.func.vmap(linear_cross_entropy, in_dims=(0, None, 0))(x, weight, target)
    torch.testing.assert_close(each, plain(x, weight, target, reduction="none"))
    _, tangent = torch.func.jvp(lambda x: linear_cross_entropy(x, weight, target), (x,), (torch.ones_like(x),))
    torch.testing.assert_close(tangent, expected[1].sum())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        value = linear_cross_entropy(dual, weight, target)
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(value).tangent, expected[1].sum())


def test_compiled() -> None:
    torch._dynamo.reset()
    x, weight, target, _ = Case().draw()
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    ours, other = (results(f, x, weight, target, {"softcap": 5.0}, 1.5) for f in (compiled, plain))
    for mine, theirs in zip(ours, other, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_meta_fake_and_subclasses() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for device in (torch.device("meta"), FakeTensorMode()):
        with device:
            x, weight = torch.ones(4, 3, requires_grad=True), torch.ones(5, 3, requires_grad=True)
            loss = linear_cross_entropy(x, weight, torch.ones(4, dtype=torch.long))
            loss.backward()
        assert loss.shape == ()
        assert weight.grad is not None

    class Named(Tensor):
        pass

    x, weight, target, _ = Case().draw()
    ours = linear_cross_entropy(x, weight.as_subclass(Named), target)
    assert type(ours) is Named
    torch.testing.assert_close(ours.as_subclass(Tensor), plain(x, weight, target))


def test_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEANGRAD_DISABLE", "1")
    x, weight, target, _ = Case().draw()
    ours, other = (results(f, x, weight, target, {}, 1.5) for f in (linear_cross_entropy, plain))
    assert all(same_bits(a, b) for a, b in zip(ours, other, strict=True))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast(reduction: str) -> None:
    x, weight, target, options = Case(options={**ALL, "reduction": reduction}).draw()
    g = torch.rand(48) if reduction == "none" else 1.0
    with torch.autocast("cpu", torch.bfloat16):
        ours, other = (results(f, x, weight, target, options, g) for f in (linear_cross_entropy, plain))
        low = [t.bfloat16() if isinstance(t, Tensor) else t for t in (x, weight, options["linear_bias"])]
    truth = results(
        plain, low[0].double(), low[1].double(), target,
        {**options, "linear_bias": low[2].double(), "weight": options["weight"].double(),
         "logit_scale": options["logit_scale"].double()}, g,
    )  # fmt: skip
    for mine, theirs, exact in zip(ours, other, truth, strict=True):
        assert mine.dtype == theirs.dtype == torch.float32
        torch.testing.assert_close(mine, theirs, rtol=0.1, atol=0.02)
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-5)  # nothing was rounded to bfloat16


def test_autocast_keeps_its_cache_right() -> None:
    """A cast that a Function made would stay in autocast's cache without its history."""
    x, weight, target, _ = Case().draw()
    weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x, weight, target)
        other = F.linear(x, weight).float().square().sum()
    (by_loss,) = torch.autograd.grad(loss, weight)
    (by_other,) = torch.autograd.grad(other, weight)
    assert by_loss.any()
    assert by_other.any()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant: bool, reduction: str) -> None:
    def inside(*args: Any, **kwargs: Any) -> Tensor:
        if use_reentrant:
            return checkpoint(lambda *tensors: linear_cross_entropy(*tensors, **kwargs), *args, use_reentrant=True)
        return checkpoint(linear_cross_entropy, *args, use_reentrant=False, **kwargs)

    x, weight, target, _ = Case().draw()
    found = []
    for function in (inside, plain):
        leaf, table = x.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = function(leaf, table, target, reduction=reduction, softcap=4.0)
        loss.mean().mul(1.3).backward()
        found.append([loss.detach(), leaf.grad, table.grad])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_checkpoint_keeps_its_arguments_alone(reduction: str) -> None:
    """Not the gradients, which would be larger: the hooks of others are to have what is kept."""
    x, weight, target, _ = Case(tokens=256, hidden=64, classes=512).draw()
    x.requires_grad_()
    weight.requires_grad_()

    def step() -> None:
        loss = checkpoint(linear_cross_entropy, x, weight, target, use_reentrant=False, reduction=reduction)
        loss.sum().backward()

    step()
    assert leangrad.measure(step, timed_runs=0).kept_bytes < 4 * 256 * 16
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        linear_cross_entropy(x, weight, target, reduction=reduction)
    assert {t.data_ptr() for t in packed} == {t.data_ptr() for t in (x, weight, target)}


class Model(nn.Module):
    """An embedding, a layer, and a head that may be tied to the embedding."""

    def __init__(self, is_tied: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16, dtype=dtype)
        self.layer = nn.Sequential(nn.Linear(16, 16, dtype=dtype), nn.GELU(), nn.LayerNorm(16, dtype=dtype))
        self.head = nn.Linear(16, 40, bias=not is_tied, dtype=dtype)
        if is_tied:
            self.head.weight = self.embed.weight
        self.loss: Any = linear_cross_entropy

    def forward(self, tokens: Tensor, reduction: str = "mean") -> Tensor:
        hidden = self.layer(self.embed(tokens))
        loss = self.loss(
            hidden[:, :-1], self.head.weight, tokens[:, 1:], linear_bias=self.head.bias, reduction=reduction
        )
        return loss if reduction == "mean" else loss.mean()


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_inside_a_lean_model(reduction: str) -> None:
    model, tokens = Model(), torch.randint(40, (4, 9))
    model(tokens, reduction).backward()
    expected = gradients_of(model)
    lean = leangrad.lean(copy.deepcopy(model), min_bytes=0)
    for _ in range(4):  # recorded, then by its trace
        lean.zero_grad()
        lean(tokens, reduction).backward()
        assert all(same_bits(a, b) for a, b in zip(gradients_of(lean), expected, strict=True))
    assert len(expected) == 7
    plain_model = leangrad.plain(lean)
    ledger = leangrad.saving()
    for _ in range(3):
        plain_model.zero_grad()
        with ledger:
            loss = plain_model(tokens, reduction)
        loss.backward()
        assert all(same_bits(a, b) for a, b in zip(gradients_of(plain_model), expected, strict=True))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_packed_gradients(is_tied: bool, reduction: str) -> None:
    model, tokens = Model(is_tied), torch.randint(40, (4, 9))
    for _ in range(2):
        model(tokens, reduction).backward(torch.tensor(1.5))
    expected = gradients_of(model)
    model.zero_grad()
    packed = leangrad.pack_gradients(model)
    for _ in range(2):  # two micro-batches
        model(tokens, reduction).backward(torch.tensor(1.5))
    for ours, other in zip(gradients_of(model), expected, strict=True):
        torch.testing.assert_close(ours, other)
    row = packed.report()["embed.weight" if is_tied else "head.weight"]
    assert row.how == "written"
    if not is_tied:
        assert row.why == "the loss writes it"


def test_packed_gradient_in_half_precision_and_by_autograd_grad() -> None:
    model, tokens = Model(dtype=torch.bfloat16), torch.randint(40, (4, 9))
    model(tokens).backward()
    expected = gradients_of(model)
    model.zero_grad()
    leangrad.pack_gradients(model)
    (asked,) = torch.autograd.grad(model(tokens), model.head.weight)
    assert model.head.weight.grad is None
    model(tokens).backward()
    assert all(same_bits(a, b) for a, b in zip(gradients_of(model), expected, strict=True))
    assert same_bits(asked, model.head.weight.grad)


def test_weights_that_change_before_backward() -> None:
    """Gradients that forward computed do not read the weight again; with "none" autograd's own check speaks."""
    x, weight, target, _ = Case().draw()
    expected = results(linear_cross_entropy, x, weight, target, {}, 1.0)[2]
    weight.requires_grad_()
    loss = linear_cross_entropy(x, weight, target)
    each = linear_cross_entropy(x, weight, target, reduction="none").mean()
    with torch.no_grad():
        weight.mul_(2)
    assert same_bits(torch.autograd.grad(loss, weight)[0], expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(each, weight)


def test_inference() -> None:
    x, weight, target, options = Case(options=ALL).draw()
    x.requires_grad_()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            loss = linear_cross_entropy(x, weight, target, **options)
        assert not loss.requires_grad
        torch.testing.assert_close(loss, plain(x, weight, target, **options).detach())


# Memory


def peak_bytes(
    tokens: int, classes: int, *, grad: bool = True, dtype: torch.dtype = torch.float32, **given: Any
) -> int:
    """Of a step, above the arguments."""
    x, weight, target, _ = Case(tokens, 32, classes, dtype).draw()
    x.requires_grad_(grad)
    weight.requires_grad_(grad and given.pop("trains_weight", True))

    def step() -> None:
        loss = linear_cross_entropy(x, weight, target, **given)
        if grad:
            torch.autograd.grad(loss.sum(), [t for t in (x, weight) if t.requires_grad])

    step()
    return leangrad.measure(step, timed_runs=0).peak_bytes


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.sampled(2)
def test_memory_does_not_grow_with_tokens_times_classes(
    dtype: torch.dtype, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only by a few vectors for the tokens, and by the gradients: of x, and of the weight in float32 and its dtype."""
    classes, D = 1024, 32
    monkeypatch.setattr(ops, "BLOCK", 128 * D)
    chunk = 4 * ops.chunk_rows(8192, D, classes, "cpu") * classes
    gradient = D * (4 if dtype == torch.float32 else 6)
    for tokens in (512, 2048, 8192):
        above = peak_bytes(tokens, classes, dtype=dtype, reduction=reduction) - gradient * (tokens + classes) - chunk
        assert above <= 64 * tokens + 128 * 1024, tokens
    assert 4 * 8192 * classes > 30 * chunk  # all logits in float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("trains_weight", [False, True])
@pytest.mark.sampled(2)
def test_kept_bytes_are_those_of_the_docstring(trains_weight: bool, dtype: torch.dtype) -> None:
    tokens, hidden, classes = 1024, 32, 512
    x, weight, target, _ = Case(tokens, hidden, classes, dtype).draw()
    x.requires_grad_()
    weight.requires_grad_(trains_weight)

    def step(reduction: str) -> None:
        linear_cross_entropy(x, weight, target, reduction=reduction).sum().backward()
        x.grad = weight.grad = None

    kept = leangrad.measure(lambda: step("mean"), timed_runs=1).kept_bytes
    assert 0 <= kept - 4 * hidden * (tokens + classes * trains_weight) <= 64
    kept = leangrad.measure(lambda: step("none"), timed_runs=1).kept_bytes
    assert kept <= 64  # its arguments stood before


def test_memory_in_evaluation_and_with_a_frozen_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    classes, D = 4096, 32
    monkeypatch.setattr(ops, "BLOCK", 128 * D)
    chunk = 4 * ops.chunk_rows(8192, D, classes, "cpu") * classes
    assert peak_bytes(8192, classes, grad=False) <= chunk + 64 * 8192 + 64 * 1024
    frozen = peak_bytes(8192, classes, trains_weight=False)
    assert frozen <= chunk + 4 * D * 8192 + 64 * 8192 + 64 * 1024
    assert peak_bytes(8192, classes) >= frozen + 4 * D * classes


def test_nothing_is_left_behind() -> None:
    """No cycle holds a gradient, whether backward runs or not."""
    x, weight, target, _ = Case().draw()
    x.requires_grad_()
    weight.requires_grad_()
    gc.collect()
    gc.disable()
    try:
        for runs, reduction in itertools.product((True, False), ("mean", "none")):
            held = x * 1
            seen = weakref.ref(held)
            loss = linear_cross_entropy(held, weight, target, reduction=reduction).sum()
            node = weakref.ref(loss)
            if runs:
                loss.backward()
            del held, loss
            assert seen() is None
            assert node() is None
    finally:
        gc.enable()


def test_warnings_are_none() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x, weight, target, options = Case(dtype=torch.float16, options=ALL).draw()
        results(linear_cross_entropy, x, weight, target, options, 1.0)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_host_never_waits_for_a_gpu(dtype: torch.dtype, reduction: str) -> None:
    case = Case(tokens=600, dtype=dtype, device="cuda", options={**ALL, "reduction": reduction})
    x, weight, target, options = case.draw()
    options["logit_scale"].requires_grad_()
    x.requires_grad_()
    weight.requires_grad_()
    linear_cross_entropy(x, weight, target, **options).sum().backward()  # compiles, and tries products
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        linear_cross_entropy(x, weight, target, **options).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_memory_on_a_gpu() -> None:
    tokens, hidden, classes = 16384, 512, 50257
    x, weight, target, _ = Case(tokens, hidden, classes, torch.bfloat16, "cuda").draw()
    x.requires_grad_()
    weight.requires_grad_()
    linear_cross_entropy(x, weight, target).backward()
    x.grad = weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(x, weight, target).backward()
    peak = torch.cuda.max_memory_allocated() - before
    chunk = ops.chunk_bytes(tokens, hidden, classes + 31, "cuda", torch.bfloat16, needs_weight=True)
    assert peak <= 6 * hidden * (tokens + classes) + chunk + 64 * tokens + (4 << 20)
