"""The chain of layers on bare tensors: autograd's bits, two gradients at a time, and only what it owns overwritten."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from leangrad.engine import chain
from leangrad.engine.chain import Chain
from leangrad.engine.grad_buffer import release_scratch
from leangrad.kernels import rebuild
from leangrad.kernels.rebuild import rebuild_and_backward
from leangrad.measure import measure
from leangrad.nn import MLP
from leangrad.ops.activation import ACTIVATIONS
from tests.support import same_bits
from tests.support.activation import PLAIN

MIXED = ("gelu", None, "swiglu", "relu", "softmax", "tanh")


@pytest.fixture(autouse=True, params=[0, 1 << 20], ids=["rebuilt", "stored"])
def _rebuilding(request, monkeypatch):
    monkeypatch.setattr(chain, "REBUILD_MIN_BYTES", request.param)
    release_scratch()


@pytest.fixture(params=["rooms", "device"])
def _way(request, monkeypatch):
    """The loop for an accelerator runs on the CPU as well."""
    if request.param == "device":
        monkeypatch.setattr(Chain, "_backward_in_rooms", Chain._backward_on_device)


def layers(names, width=6, rows=5, dtype=torch.float32) -> list[Tensor]:
    """x, and a weight and a bias for each layer, with widths that differ."""
    tensors, inside = [torch.randn(rows, width, dtype=dtype)], width
    for k, name in enumerate(names):
        outside = width + k % 3
        wide = outside * (2 if name is not None and ACTIVATIONS[name].gated else 1)
        tensors += [torch.randn(wide, inside, dtype=dtype) / inside**0.5, torch.randn(wide, dtype=dtype)]
        inside = outside
    return tensors


def records(names):
    return [None if name is None else ACTIVATIONS[name] for name in names]


def plain(names, tensors):
    x = tensors[0]
    for name, weight, bias in zip(names, tensors[1::2], tensors[2::2], strict=True):
        x = F.linear(x, weight, bias)
        x = x if name is None else PLAIN[name](x)
    return x


def expect(names, tensors, needs, g):
    leaves = [t.clone().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
    y = plain(names, leaves)
    g = torch.randn_like(y) if g is None else g
    wanted = [t for t in leaves if t.requires_grad]
    found = iter(torch.autograd.grad(y, wanted, g, allow_unused=True))
    return y.detach(), g, [next(found) if need else None for need in needs]


def backward(run, *arguments, **options):
    """As autograd calls it: with grad mode off."""
    with torch.no_grad():
        return run.backward(*arguments, **options)


def check(run, tensors, needs, y, g, expected, **options):
    out = run.forward(tensors)
    assert same_bits(out, y)
    found = backward(run, g, tensors, out if run.reads_output else None, **options)
    same(found, expected)
    return found


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or same_bits(one, other)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("spent", [True, False])
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("names", [(None,), ("relu",), ("relu", "relu", "relu", None), ("gelu", "gelu", None), MIXED])
def test_gradients_are_autograds(names, ours, spent):
    tensors = layers(names)
    before = [t.clone() for t in tensors]
    for needs in itertools.islice(wanted_gradients(len(tensors)), 32):
        y, g, expected = expect(names, tensors, needs, None)
        run, given = Chain(records(names), needs), g.clone()
        out = run.forward(tensors)
        result = out.clone()
        assert same_bits(out, y)
        held = out if run.reads_output else None
        for _ in range(1 if spent else 2):  # what is not spent can run again
            given.copy_(g)
            same(backward(run, given, tensors, held, ours=ours, spent=spent), expected)
            assert ours or same_bits(given, g)
        assert same_bits(out, result)
        assert all(same_bits(now, then) for now, then in zip(tensors, before, strict=True))


def wanted_gradients(count):
    """Everything, each tensor alone, all but each; then random ones."""
    yield (True,) * count
    for i in range(count):
        yield tuple(j == i for j in range(count))
        yield tuple(j != i for j in range(count)) if count > 1 else (True,)
    while True:
        needs = tuple((torch.rand(count) < 0.5).tolist())
        if any(needs):
            yield needs


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_no_gradient_shares_memory_with_another(activation):
    names = (activation, activation, activation)
    tensors = layers(names)
    needs = (True,) * len(tensors)
    run = Chain(records(names), needs)
    y = run.forward(tensors)
    given = torch.randn_like(y)
    found = backward(run, given, tensors, y if run.reads_output else None, ours=True, spent=True)
    addresses = {t.untyped_storage().data_ptr() for t in found}
    assert len(addresses) == len(found)
    assert all(t.untyped_storage().nbytes() == t.numel() * 4 for t in found)
    later = [t.clone() for t in found]
    check(Chain(records(names), needs), tensors, needs, *expect(names, tensors, needs, None))  # scratch goes round
    same(found, later)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("names", [MIXED, ("relu", "gelu", None)])
def test_what_is_handed_over_comes_back(names):
    tensors = layers(names)
    needs = (True,) * len(tensors)
    _, g, expected = expect(names, tensors, needs, None)
    run = Chain(records(names), needs)
    out = run.forward(tensors)
    maps = run.hand_over()
    assert len({t.data_ptr() for t in maps}) == len(maps)  # each map once
    assert not any(t is not None for t in (*run.kept, *run.hidden))
    copies = [t.clone() for t in maps]
    for _ in range(2):
        assert not run.take_back(copies, [False] * len(copies))
        same(backward(run, g, tensors, out if run.reads_output else None), expected)
    assert all(same_bits(a, b) for a, b in zip(maps, copies, strict=True))
    run.let_go()
    assert not any(t is not None for t in (*run.kept, *run.hidden))


@pytest.mark.parametrize("spent", [True, False])
@pytest.mark.parametrize("names", [("gelu",) * 6, ("silu", "gelu", "relu", "gelu", "silu", None), MIXED])
def test_one_pass_for_rebuilding_and_backward(names, spent, monkeypatch):
    """Asked for once for layers in a row with one activation, it gets the right maps, and only those that are spent."""
    asked, used = [], []

    def both(record, z):
        def run(g, z):
            used.append(record.name)
            h = record.forward(z, record.parameter, None)
            record.backward(g, z, record.parameter, g)
            z.copy_(h)

        asked.append(record.name)
        return None if record.gated else run

    monkeypatch.setattr(chain, "rebuild_and_backward", both)
    monkeypatch.setattr(Chain, "_backward_in_rooms", Chain._backward_on_device)
    tensors = layers(names)
    rebuilt = spent and chain.REBUILD_MIN_BYTES == 0
    for needs in itertools.islice(wanted_gradients(len(tensors)), 24):
        asked.clear()
        used.clear()
        y, g, expected = expect(names, tensors, needs, None)
        before = g.clone()
        check(Chain(records(names), needs), tensors, needs, y, g, expected, spent=spent)
        assert same_bits(g, before)
        if all(needs) and names == ("gelu",) * 6:
            assert (len(asked), len(used)) == ((1, 5) if rebuilt else (0, 0))
        if all(needs) and names == MIXED:
            assert (asked, used) == ((["swiglu", "gelu"], ["gelu"]) if rebuilt else ([], []))


def test_an_activation_is_known_by_its_functions(monkeypatch):
    """One of the same name that computes something else has a proof of its own to pass."""
    asked = []
    monkeypatch.setattr(rebuild, "_proven", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(rebuild, "_prove", lambda record, dtype, device: asked.append(record))
    gelu, device = ACTIVATIONS["gelu"], torch.device("cuda", 0)
    other = replace(gelu, backward=ACTIVATIONS["silu"].backward)
    for record in (gelu, other, gelu):
        rebuild._launch_of(record, torch.bfloat16, device)
    rebuild._launch_of(gelu, torch.float16, device)
    assert asked == [gelu, other, gelu]


@pytest.mark.parametrize("wrong", [None, "dz", "h"])
def test_the_proof_finds_a_single_bit(wrong, monkeypatch):
    """Torch's own ops stand in for the kernel; then one value, with one gradient, comes out wrong by one bit."""
    gelu = ACTIVATIONS["gelu"]

    def run(launch, stream, g, z):
        at = ((z == 1.5) & (g == 1.0078125)).short()  # the smallest bfloat16 above 1
        h = gelu.forward(z, 0.0, None)
        gelu.backward(g, z, 0.0, g)
        z.copy_(h)
        if wrong is not None:
            (g if wrong == "dz" else z).view(torch.int16).bitwise_xor_(at)

    monkeypatch.setattr(rebuild, "_run", run)
    monkeypatch.setattr(rebuild, "raw_stream", lambda device: 0)
    monkeypatch.setattr(rebuild, "compile_kernel", lambda *_: run)
    assert rebuild._prove(gelu, torch.bfloat16, torch.device("cpu")) is (run if wrong is None else None)


def test_no_kernel_where_torch_cannot_make_or_start_one(monkeypatch):
    def refuse(*_):
        raise TypeError("another signature")

    monkeypatch.setattr(rebuild, "raw_stream", lambda device: 0)
    for made in (None, refuse):
        monkeypatch.setattr(rebuild, "compile_kernel", lambda *_, made=made: made)
        assert rebuild._prove(ACTIVATIONS["silu"], torch.bfloat16, torch.device("cpu")) is None


def chain_step(depth: int, activation: str, width: int = 64, rows: int = 1024, **options):
    """A step of a chain of maps of one size, the bytes of one, and those of all weights."""
    tensors = [torch.randn(rows, width, **options)]
    for _ in range(depth):
        tensors += [torch.randn(width, width, **options) / width**0.5, torch.randn(width, **options)]
    needs, grad = (False, *(True for _ in tensors[1:])), torch.randn_like(tensors[0])

    def step():
        run = Chain([ACTIVATIONS[activation]] * (depth - 1) + [None], needs)
        run.forward(tensors)
        backward(run, grad, tensors, spent=True)

    return step, tensors[0].nbytes, sum(t.nbytes for t in tensors[1:])


@pytest.mark.parametrize("depth", [3, 10])
@pytest.mark.parametrize("activation", ["relu", "gelu", "tanh", "elu"])
def test_peak_and_allocations(activation, depth):
    """The maps, the gradients of the weights, and no more than two maps beside them; none of them new after warm-up."""
    step, map_bytes, weight_bytes = chain_step(depth, activation)
    stored = depth - 1
    if ACTIVATIONS[activation].keeps == "input" and map_bytes < chain.REBUILD_MIN_BYTES:
        stored *= 2
    step()
    release_scratch()
    assert measure(step, timed_runs=0).peak_bytes <= (stored + 2) * map_bytes + weight_bytes
    step()
    timeline = measure(step, timed_runs=0).timeline
    assert sum(event.bytes >= map_bytes for event in timeline) == stored + 1  # the maps and the output


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_the_kernel_for_one_pass_has_torchs_bits(activation, dtype):
    record, z = ACTIVATIONS[activation], torch.randn(777, 33, device="cuda", dtype=dtype) * 3
    g = torch.randn_like(z)
    one_pass = rebuild_and_backward(record, z)  # compares every value of z; None if a bit differs
    assert one_pass is not None
    dz, h = g.clone(), z.clone()
    one_pass(dz, h)
    assert same_bits(h, record.forward(z, record.parameter, None))
    assert same_bits(dz, record.backward(g, z, record.parameter, torch.empty_like(g)))
    for shift in (1, 8):  # elements: not aligned, and aligned with a rest
        dz, h = (torch.cat([t.new_zeros(shift), t.flatten()])[shift:] for t in (g, z))
        one_pass(dz, h)
        assert same_bits(h.view_as(z), record.forward(z, record.parameter, None))
        assert same_bits(dz.view_as(g), record.backward(g, z, record.parameter, torch.empty_like(g)))
    one_pass(g[:0], z[:0])  # nothing to do is not an error
    assert rebuild_and_backward(record, z.float()) is None


@pytest.mark.gpu
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize(
    "names", [("gelu",) * 7 + (None,), ("silu", "relu", "gelu_tanh", "swiglu", "gelu", None), MIXED]
)
def test_on_a_gpu(names, ours):
    tensors = [t.cuda().bfloat16() for t in layers(names, width=64, rows=256)]
    for needs in itertools.islice(wanted_gradients(len(tensors)), 8):
        y, g, expected = expect(names, tensors, needs, None)
        check(Chain(records(names), needs), tensors, needs, y, g.clone(), expected, ours=ours, spent=True)


@pytest.mark.gpu
@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize(("activation", "maps"), [("relu", 0), ("gelu", 6)])
def test_peak_on_a_gpu(activation, maps, one_pass, monkeypatch):
    """No more than plain's for relu; below it for gelu by the maps that are rebuilt, but for the one in hand."""
    monkeypatch.setattr(chain, "REBUILD_MIN_BYTES", 0)
    if not one_pass:
        monkeypatch.setattr(chain, "rebuild_and_backward", lambda record, z: None)
    mlp = MLP([512] * 9, activation, device="cuda", dtype=torch.bfloat16)
    plain_mlp = torch.nn.Sequential(
        *(
            m if isinstance(m, torch.nn.Linear) else {"relu": torch.nn.ReLU, "gelu": torch.nn.GELU}[activation]()
            for m in mlp
        )
    )
    x, g = (torch.randn(8192, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    peaks = [peak_bytes(model, x, g) for model in (mlp, plain_mlp)]
    assert peaks[0] <= peaks[1] - (maps - 0.1) * x.nbytes  # small tensors differ


def peak_bytes(model, x, g):
    for _ in range(3):
        model.zero_grad()
        model(x).backward(g)
    model.zero_grad()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model(x).backward(g)
    return torch.cuda.max_memory_allocated() - before
