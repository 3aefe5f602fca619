"""`leangrad.floor` as a function: what it takes, what it leaves behind, and whose floor it gives."""

import copy
import importlib
import random
import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import leangrad
from benchmarks.floor import main
from leangrad import _torch, floor
from leangrad.switch import disabled
from tests.support import same_bits

FLOAT = 4  # bytes


def mlp() -> nn.Sequential:
    """Its floor for 8 rows under `squares`: 64 pre-activations and 10 outputs of each."""
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 10))


MLP_BYTES = FLOAT * 8 * (64 + 10)


def squares(output: Tensor) -> Tensor:
    return output.square().mean()


# What it is given


class Scale(nn.Module):
    """`exp(w · x)` in the shape that is asked for: its backward reads the result, and w's the batch."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.first = nn.Linear(4, 2)
        self.form = form

    def forward(self, x: Tensor) -> Any:
        y = self.first(x).exp()
        return {
            "tensor": lambda: y,
            "scalar": lambda: y.square().mean(),
            "attribute": lambda: Output(loss=y.square().mean(), logits=y),
            "mapping": lambda: OrderedDict(loss=y.square().mean(), logits=y),
            "parts": lambda: {"a": y, "b": [y]},
        }[self.form]()


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


@pytest.mark.parametrize("form", ["tensor", "scalar", "attribute", "mapping", "parts"])
def test_every_form_of_output_without_a_loss(form: str) -> None:
    # The square reads exp's result, which exp's own backward reads, too; the product before it would do as well.
    assert floor(Scale(form), torch.randn(3, 4)).bytes == FLOAT * 3 * 2


@pytest.mark.parametrize("batch", ["tensor", "tuple", "list", "mapping", "ordered"])
def test_every_form_of_batch(batch: str) -> None:
    x = torch.randn(3, 4)
    forms = {"tensor": x, "tuple": (x,), "list": [x], "mapping": {"x": x}, "ordered": OrderedDict(x=x)}
    assert floor(Scale("tensor"), forms[batch], squares).bytes == FLOAT * 3 * 2


class Times(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.first(x) * y


@pytest.mark.parametrize("is_leaf", [True, False])
def test_inputs_that_require_a_gradient(is_leaf: bool) -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 2, requires_grad=True)
    y = y if is_leaf else y * 2
    # The gradient of y reads the product, that of the layer reads x and y, which are the caller's.
    assert floor(Times(), (x, y), torch.mean).bytes == FLOAT * 3 * 2
    assert floor(Times(), (x, y.detach()), torch.mean).bytes == 0
    assert floor(Times().requires_grad_(False), (x, y), torch.mean).bytes == FLOAT * 3 * 2


def test_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.mix, self.head = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 50, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.mix(self.table(ids)).tanh())

    # tanh's backward and the gradient of the head read tanh's result, rebuilt from the product or kept; the square
    # reads the logits. The table is a parameter: what is looked up in it is looked up again.
    assert floor(Tied(), torch.randint(50, (3, 7)), squares).bytes == FLOAT * 3 * 7 * (16 + 50)


def test_eval_mode() -> None:
    net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 4)).eval()
    # In eval mode batch norm only scales by the running statistics; the gradient of its weight reads its input.
    result = floor(net, torch.randn(8, 16), torch.mean)
    assert [(kept.module, kept.bytes) for kept in result.tensors] == [("0", FLOAT * 8 * 64)]
    assert not net.training


def test_model_from_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 40, "n_positions": 8}
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM")
    )
    ids = torch.randint(40, (2, 8))
    result = floor(model, transformers.BatchEncoding({"input_ids": ids, "labels": ids}))
    # As in the hand count of a GPT in test_floor.py: 3 + 1 + 1 + 4 + 1 widths and a log of a denominator per head; and
    # the logits. The embeddings and all masks of dropout are made again.
    assert result.bytes == FLOAT * 2 * 8 * (10 * 16 + 2 + 40)


# Whose floor it is


def test_of_a_lean_model_it_is_that_of_the_plain_one() -> None:
    model, x = mlp(), torch.randn(8, 16)
    lean = leangrad.lean(copy.deepcopy(model), min_bytes=0)
    assert str(floor(lean, x, squares)) == str(floor(model, x, squares))
    assert floor(lean, x, squares).bytes == MLP_BYTES
    assert leangrad.is_lean(lean)
    assert leangrad.ledger_of(lean).entries() == []  # it has recorded no step
    for _ in range(3):
        squares(lean(x)).backward()
    ledger = leangrad.ledger_of(lean)
    learned = ledger.decisions, ledger.trace, ledger.entries(), ledger.differences
    assert learned[0] is not None
    floor(lean, torch.randn(3, 16), squares)  # a batch of another size, which would end the trace
    assert (ledger.decisions, ledger.trace, ledger.entries(), ledger.differences) == learned
    squares(lean(x)).backward()
    assert ledger.differences == 0


def test_a_lean_model_is_still_watched() -> None:
    model, x = leangrad.lean(mlp()), torch.randn(8, 16)
    floor(model, x, squares)
    with pytest.warns(UserWarning, match="got gradients, but its forward has not run"):
        squares(model[3](model[0](x))).backward()


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: leangrad.nn.TransformerBlock(32, 4), (2, 16, 32)),
        (lambda: leangrad.nn.MLP([16, 32, 8]), (8, 16)),
        (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), leangrad.nn.InPlaceABN(8), nn.Conv2d(8, 4, 3)), (2, 3, 9, 9)),
    ],
    ids=["TransformerBlock", "MLP", "InPlaceABN"],
)
def test_of_our_own_modules_it_is_that_of_their_plain_form(
    make: Any, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = make(), torch.randn(shape)
    seen: list[bool] = []
    model.register_forward_hook(lambda *_: seen.append(disabled()))
    found = floor(model, x, squares)
    assert seen == [True]
    assert not disabled()
    monkeypatch.setenv("LEANGRAD_DISABLE", "1")
    assert floor(model, x, squares) == found
    assert found.bytes > 0


def test_of_a_packed_model() -> None:
    model, x = mlp(), torch.randn(8, 16)
    leangrad.pack_gradients(model)
    squares(model(x)).backward()
    before = [(p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None]
    assert floor(model, x, squares).bytes == MLP_BYTES
    for parameter, (grad, value) in zip(model.parameters(), before, strict=True):
        assert parameter.grad is grad
        assert same_bits(grad, value)


def test_of_a_compiled_model_it_is_that_of_the_eager_one() -> None:
    torch._dynamo.reset()
    model = torch.compile(mlp(), backend="aot_eager")
    x = torch.randn(8, 16)
    assert floor(model, x, squares).bytes == MLP_BYTES
    squares(model(x)).backward()
    assert floor(model, x, squares).bytes == MLP_BYTES


def test_code_that_it_has_run_is_still_compiled_afterwards() -> None:
    """Dynamo skips code for good that it has met under a dispatch mode."""
    torch._dynamo.reset()
    floor(torch.compile(mlp(), backend="aot_eager"), torch.randn(8, 16), squares)
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compile(mlp(), backend=backend, fullgraph=True)(torch.randn(8, 16))
    assert len(graphs) == 1


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_of_a_scripted_part() -> None:
    part = torch.jit.script(nn.Sequential(nn.Linear(16, 64), nn.GELU()))
    model = nn.Sequential(part, nn.Linear(64, 10))
    assert floor(model, torch.randn(8, 16), squares).bytes == MLP_BYTES


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
@pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support")
def test_sparse_constants(layout: torch.layout) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(16, 6)
            self.register_buffer("graph", torch.eye(5).to_sparse(layout=layout))

        def forward(self, x: Tensor) -> Tensor:
            return self.graph @ self.first(x)

    # The square reads the product with the sparse matrix, which is the caller's.
    assert floor(Mixed(), torch.randn(5, 16), squares).bytes == FLOAT * 5 * 6


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("changes", [False, True])
def test_nested_batches(changes: bool) -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            if changes:
                x.values().mul_(2)
            return self.net(x)

    rows = torch.randn(8, 16)
    batch = torch.nested.nested_tensor([rows[:3], rows[3:]], layout=torch.jagged)
    assert floor(Changing(), batch, lambda output: squares(output.values())).bytes == MLP_BYTES
    assert same_bits(batch.values(), rows)


# What it leaves behind


class Spoiling(nn.Module):
    """Changes its batch, its buffers, its attributes, and draws from every generator."""

    def __init__(self, fails: str = "") -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
        self.register_buffer("count", torch.zeros(()))
        self.steps, self.log, self.generator = 0, ["begin"], torch.Generator().manual_seed(5)
        self.rng = np.random.default_rng(3)
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.log.append("step")
        self.count += 1
        self.late = x
        noise = random.random() + np.random.rand() + self.rng.random()
        out = self.net(x.mul_(2)) * (torch.rand(4) + torch.rand(4, generator=self.generator) + noise)
        if self.fails == "forward":
            raise ZeroDivisionError("from forward")
        if self.fails == "backward":
            out.register_hook(_fail)
        return out


def _fail(_: Tensor) -> None:
    raise ZeroDivisionError("from backward")


def state(model: Spoiling, batch: Tensor) -> Iterator[Any]:
    yield {name: value.clone() for name, value in model.state_dict().items()}
    yield [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    yield batch.clone()
    yield batch.grad
    yield model.steps, list(model.log), hasattr(model, "late"), [one.training for one in model.modules()]
    yield model.generator.get_state()
    yield str(model.rng.bit_generator.state)
    yield torch.get_rng_state()
    yield str(random.getstate())
    yield str(np.random.get_state())
    yield [(list(one._forward_hooks), list(one._forward_pre_hooks)) for one in model.modules()]
    yield torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), disabled(), _torch.dispatch_modes_active()


def is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a is b or same_bits(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(is_same(*pair) for pair in zip(a, b, strict=True))
    return bool(a == b)


@pytest.mark.parametrize("fails", ["", "forward", "backward", "loss"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_everything_is_left_as_it_was(fails: str, autocast: torch.dtype | None) -> None:
    model, batch = Spoiling(fails), torch.randn(8, 4)
    next(model.parameters()).grad = torch.ones(4, 4)
    before = list(state(model, batch))

    def loss(output: Tensor) -> Tensor:
        if fails == "loss":
            raise ZeroDivisionError("from loss")
        return output.float().mean()

    if fails:
        with pytest.raises(ZeroDivisionError, match=f"from {fails}"):
            floor(model, batch, loss, autocast=autocast)
    else:
        assert floor(model, batch, loss, autocast=autocast).bytes > 0
    after = list(state(model, batch))
    assert [is_same(*pair) for pair in zip(before, after, strict=True)] == [True] * len(before)
    parameter = next(model.parameters())
    assert parameter.grad is before[1][0][1]


def test_state_of_the_loss_is_put_back() -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(()))

        def forward(self, output: Tensor) -> Tensor:
            self.mean += output.detach().mean()
            return output.mean() * self.mean

    loss = Running()
    floor(nn.Linear(4, 4), torch.randn(3, 4), loss)
    assert loss.mean.item() == 0.0


def test_hooks_for_grad_do_not_run() -> None:
    model, seen = nn.Linear(4, 4), []
    model.weight.register_post_accumulate_grad_hook(seen.append)
    floor(model, torch.randn(3, 4), squares)
    assert seen == []
    squares(model(torch.randn(3, 4))).backward()
    assert len(seen) == 1


def test_it_runs_under_no_grad() -> None:
    with torch.no_grad():
        assert floor(mlp(), torch.randn(8, 16), squares).bytes == MLP_BYTES


# Errors


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": mlp}, TypeError, r"expected model to be a torch.nn.Module, got function; call floor\(model"),
        ({"model": nn.LazyLinear(3)}, ValueError, "call the model once"),
        ({"model": mlp().requires_grad_(False)}, ValueError, "got Sequential with none; unfreeze one"),
        ({"model": mlp().to("meta"), "batch": torch.randn(8, 16, device="meta")}, ValueError, "on the meta device"),
        ({"batch": "text"}, TypeError, "expected batch to be a tensor, .* got str"),
        ({"loss": 3}, TypeError, "expected loss to be a function .* got int"),
        ({"loss": lambda out: out}, ValueError, r"expected the loss to be a scalar, got float32\[8, 10\]; pass `loss="),
        ({"loss": lambda out: out.detach().sum()}, ValueError, "requires no gradient"),
        ({"loss": lambda _: torch.ones((), requires_grad=True) * 2}, ValueError, "got one that depends on neither"),
        ({"autocast": True}, TypeError, "expected autocast to be a dtype"),
    ],
)
def test_errors_say_what_to_do(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"model": mlp(), "batch": torch.randn(8, 16), "loss": None, "autocast": None} | change
    with pytest.raises(error, match=message):
        floor(arguments.pop("model"), arguments.pop("batch"), **arguments)
    assert not disabled()


def test_a_batch_that_does_not_fit_is_named() -> None:
    with pytest.raises(RuntimeError) as caught:
        floor(mlp(), torch.zeros(8, 5))
    assert "leangrad.floor called Sequential with the batch float32[8, 5]" in caught.value.__notes__


def test_inside_a_region_it_is_refused() -> None:
    with leangrad.saving() as ledger, pytest.raises(ValueError, match="call floor before or after"):
        floor(mlp(), torch.randn(8, 16), squares)
    assert ledger.entries() == []
    with torch.inference_mode(), pytest.raises(ValueError, match="leave it first"):
        floor(mlp(), torch.randn(8, 16), squares)


def test_a_torch_without_the_names_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _torch.missing_dispatch_names() == []
    monkeypatch.setattr(importlib.import_module("leangrad._torch.dispatch"), "DispatchMode", object)
    with pytest.raises(leangrad.errors.LeangradError, match=r"has no torch.utils._python_dispatch.TorchDispatchMode"):
        floor(mlp(), torch.randn(8, 16), squares)


# How it is shown


def test_prints_as_a_table() -> None:
    net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    lines = str(floor(net, torch.randn(400, 8), squares)).splitlines()
    assert lines[1].split() == ["51,200", "addmm", "float32", "400", "x", "32", "0"]
    assert lines[-1].split() == ["52,800", "the", "floor:", "2", "tensors"]
    assert len({line.index("float32") for line in lines[1:-1]}) == 1
    assert str(floor(net[:1], torch.randn(4, 8), torch.mean)).splitlines()[-1] == "    0  the floor: 0 tensors"


def test_command_line_over_the_zoo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["floor", "--case", "vit", "resnet"])
    main()
    lines = capsys.readouterr().out.splitlines()
    assert {"vit", "resnet"} <= set(lines)
    assert re.search(r"the floor: \d+ tensors", lines[-1])


# A GPU


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_on_a_gpu_it_is_the_same(autocast: torch.dtype | None) -> None:
    x = torch.randn(8, 16)
    on_the_cpu = floor(mlp(), x, squares, autocast=autocast)
    model = mlp().cuda()
    before = torch.cuda.get_rng_state(), torch.get_rng_state()
    found = floor(model, x.cuda(), squares, autocast=autocast)
    assert found.bytes == on_the_cpu.bytes
    assert same_bits(torch.cuda.get_rng_state(), before[0])
    assert same_bits(torch.get_rng_state(), before[1])
    assert all(parameter.grad is None for parameter in model.parameters())
    assert floor(leangrad.lean(model, min_bytes=0), x.cuda(), squares, autocast=autocast) == found


@pytest.mark.gpu
def test_on_a_gpu_our_own_modules_run_plain() -> None:
    """Their Triton kernels are launched past the dispatcher; the plain forms are not."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3), leangrad.nn.InPlaceABN(8), nn.Conv2d(8, 4, 3)).cuda()
    # Batch norm's backward reads the first product, the square reads the second.
    found = floor(net, torch.randn(2, 3, 9, 9, device="cuda"), squares)
    assert found.bytes == FLOAT * 2 * (8 * 7 * 7 + 4 * 5 * 5)
    block, x = leangrad.nn.TransformerBlock(64, 4).cuda(), torch.randn(2, 128, 64, device="cuda")
    assert floor(block, x, squares).bytes > 0
