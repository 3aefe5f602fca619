"""Fused chains against plain PyTorch; run by test_fused.py on a GPU, and as a script under `TRITON_INTERPRET=1`.

The interpreter computes what IEEE 754 defines to the last bit, so these programs must have plain's bits and be used;
with tanh, erf and exp a CPU's own library differs, so such programs must be found out and left alone. The larger of 0
and −0 is not defined either: an ARM's vectors give 0, x86's the operand that stands second, a scalar tail what its
compiler made of it; ATen and NumPy differ in that. So no program here gives −0 to a relu. A GPU gives 0 on both sides,
and test_fused_bits.py tries every input there.
"""

import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import leangrad
from leangrad.kernels.pointwise import BLOCK, OPS, Input, Program, Step, compiled, source
from leangrad.ledger.fuse import fused
from leangrad.ledger.fuse.builder import RefusedError, find_terms
from leangrad.ledger.fuse.chain import MAX_STREAMS
from leangrad.ledger.fuse.fused_plan import PROOFS, Plan
from leangrad.ledger.origins.rules import RULES
from leangrad.ledger.values.rebuild.rebuilt_cache import memos
from leangrad.ledger.values.value import Value
from tests.support import same_bits

f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
STEPS = 3 + PROOFS
DEVICE = "cpu"
NEGATED = (Step("neg", (0,), f32),)
PROGRAMS: dict[str, Callable[[Any], list[Tensor]]] = {}


# ---- programs by hand ------------------------------------------------------------------------------------------------


def check_layouts() -> None:
    """Operands of every layout are found: dense, permuted, broadcast, sliced, expanded."""
    full = torch.empty(4, 6, 5, 8)
    outputs = [full, full.to(memory_format=torch.channels_last), full.permute(2, 0, 3, 1), full[:, :, :1]]
    for out in outputs:
        shape = out.shape
        dense = torch.empty(shape).as_strided(shape, _dense_strides(out))
        operands = [
            torch.randn(shape),
            torch.randn(shape).to(memory_format=torch.channels_last),
            torch.randn(shape[-1]),
            torch.randn(shape[1], 1, 1),
            torch.randn(shape[0], 1, shape[2], 1),
            torch.randn(*shape[2:]),
            torch.randn(()),
            torch.randn(1, 1, 1, 1),
            torch.randn(shape[0], shape[1], shape[2], 2 * shape[3])[..., ::2],
            torch.randn(shape[1], shape[0], shape[2], shape[3]).transpose(0, 1),
        ]
        for x in operands:
            terms = find_terms(x.shape, x.stride(), shape, dense.stride())
            result = torch.empty_strided(shape, dense.stride())
            program = Program((Input(f32, terms),), 0, NEGATED, (0,))
            compiled(program).launch([x], [], [result], result.numel())
            assert same_bits(result, -x.expand(shape)), (shape, dense.stride(), x.shape, x.stride(), terms)


def check_rows() -> None:
    """Statistics of rows, where a block lies within one row: read once a block, for pieces too."""
    out = torch.empty(6, 2 * BLOCK)
    for x in (torch.randn(6, 1), torch.randn(6, 3)[:, 1:2], torch.randn(()), torch.randn(2 * BLOCK)):
        program = Program((Input(f32, find_terms(x.shape, x.stride(), out.shape, out.stride())),), 0, NEGATED, (0,))
        assert ("tl.full" in source(program, False)) == (x.dim() != 1)
        for start in (0, 3 * BLOCK):
            n = out.numel() - start
            mine = torch.empty(n)
            compiled(program).launch([x], [], [mine], n, start)
            assert same_bits(mine, -x.expand(out.shape).reshape(-1)[start:])


def _dense_strides(x: Tensor) -> tuple[int, ...]:
    return torch.empty_like(x, memory_format=torch.preserve_format).stride()


def check_terms() -> None:
    assert find_terms(torch.Size((4, 6)), (6, 1), torch.Size((4, 6)), (6, 1)) is None
    assert find_terms(torch.Size(()), (), torch.Size((4, 6)), (6, 1)) == ()
    channels = find_terms(torch.Size((6, 1)), (1, 1), torch.Size((2, 6, 3)), (18, 1, 6))
    assert channels == ((1, 6, 1),)
    rotary = find_terms(torch.Size((3, 8)), (8, 1), torch.Size((2, 5, 3, 8)), (120, 24, 8, 1))
    assert rotary == ((1, 24, 1),)
    try:
        find_terms(torch.Size((4,)), (1,), torch.Size((2, 4)), (8, 1))
    except RefusedError:
        pass
    else:
        raise AssertionError("an output with holes was taken for dense")


def check_rounding() -> None:
    """Each step rounds to its dtype; several outputs; pieces that start in the middle."""
    x, y = torch.randn(3000), torch.randn(3000).to(bf16)
    steps = (Step("mul", (0, 2), bf16), Step("add", (3, 1), bf16), Step("div", (4, 0), f32), Step("cast", (5,), f16))
    kernel = compiled(Program((Input(f32), Input(bf16)), 1, steps, (1, 3)))
    a = (x * 0.3).to(bf16)
    b = a + y
    c = (b.float() / x).to(f16)
    for start, n in ((0, 3000), (1024, 1500), (2999, 1)):
        mine = torch.empty(n, dtype=bf16), torch.empty(n, dtype=f16)
        kernel.launch([x, y], [0.3], list(mine), n, start)
        assert same_bits(mine[0], b[start : start + n])
        assert same_bits(mine[1], c[start : start + n])
    assert source(kernel.program, True).count("int64") == 1


# ---- programs from recipes -------------------------------------------------------------------------------------------


def program(f: Callable[[Any], list[Tensor]]) -> Callable[[Any], list[Tensor]]:
    PROGRAMS[f.__name__] = f
    return f


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = f32) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw).to(DEVICE, dtype).requires_grad_()


def backward(y: Tensor, *leaves: Tensor) -> list[Tensor]:
    draw = torch.Generator().manual_seed(7)
    return list(torch.autograd.grad(y, leaves, torch.randn(y.shape, generator=draw).to(y)))


def source_of(x: Tensor) -> Tensor:
    """What a product gives: kept, and never computed twice."""
    return F.linear(x, torch.eye(x.shape[-1], dtype=x.dtype, device=DEVICE) * 1.5)


def summed(x: Tensor) -> Tensor:
    """A product that keeps ``x``."""
    return F.linear(x, torch.ones(4, x.shape[-1], dtype=x.dtype, device=DEVICE))


@program
def chain(region: Any) -> list[Tensor]:
    x, w = leaf(8, 64), leaf(64, seed=1)
    with region:
        h = source_of(x)
        y = F.relu(h * 0.3 + w) - h * w
        z = summed(F.leaky_relu(-y * y, 0.2))
    return backward(z, x, w)


@program
def several_outputs(region: Any) -> list[Tensor]:
    """Inner values that readers are still to come for are outputs too."""
    x = leaf(8, 64)
    with region:
        h = source_of(x)
        a = h * 2.5 + 1
        b = a.pow(3) - a
        z = summed(b * a)
    return backward(z, x)


@program
def halves(region: Any) -> list[Tensor]:
    """Mixed dtypes promote as ATen promotes, and a tensor without dimensions has no say."""
    x, s = leaf(8, 64, dtype=bf16), leaf(seed=3).detach()
    with region:
        h = source_of(x)
        y = (h.float() * 1.7 + h) * s
        y = y.to(bf16) - h
        z = summed(y * y * h)
    return backward(z, x)


@program
def broadcast(region: Any) -> list[Tensor]:
    """Per-channel vectors over planes and channels_last, and a table over the last two dimensions."""
    grads = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        x, w, t = leaf(2, 16, 4, 5), leaf(16, 1, 1, seed=1), leaf(4, 5, seed=2)
        with region:
            h = F.conv2d(x.contiguous(memory_format=memory_format), torch.eye(16, device=DEVICE)[:, :, None, None])
            y = F.relu(h * w + t, inplace=True)
            z = F.conv2d(y * y, torch.ones(1, 16, 1, 1, device=DEVICE))
        grads += backward(z, x, w, t)
    return grads


@program
def a_value_of_two_recipes(region: Any) -> list[Tensor]:
    x = leaf(8, 64)
    with region:
        h = source_of(x)
        total = h
        for _ in range(4):
            total = F.relu(total + h) + torch.softmax(total, -1)
        z = summed(total * total)
    return backward(z, x)


@program
def views(region: Any) -> list[Tensor]:
    """A view that keeps the order of elements in memory is no work, above and below operands that are broadcast."""
    x, w = leaf(2, 4, 64), leaf(64, seed=1)
    with region:
        h = source_of(x)
        y = h * w + 1.5
        z = summed(F.relu(y.view(8, 64) * w - 1) * 2)
        t = summed(F.relu((h * w - 0.5).transpose(0, 1) * w.view(1, 1, 64) + 1))
        u = summed(F.leaky_relu((h * 3).permute(1, 0, 2) - w, 0.2) * h.transpose(0, 1))
    return backward(z.view(4, 2, 4) + t + u, x, w)


@program
def copies(region: Any) -> list[Tensor]:
    """Rows in another order, under other ops whose operands are then found in that order too."""
    x, w = leaf(2, 4, 64), leaf(64, seed=1)
    with region:
        h = source_of(x)
        rows = h.transpose(0, 1).contiguous()
        z = summed(rows * rows.detach().sign())
        t = summed(F.relu(((h * w).transpose(0, 1) - 0.5).contiguous() * w + h.transpose(0, 1)))
    return backward(z + t, x, w)


@program
def reordered(region: Any) -> list[Tensor]:
    """An inner value that will be asked for is an output too, in the order in which it was saved."""
    x, w = leaf(2, 4, 64), leaf(64, seed=1)
    with region:
        h = source_of(x) * w + 1.5
        z = summed((h * h - w).transpose(0, 1).contiguous() * w)
    return backward(z, x, w)


@program
def reordered_beside_an_owned_leaf(region: Any) -> list[Tensor]:
    """Such an output is not written over a leaf of its layout: other blocks have yet to read that, in their order."""
    x, w = leaf(8, 8, 64), leaf(64, seed=1)
    with region:
        s = source_of(x)
        h = s * w + 1.5
        z = summed(((h * h - w).transpose(0, 1).contiguous() + torch.sin(s)) * w)
    return backward(z, x, w)


@program
def changing_scalars(region: Any) -> list[Tensor]:
    """A Python number that is another one in each step is an argument, not a part of the program."""
    x = leaf(8, 64)
    number = torch.rand(()).item()
    with region:
        h = source_of(x)
        z = summed((h * number + 1) * (h - number))
    return backward(z, x)


@program
def conditions(region: Any) -> list[Tensor]:
    x = leaf(8, 64)
    with region:
        h = source_of(x)
        y = torch.where(h.detach() > 0.3, h * 2, 1 - h)
        z = summed(F.hardtanh(y * y, 0.0, 6.0) * h)
    return backward(z, x)


def check_recipes(device: str) -> None:
    global DEVICE
    DEVICE = device
    for name, run in PROGRAMS.items():
        before = fused.report()
        plain = _steps(run, nullcontext)
        region = leangrad.saving(min_bytes=0)
        mine = _steps(run, lambda region=region: region)
        for step, (a, b) in enumerate(zip(mine, plain, strict=True)):
            for t, u in zip(a, b, strict=True):
                assert same_bits(t, u), (name, step)
        assert not _gathered(lambda run=run, region=region: _steps(run, lambda: region)), name
        after = fused.report()
        assert after["launches"] > before["launches"], (name, after)
        new = after["refused"][len(before["refused"]) :]
        assert not new, (name, new)


def _steps(run: Callable[[Any], list[Tensor]], region: Callable[[], Any]) -> list[list[Tensor]]:
    results = []
    for step in range(STEPS):
        torch.manual_seed(step)
        results.append(run(region()))
    return results


def check_scattered_copies() -> None:
    """A copy of elements that lie apart is left to ATen, and the chain above it ends there."""
    before = fused.report()
    x, region = leaf(4, 8, 8), leangrad.saving(min_bytes=0)
    for _ in range(STEPS):
        grads = []
        for where in (nullcontext(), region):
            with where:
                h = source_of(x)
                y = F.relu(h.transpose(1, 2).contiguous() * 2.5 + 1)
                z = summed(y * y) + summed(h * h)
            grads += backward(z, x)
        assert same_bits(*grads)
    after = fused.report()
    assert after["launches"] > before["launches"]
    assert after["refused"] == before["refused"]


def check_places() -> None:
    """What is saved in two orders is made by one launch."""
    region = leangrad.saving(min_bytes=0)
    for _ in range(STEPS):
        reordered(region)
    launched = [plan.kernel.program for plan in _launched(lambda: reordered(region))]
    assert [p.places for p in launched if p.places] == [(((1, 64, 1), (64, 2, 256), (128, 0, 64)), None)]
    assert len(launched) == 1


def _launched(call: Callable[[], Any]) -> list[Plan]:
    """What ran during a call."""
    launched: list[Plan] = []
    run = Plan.run

    def logged(self: Plan, *args: Any) -> list[Tensor]:
        launched.append(self)
        return run(self, *args)

    Plan.run = logged  # type: ignore[method-assign]
    try:
        assert not _gathered(call)
    finally:
        Plan.run = run  # type: ignore[method-assign]
    return launched


def _gathered(call: Callable[[], Any]) -> int:
    """How many chains had to be gathered during a call, because no pattern knew them."""
    count = 0
    gather = fused._gather

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return gather(*args)

    fused._gather = counted
    try:
        call()
    finally:
        fused._gather = gather
    return count


# ---- chains that are known again -------------------------------------------------------------------------------------


def kept(tensor: Tensor) -> Value:
    value = Value("kept")
    value.keep(tensor)
    return value


def made(node: str, *args: Any, like: Tensor | None = None, dtype: torch.dtype | None = None, **kwargs: Any) -> Value:
    """What the op of ``node`` makes; with ``like``, something that one saved tensor is, laid out so."""
    value = Value(node)
    value.set_recipe(RULES[node][0].function, args, kwargs)
    value.dtype = dtype
    if like is not None:
        value.layout, value.readers = (like.shape, like.stride()), 1
    return value


def branches(
    x: Tensor, y: Tensor, number: float = 2.5, power: float = 2.0, dtype: torch.dtype = bf16, **options: bool
) -> Value:
    """cast(relu(x·number + y)^power · (x·number − y)).

    ``twice``: the product is one value for both; ``alike``: x and y are one value; ``saved``: the power is saved too.
    """
    h = kept(x)
    other, twice = h if options.get("alike") else kept(y), options.get("twice")
    first = made("MulBackward0", h, torch.tensor(number, dtype=torch.float64))
    second = first if twice else made("MulBackward0", h, torch.tensor(number, dtype=torch.float64))
    total = made("ReluBackward0", made("AddBackward0", first, other, alpha=1))
    left = made("PowBackward0", total, power, like=x if options.get("saved") else None)
    right = made("SubBackward0", second, other, alpha=1)
    return made("ToCopyBackward0", made("MulBackward0", left, right), dtype, like=x)


def check_what_tells_chains_apart() -> None:
    """What differs from a chain that is known is another chain; numbers are arguments of the same one."""
    x, y = torch.randn(8, 64), torch.randn(8, 64)
    for _ in range(STEPS):
        branches(x, y)._rebuild({}, 0)
    across = torch.randn(64, 8).t()
    complexes = torch.randn(8, 64, dtype=torch.complex64)
    cases = {
        "the same": (0, branches(x, y)),
        "other tensors": (0, branches(torch.randn(8, 64), torch.randn(8, 64))),
        "another number": (0, branches(x, y, number=-0.3)),
        "another power": (1, branches(x, y, power=3.0)),
        "another dtype": (1, branches(x, y, dtype=f16)),
        "one value": (1, branches(x, y, twice=True)),
        "other strides": (1, branches(x, across)),
        "another shape": (1, branches(x, torch.randn(64))),
        "one tensor": (0, branches(x, x)),
        "one leaf": (1, branches(x, x, alike=True)),
        "an operand in bfloat16": (1, branches(x, y.to(bf16))),
        "a part of a complex tensor": (1, branches(x, complexes.imag)),
    }
    for name, (count, root) in cases.items():
        with fused.off():
            expected, _ = root._rebuild({}, 0)
        found: list[Tensor] = []
        assert _gathered(lambda root=root, found=found: found.append(root._rebuild({}, 0)[0])) == count, name
        assert same_bits(found[0], expected), name
    for _ in range(STEPS):
        branches(x, complexes.imag)._rebuild({}, 0)
    negated = branches(x, complexes.conj().imag)  # the memory and the strides of the last one
    with fused.off():
        expected, _ = negated._rebuild({}, 0)
    assert same_bits(negated._rebuild({}, 0)[0], expected)
    branches(x, y)._rebuild({}, 0)
    branches(x, y)._rebuild({}, 0)
    key = (root := branches(x, y)).function, root.layout
    assert fused._patterns[key][0].match(root, {}, 0) is not None  # what is met most often is tried first
    lone = made("ReluBackward0", made("ViewBackward0", kept(x), torch.Size((4, 128))), like=x.view(4, 128))
    assert _gathered(lambda: [lone._rebuild({}, 0) for _ in range(STEPS)]) == 0  # a view of what is kept is no work
    for _ in range(STEPS):
        branches(x, y, saved=True)._rebuild({}, 0)
    known = branches(x, y, saved=True)
    assert _gathered(lambda: known._rebuild({}, 0)) == 0
    known = branches(x, y, saved=True)
    known.inputs[0].inputs[0].memo = torch.zeros(8, 64)
    found = []
    assert _gathered(lambda: found.append(known._rebuild({}, 0)[0])) == 1
    assert not found[0].any()  # it is held already, and read


def check_held_bytes() -> None:
    """A launch leaves just what readers will still ask for, and each reader lets go of its own.

    The readers of the values below a saved tensor are the next nodes that backward runs, and a replay op by op would
    hold the same: no launch holds a tensor longer than that.
    """
    x = torch.randn(8, 64).to(bf16)
    held: list[int] = []
    for _ in range(STEPS):
        before = fused.report()["launches"]
        wide = made("ToCopyBackward0", kept(x), f32, like=x)
        square = made("MulBackward0", wide, wide, dtype=f32)  # no saved tensor: never written
        one = made("AddBackward0", square, 1.0, alpha=1, like=x, dtype=f32)
        half = made("MulBackward0", wide.inputs[0], torch.tensor(0.5, dtype=torch.float64), like=x)
        root = made("ToCopyBackward0", made("MulBackward0", half, one, dtype=f32), bf16, like=x)
        values = [wide, square, one, half, root]
        held = []
        for value in (root, half, one, wide):  # as backward asks
            value.read()
            held.append(sum(v.memo.nbytes for v in values if v.memo is not None))
    assert held == [n * x.numel() for n in (2 + 4 + 4, 4 + 4, 4, 0)]
    assert fused.report()["launches"] == before + 1


def check_leaves_are_let_go() -> None:
    """A product that two values of a chain read is held for neither after the launch; if others read it, for those."""
    x, w = torch.randn(8, 64), torch.randn(64, 64)
    for others in (0, 1):
        for _ in range(STEPS + 1):
            before = fused.report()["launches"]
            product = Value("product")
            product.set_recipe(torch.mm, (kept(x), kept(w)), {})
            product.products = 1
            beside = [made("NegBackward0", product) for _ in range(others)]
            root = made("MulBackward0", product, made("ReluBackward0", product), dtype=f32, like=x)
            read = root.read()
            assert (product.memo is not None) == bool(beside)
            for value in beside:
                value._rebuild({}, 0)
                assert product.memo is None
            expected = x @ w
            assert same_bits(read, expected * F.relu(expected))
        assert fused.report()["launches"] > before


def random_program(seed: int) -> Callable[[Any], list[Tensor]]:
    """Ops that IEEE 754 defines, at random over earlier results: chains that share values, saved and not."""

    def run(region: Any) -> list[Tensor]:
        draw = random.Random(seed)
        number = torch.rand(()).item() + 0.5
        x, w = leaf(8, 64), leaf(64, seed=1)
        ops: list[Callable[[Tensor, Tensor], Tensor]] = [
            lambda a, b: a + b,
            lambda a, b: a - b * number,
            lambda a, b: F.hardtanh(a * b, -4.0, 4.0),
            lambda a, b: F.relu(a + 0.0) * w,  # never of −0: see above
            lambda a, b: a.to(bf16) + b,
            lambda a, b: (a.to(bf16) * number).float(),
            lambda a, b: (a.view(4, 2, 64) + w).view(8, 64),
            lambda a, b: a.view(2, 4, 64).transpose(0, 1).reshape(8, 64) - b,
            lambda a, b: a * a.mean(-1, keepdim=True),
            lambda a, b: torch.where(b.detach() > 0, a, number - a),
            lambda a, b: source_of(a),
        ]
        with region:
            pool = [source_of(x) * w, source_of(-x)]
            for _ in range(draw.randint(4, 14)):
                pool.append(draw.choice(ops)(draw.choice(pool[-5:]).float(), draw.choice(pool[-5:])))
            z = summed(pool[-1].float() * pool[-2] + pool[0])
        return backward(z, x, w)

    return run


def check_random_chains() -> None:
    """Plain's bits, step after step, with other numbers each time."""
    before = fused.report()["launches"]
    for seed in range(RANDOM_PROGRAMS):
        run, region = random_program(seed), leangrad.saving(min_bytes=0)
        plain, mine = _steps(run, nullcontext), _steps(run, lambda region=region: region)
        for step, (a, b) in enumerate(zip(mine, plain, strict=True)):
            assert all(same_bits(t, u, nans="any") for t, u in zip(a, b, strict=True)), (seed, step)
    after = fused.report()
    assert after["launches"] > before + RANDOM_PROGRAMS
    assert not any("other bits" in why for why in after["refused"]), after["refused"]


RANDOM_PROGRAMS = 24
LINKS = 20


def stream(region: Any) -> list[Tensor]:
    """A residual stream whose links nobody saves; each is read by the next link and by a norm, written out."""
    x, w = leaf(8, 64, dtype=bf16), leaf(64, 64, seed=1, dtype=bf16)
    with region:
        total = source_of(x)
        for _ in range(LINKS):
            h = total.float()
            scale = (h.pow(2).mean(-1, keepdim=True) + 1).reciprocal()
            total = total + F.linear((h * scale).to(bf16), w)
        z = summed(total)
    return backward(z, x, w)


def check_links() -> None:
    """Every link of a stream is added up once, in launches of a dozen tensors, though its readers come one by one."""
    region = leangrad.saving(residual_depth=LINKS + 1, min_bytes=0)
    for _ in range(STEPS):
        stream(region)
    launched = [plan.kernel.program for plan in _launched(lambda: stream(region)) if plan.n == 8 * 64]
    added = sum(step.op == "add" for p in launched for step in p.steps)
    assert added == LINKS - 1  # no norm reads the last one
    assert max(len(p.inputs) + len(p.outputs) for p in launched) <= MAX_STREAMS + 3  # those of the last op
    assert all(same_bits(a, b) for a, b in zip(stream(region), stream(nullcontext()), strict=True))
    mine = _held(lambda: stream(region))
    with fused.off():
        plain = _held(lambda: stream(region))
    assert mine == plain
    below, wide, scale = 2 * 8 * 64 * (LINKS - 2), 4 * 8 * 64, 4 * 8
    assert max(mine) == below + wide + scale  # the links below the last norm's, and what its backward will read


def _held(call: Callable[[], Any]) -> list[int]:
    """The bytes of rebuilt tensors that are held, after each read of a backward pass."""
    held: list[int] = []
    read = Value.read

    def counted(self: Value) -> Tensor:
        tensor = read(self)
        values = {ref() for refs in memos.values() for ref in refs}
        held.append(sum(v.memo.nbytes for v in values if v is not None and v.memo is not None))
        return tensor

    Value.read = counted  # type: ignore[method-assign]
    try:
        call()
    finally:
        Value.read = read  # type: ignore[method-assign]
    assert not memos  # let go at the end of backward
    return held


def check_an_op_of_other_bits() -> None:
    """An op that is not exact here is found out by itself, and the rest of its chain is fused without it."""
    before = fused.report()
    train(nn.Sequential(nn.Linear(64, 64), nn.GELU("tanh"), nn.LeakyReLU(0.1), nn.ReLU(), nn.Linear(64, 8)))
    after = fused.report()
    assert after["inexact"] == ["GeluBackward0"], after
    assert after["launches"] > before["launches"], after
    assert "GeluBackward0" in fused.summarize()


def check_a_norm_of_other_bits() -> None:
    """A formula that differs in the last bit is found out, and the chain of that norm stays as it was."""
    before = fused.report()
    right, OPS["layer_norm"] = OPS["layer_norm"], "{3} * ({2} * ({0} - {1})) + {4}"
    train(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 8)))
    OPS["layer_norm"] = right
    after = fused.report()
    assert after["launches"] == before["launches"], after
    assert after["refused"] == [*before["refused"], "NativeLayerNormBackward0, ReluBackward0: other bits"], after


def train(net: nn.Module) -> None:
    """Some steps, each with plain's bits."""
    region = leangrad.saving(min_bytes=0)
    for _ in range(STEPS):
        x = torch.randn(8, 64)
        grads = []
        for where in (nullcontext(), region):
            with where:
                y = net(x)
            grads.append(backward(y, *net.parameters()))
        assert all(same_bits(a, b) for a, b in zip(*grads, strict=True))


if __name__ == "__main__":
    torch.set_num_threads(1)
    fused.MIN_BYTES = 0  # the interpreter is slow
    check_terms()
    check_layouts()
    check_rows()
    check_rounding()
    check_recipes("cpu")
    check_scattered_copies()
    check_places()
    check_what_tells_chains_apart()
    check_held_bytes()
    check_leaves_are_let_go()
    check_links()
    check_random_chains()
    check_an_op_of_other_bits()
    check_a_norm_of_other_bits()
    print("all chains agree", file=sys.stdout)
