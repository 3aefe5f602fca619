"""One case of a rule: a small function as users write it, run plain and lean."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from leangrad.ledger import Ledger
from leangrad.ledger.values.saved_view import SavedView
from leangrad.ledger.values.value import Value
from tests.support import same_bits

FLOATS = (torch.float32, torch.float64, torch.bfloat16)
WIDE = (torch.float32, torch.float64)  # for ops that have no bfloat16, and for complex numbers
SHAPE = (2, 4, 6, 8)


class Tensors:
    """What a function needs besides its input: the same numbers for the plain run and for the lean one."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.dtype, self.device = dtype, device
        self.leaves: list[Tensor] = []
        self.held: list[Tensor] = []
        self._generator = torch.Generator().manual_seed(1)

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Numbers that need no gradient, and that nothing but the caller holds."""
        numbers = torch.randn(shape, generator=self._generator, dtype=torch.float64)
        return numbers.to(self.device, dtype or self.dtype)

    def const(self, *shape: int) -> Tensor:
        """Numbers that need no gradient and live until after backward."""
        return self.hold(self.random(*shape))

    def hold(self, tensor: Tensor) -> Tensor:
        """Let `tensor` live until after backward."""
        self.held.append(tensor)
        return tensor

    def leaf(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A parameter."""
        self.leaves.append(self.random(*shape, dtype=dtype).requires_grad_())
        return self.leaves[-1]

    def mask(self, *shape: int) -> Tensor:
        """True and false, half each."""
        return self.random(*shape, dtype=torch.float64).to(self.device) > 0

    def index(self, high: int, *shape: int) -> Tensor:
        """Whole numbers below `high`, with repetitions."""
        return torch.randint(high, shape, generator=self._generator).to(self.device)

    def order(self, n: int) -> Tensor:
        """The numbers below `n` in another order."""
        return torch.randperm(n, generator=self._generator).to(self.device)


@dataclass(frozen=True)
class Case:
    """`function(h, tensors)` makes tensors that are rebuilt by the rule of `node`; `h` is the output of a product."""

    node: str
    name: str
    function: Callable[[Tensor, Tensors], Any]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    shape: tuple[int, ...] = SHAPE
    gpu: bool = False
    autocast: bool = False
    products: int = 0  # that a recipe may run through in a row

    def parameters(self) -> Iterator[Any]:
        """One test for each dtype."""
        for dtype in self.dtypes:
            name = f"{self.node.replace('Backward', '')}-{self.name}-{str(dtype).removeprefix('torch.')}"
            yield pytest.param(self, dtype, id=name, marks=[pytest.mark.gpu] if self.gpu else [])


@dataclass
class Result:
    """What one step gave."""

    outputs: list[Tensor]
    gradients: list[Tensor | None]
    random_state: Tensor
    saved: list[Any] = field(default_factory=list)  # what the ledger made of the tensors that the functions returned


def step(case: Case, dtype: torch.dtype, *, lean: bool) -> Result:
    """One forward and backward pass.

    What the function returns is saved twice: negated, and itself, so that its rule stands in the middle of a recipe and
    at the head of one. Both are saved because they are multiplied by something that needs a gradient.
    """
    torch.manual_seed(0)
    device = "cuda" if case.gpu else "cpu"
    tensors = Tensors(dtype, device)
    with (
        torch.autocast(device, torch.bfloat16, enabled=case.autocast),
        Ledger(residual_depth="auto", min_bytes=0, products=case.products) if lean else _Plain(),
    ):
        h = _product(case, tensors)
        anchored = h * tensors.leaf(*h.shape)
        made = case.function(h, tensors)
        outputs, saved = [anchored], []
        for y in made if isinstance(made, tuple | list) else (made,):
            for one in (y.neg(), y):
                # Broadcasting would make autograd sum, and products of bfloat16 with float32 would cast.
                product = one * tensors.leaf(*one.shape, dtype=one.dtype)
                saved.append(product.grad_fn._raw_saved_self)  # type: ignore[union-attr]
                outputs.append(product)
        del h, made, y, one
        if lean:
            saved = [raw.data for raw in saved]
    torch.autograd.backward(outputs, [tensors.random(*o.shape, dtype=o.dtype) for o in outputs])
    state = torch.cuda.get_rng_state() if case.gpu else torch.get_rng_state()
    return Result([o.detach() for o in outputs], [leaf.grad for leaf in tensors.leaves], state, saved)


def _product(case: Case, tensors: Tensors) -> Tensor:
    """The anchor. Products of bfloat16 are slow on a CPU, so they are of float32 and rounded."""
    rows, columns = case.shape[0], torch.Size(case.shape[1:]).numel()
    dtype = torch.float32 if tensors.dtype == torch.bfloat16 else tensors.dtype
    with torch.autocast(tensors.device, enabled=False):
        h = (tensors.leaf(rows, 5, dtype=dtype) @ tensors.leaf(5, columns, dtype=dtype)).view(case.shape)
        return h.to(tensors.dtype)


def table(rows: dict[str, Callable[[Tensor, Tensors], Any]], **settings: Any) -> list[Case]:
    """Cases from `{"Clamp1 how": function}`: the node is `ClampBackward1`, the rest of the key says what is special."""
    cases = []
    for key, function in rows.items():
        node, _, name = key.partition(" ")
        cases.append(Case(f"{node[:-1]}Backward{node[-1]}", name.replace(" ", "-"), function, **settings))
    return cases


class _Plain:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        return None


def nodes_of(value: Any) -> set[str]:
    """The ops that a recipe replays, down to what is kept."""
    if type(value) is not Value or value.tensor is not None:
        return set()
    found = {value.op}
    for a in (*value.args, *value.kwargs.values()):
        for v in a if type(a) is tuple else (a,):
            found |= nodes_of(v)
    return found


def check(case: Case, dtype: torch.dtype) -> None:
    """Gradients and random state are plain's, and what the function made is rebuilt by the rule."""
    try:
        plain = step(case, dtype, lean=False)
    except RuntimeError as error:
        if "derivative for" not in str(error) or "is not implemented" not in str(error):
            raise
        pytest.skip(str(error))  # a younger torch has one
    lean = step(case, dtype, lean=True)
    for a, b in zip(plain.outputs + plain.gradients, lean.outputs + lean.gradients, strict=True):
        assert same_bits(a, b, nans="bits")
    assert same_bits(plain.random_state, lean.random_state)
    for n, value in enumerate(lean.saved):
        if type(value) is SavedView:  # a view needs no rule; what it is a view of is another case, or made by this rule
            assert value.owner.tensor is None or value.owner.op != case.node, f"the base of tensor {n} is kept"
            continue
        assert type(value) is Value, f"tensor {n} is {value}"
        assert value.tensor is None, f"tensor {n} is kept as {value.op}"
        assert case.node in nodes_of(value), f"tensor {n} is rebuilt by {nodes_of(value)}"
