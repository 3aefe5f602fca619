"""Random programs under torch.compile: our cut gives the bits of torch's own, and leangrad.exact those of eager."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._inductor.compile_fx import compile_fx

from leangrad._torch import compiler
from leangrad.compiled import compile_lean
from leangrad.compiled.joint_graph import op_name, read_joint_graph
from leangrad.compiled.partitioner import Settings
from leangrad.policy.choice import NEAR
from leangrad.policy.graph import Graph
from leangrad.policy.ops import is_discrete, is_source
from leangrad.policy.peak import play
from tests.support.bits import difference
from tests.support.compiled_fuzz_steps import ALL, AOT_DIFFERS, CHANGING, CHECKPOINTED, DRAWING, EDITS, Modules
from tests.support.fuzz import examples
from tests.support.partitions import Interpreter, Partition, Partitions, saved

pytestmark = pytest.mark.fuzz

Step = tuple[str, int, int, float]
Result = list[Tensor | None] | Exception
SCALARS = (0.5, 1.5, -0.7, 2.0, 1.0)
SLOWDOWNS = (1.0, 1.1, 10.0)
EXACT = {"leangrad.exact": True}


@dataclass(frozen=True)
class Program:
    """What to run, and how."""

    steps: tuple[Step, ...]
    seed: int
    autocast: bool
    dynamic: bool
    graded: tuple[int, ...]  # which of the outputs get a gradient
    slowdown: float
    turns: int

    @property
    def changes_buffers(self) -> bool:
        return any(name in CHANGING for name, *_ in self.steps)

    @property
    def draws_alone(self) -> bool:
        """Whether an op draws that Inductor does not make from a seed; torch's own cut then keeps what was drawn."""
        return any(name == "rrelu" for name, *_ in self.steps)

    @property
    def is_checkpointed(self) -> bool:
        return any(name in CHECKPOINTED for name, *_ in self.steps)


def random_program(seed: int) -> Program:
    choose = random.Random(seed)
    names = sorted(ALL)
    steps = [
        (choose.choice(names), choose.randrange(16), choose.randrange(16), choose.choice(SCALARS))
        for _ in range(choose.randint(3, 12))
    ]
    if choose.random() < 0.2:
        edit = (choose.choice(sorted(EDITS)), choose.randrange(16), 0, choose.choice(SCALARS))
        steps.insert(choose.randrange(len(steps)), edit)
    return Program(
        steps=tuple(steps),
        seed=seed,
        autocast=choose.random() < 0.2,
        dynamic=choose.random() < 0.2,
        graded=tuple(sorted(choose.sample(range(4), choose.randint(1, 4)))),
        slowdown=choose.choice(SLOWDOWNS),
        turns=2 if choose.random() < 0.3 else 1,
    )


def forward(program: Program, run: Modules) -> Callable[[Tensor], list[Tensor]]:
    """The program as a function of its input. It gives the last tensors, aliases and all, and one without gradient.

    All that was drawn is read by the latter: AOTAutograd leaves out a draw that nothing reads, and the next one then
    gives other numbers than in eager (`test_a_draw_that_nothing_reads`).
    """
    steps = tuple(((ALL.get(name) or EDITS[name]), name in DRAWING, i, j, c) for name, i, j, c in program.steps)

    def play(x: Tensor) -> list[Tensor]:
        run.pool = [x * 1.0, run.p + run.b]
        drawn: list[Tensor] = []
        for make, draws, i, j, c in steps:
            made = make(run, run.pick(i), run.pick(j), c)
            if made is not None:
                run.pool.append(made)
                drawn += [made] if draws else []
        told = run.pool[-1].detach().sum(-1)
        for made in drawn:
            told = told + made.detach().mean()
        outputs = [*run.pool[-3:], told, run.pool[0].view(-1)]
        run.pool = []
        return outputs

    return play


def result(program: Program, backend: Any, **options: Any) -> Result:
    """The outputs, gradients and buffers of all turns, or the error."""
    torch._dynamo.reset()
    run = Modules(program.seed)
    play = forward(program, run)
    if backend is not None:
        play = torch.compile(play, backend=backend, dynamic=program.dynamic or None, **options)
    found: list[Tensor | None] = []
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(program.seed)).requires_grad_()
    try:
        for turn in range(program.turns):
            torch.manual_seed(program.seed + turn)
            with torch.autocast("cpu", torch.bfloat16, enabled=program.autocast):
                outputs = play(x)
            found += [t.detach().clone() for t in outputs]
            able = [t for t in outputs if t.requires_grad]
            graded = [able[n % len(able)] for n in program.graded] if able else []  # AOTAutograd gives one object twice
            draw = torch.Generator().manual_seed(program.seed)
            seeds = [torch.randn(t.shape, generator=draw).to(t.dtype) for t in graded]
            torch.autograd.backward(graded, seeds)
            found += [None if t.grad is None else t.grad.clone() for t in (x, *run.leaves)]
            found += [t.clone() for t in run.buffers()]
    except Exception as error:
        return error
    return found


@dataclass
class Fuzzed(Partitions):
    """Partitions that remember the graph of the policy, to play torch's own cut through as well."""

    steps: list[tuple[Graph, list[fx.Node]]] = field(default_factory=list)

    def _keep(self, graph: fx.Graph, info: Any) -> list[fx.Node]:
        self.steps.append(read_joint_graph(graph, info, fused=not self.settings.exact))
        return super()._keep(graph, info)

    def peaks(self, n: int) -> tuple[int, int]:
        """The simulated peaks of partition ``n``, ours and stock's."""
        (graph, nodes), part = self.steps[n], self.found[n]
        number = {node.name: k for k, node in enumerate(nodes)}
        ours, stock = (
            frozenset(number[node.name] for node in saved(half, part.outputs) if node.name in number)
            for half in (part.forward, part.stock_forward)
        )
        return play(graph, ours).peak_bytes, play(graph, stock).peak_bytes


def compare(mine: Result, other: Result) -> list[str]:
    assert isinstance(mine, list)
    assert isinstance(other, list)
    words = (difference(a, b, nans="any") for a, b in zip(mine, other, strict=True))
    return [f"tensor {n}: {told}" for n, told in enumerate(words) if told]


def is_aots_own(program: Program, mine: Tensor | None, plain: Tensor | None, stock: Tensor | None) -> bool:
    """Whether a difference from eager is AOTAutograd's own, with any partition.

    It gives zeros for a gradient that eager leaves out, and adds up in another order where views were changed in place;
    for the rest see `AOT_DIFFERS`.
    """
    if mine is not None and plain is None and not mine.any():
        return True  # not by every partition: beside a checkpoint, torch's minimum cut gives zeros and aot_eager none
    if mine is None or difference(mine, stock, nans="any"):
        return False
    expected = torch.zeros_like(mine) if plain is None else plain
    is_near = torch.allclose(mine, expected, rtol=1e-3, atol=1e-5, equal_nan=True)
    return is_near or any(name in AOT_DIFFERS for name, *_ in program.steps)


def decision_bytes(part: Partition) -> int:
    """What forward keeps because a decision must not be taken twice."""
    kept = [node for node in saved(part.forward, part.outputs) if node.op == "call_function"]
    return sum(compiler.size_of(node) for node in kept if is_discrete(op_name(node)) or not is_float(node))


def is_float(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, Tensor) and value.is_floating_point()


def stock_backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Inductor's graphs with torch's own cut, run op by op."""

    def run_op_by_op(graph: fx.GraphModule, _: Any, **kwargs: Any) -> Callable[[list[Any]], Any]:
        def run(arguments: list[Any]) -> Any:
            with torch.no_grad():
                return Interpreter(graph).run(*arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return compile_fx(gm, list(inputs), inner_compile=run_op_by_op, config_patches={"fx_graph_cache": False})


def check_cut(program: Program) -> Counter[str]:
    """Our cut beside torch's own, on the graphs that Inductor would be given."""
    seen: Counter[str] = Counter()
    fuzzed = Fuzzed(Settings(slowdown=program.slowdown))
    mine = result(program, fuzzed.backend, fullgraph=True)
    if isinstance(mine, Exception):
        if not isinstance(result(program, stock_backend, fullgraph=True), Exception):
            raise AssertionError("torch's own partition gives gradients, ours raises") from mine
        seen["cut refused"] += 1
        return seen
    for n, part in enumerate(fuzzed.found):
        if not program.changes_buffers:  # else torch's own backward reads the new buffer: see `check_exact`
            assert part.differences == [], part.differences
        seen["cuts"] += 1
        seen["cut comparisons"] += part.compared
        twice = part.run_twice()
        if not program.is_checkpointed:
            heavy = [name for name in part.heavy_twice() if name != "unfold"]
            assert heavy == [], heavy
            drawn = [
                name for name in twice if is_source(name) and name not in ("inductor_random", "inductor_lookup_seed")
            ]
            assert drawn == [], drawn
        ours, stock = fuzzed.peaks(n)
        if program.slowdown > 2 and not (program.changes_buffers or program.is_checkpointed or program.draws_alone):
            told = decision_bytes(part)
            kept = part.kept_bytes <= part.stock_kept_bytes + told
            assert kept or ours <= NEAR * (stock + told), (part.kept_bytes, part.stock_kept_bytes, ours, stock, told)
        seen["smaller"] += part.kept_bytes < part.stock_kept_bytes
    return seen


def check_exact(program: Program) -> Counter[str]:
    """leangrad.exact beside eager, wherever Dynamo's own eager backend has its bits."""
    seen: Counter[str] = Counter()
    plain = result(program, None)
    dynamo = result(program, "eager")
    if isinstance(plain, Exception) or isinstance(dynamo, Exception) or compare(dynamo, plain):
        seen["exact skipped"] += 1
        return seen
    mine = result(program, compile_lean, options=EXACT)
    if isinstance(mine, Exception):
        stock = result(program, "aot_eager")
        if not isinstance(stock, Exception):
            raise AssertionError("torch's own partition gives gradients, ours raises") from mine
        seen["exact refused"] += 1
        return seen
    words = compare(mine, plain)
    if words and isinstance(stock := result(program, "aot_eager"), Exception):
        seen["aot differs"] += any(name in AOT_DIFFERS for name, *_ in program.steps)
        words = [] if seen["aot differs"] else words
    elif words:
        own = [is_aots_own(program, *three) for three in zip(mine, plain, stock, strict=True)]
        words = [told for told in words if not own[int(told.split()[1][:-1])]]
        seen["aot differs"] += 1
    assert words == [], words
    seen["exact"] += 1
    seen["exact comparisons"] += len(plain)
    return seen


def check(program: Program) -> Counter[str]:
    return check_cut(program) + check_exact(program)


@pytest.mark.parametrize("part", range(4))
@pytest.mark.sampled(2)
def test_random_programs(part: int) -> None:
    """Nothing differs, and not for want of programs that train."""
    seen: Counter[str] = Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Dynamo's and of programs that nobody would write
        for n in range(examples(3, 250)):
            seed = 4 * n + part
            try:
                seen += check(random_program(seed))
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, {random_program(seed)}: {error}") from error
    assert seen["cuts"] >= 1, seen
    assert seen["exact"] >= 1, seen


def outcome(function: Callable[[Tensor], Tensor], x: Tensor, backend: Any, **options: Any) -> Result:
    """What a function and its backward give, or the error."""
    torch._dynamo.reset()
    torch.manual_seed(3)
    x = x.clone().requires_grad_()
    try:
        made = (torch.compile(function, backend=backend, **options) if backend else function)(x)
        made.sum().backward()
    except Exception as error:
        return error
    return [made.detach(), x.grad]


def last_line(error: Result) -> str:
    assert isinstance(error, Exception), "torch's own partition raises, ours gives gradients"
    return str(error).splitlines()[1 if "raised:" in str(error).splitlines()[0] else 0]


def test_random_permutations() -> None:
    """Exact has eager's. Inductor of torch 2.13 cannot compile rows that are taken by one, with torch's own cut too."""

    def shuffle(x: Tensor) -> Tensor:
        return x[torch.randperm(6)].sin() * x[torch.randperm(6)]

    x = torch.arange(12.0).view(6, 2)
    assert compare(outcome(shuffle, x, compile_lean, options=EXACT), outcome(shuffle, x, None)) == []
    stock = outcome(shuffle, x, stock_backend)
    mine = outcome(shuffle, x, Partitions().backend)
    if isinstance(stock, Exception):
        assert "Not all inputs to pattern found" in last_line(stock)
        assert last_line(mine) == last_line(stock)
    else:
        assert compare(mine, stock) == []


def test_a_draw_that_nothing_reads() -> None:
    """AOTAutograd leaves it out, with torch's own cut too: what is drawn after it has the numbers of the first draw."""

    def lose(x: Tensor) -> Tensor:
        torch.rand(6)
        return x * torch.rand(6)

    x = torch.ones(6)
    exact = outcome(lose, x, compile_lean, options=EXACT)
    assert compare(exact, outcome(lose, x, "aot_eager")) == []
    assert compare(exact, outcome(lambda x: x * torch.rand(6), x, None)) == []
    assert compare(exact, outcome(lose, x, None))


def test_strides_that_torch_takes_for_others() -> None:
    """Rrelu's backward gives other strides than AOTAutograd was told: torch's own aot_eager raises, as exact does."""

    def rotate(x: Tensor) -> Tensor:
        return F.rrelu((x * 2).reshape(2, 3, 4).permute(2, 0, 1), training=True)

    x = torch.randn(4, 6)
    stock = outcome(rotate, x, "aot_eager")
    mine = outcome(rotate, x, compile_lean, options=EXACT)
    if isinstance(stock, Exception):
        assert "view size is not compatible" in last_line(stock)
        assert last_line(mine) == last_line(stock)
    else:
        assert compare(mine, stock) == []
