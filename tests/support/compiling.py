"""A step of a case of the zoo, compiled; and the warnings of Dynamo's that its users cannot help."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo import Case

# Of a graph that begins with what another made, of a Function that Dynamo calls, of a cache that it looks into.
DYNAMOS_OWN = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be instantiated"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]


@contextmanager
def no_caches() -> Iterator[None]:
    """Nothing comes out of torch's caches on disk: what another run has compiled is chosen anew."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config

    with functorch_config.patch(enable_autograd_cache=False), config.patch(fx_graph_cache=False):
        yield


class Block(nn.Module):
    """A residual block with a norm, two products and an activation."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def prepared(case: Case, backend: Any, **options: Any) -> tuple[nn.Module, Callable[..., Tensor], tuple[Any, ...]]:
    """The model of a case, its step with the loss, compiled unless `backend` is None, and a batch."""
    torch.manual_seed(0)
    model, batch = case.make(), case.batch()

    def step(*batch: Any) -> Tensor:
        return case.step(model, batch)

    return model, step if backend is None else torch.compile(step, backend=backend, **options), batch


def skip_where_dynamo_is_wrong(case: Case) -> None:
    """Torch 2.11 loses gradients of some users' Functions with any backend: `benchmarks.compiled.custom_function`."""
    if "custom" not in case.tags:
        return
    gradients = []
    for backend in (None, "eager"):
        model, step, batch = prepared(case, backend)
        step(*batch).backward()
        gradients.append([p.grad for p in model.parameters()])
    torch._dynamo.reset()
    if not all(torch.allclose(p, q, rtol=1e-3, atol=1e-6) for p, q in zip(*gradients, strict=True)):
        pytest.skip("Dynamo's own eager backend gives this model other gradients than plain PyTorch")


def is_near(ours: list[Tensor | None], plain: list[Tensor | None]) -> bool:
    """Float32, rounded in another order by the decompositions of Inductor. A wrong term would be 1e-2 or more."""
    if [p is None for p in ours] != [q is None for q in plain]:
        return False
    pairs = [(p.double(), q.double()) for p, q in zip(ours, plain, strict=True) if p is not None and q is not None]
    wrong = sum(float((p - q).square().sum()) for p, q in pairs)
    return wrong <= 1e-6 * sum(float(q.square().sum()) for _, q in pairs)
