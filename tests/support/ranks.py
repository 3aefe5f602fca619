"""Several processes over gloo, and the nets that they train."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

WORDS = 640  # with 32 units 80 KiB: a parameter that is too large to be copied

# What ranks import; an optimizer imports Dynamo.
PRELOADED = ["torch.distributed.checkpoint", "torch.distributed.fsdp", "torch._dynamo", "leangrad", "pytest"]


def run_ranks(work: Callable[..., None], world: int, folder: Path, *args: Any, copies: bool = False) -> None:
    """Call ``work(rank, *args)`` in ``world`` processes that know each other; ``copies``: as `start_ranks` does."""
    spawn: Any = start_ranks if copies else mp.spawn  # type: ignore[attr-defined]
    spawn(_run, (work, world, str(folder / f"store_{work.__name__}"), args), world)


def start_ranks(work: Callable[..., None], args: tuple[Any, ...], world: int) -> None:
    """Call ``work(rank, *args)`` in ``world`` processes that have torch imported already: 3 s less for each.

    They are copies of one process, and so they hash strings alike. Where ranks have to agree on what they choose, as in
    ``run_ranks``, each is a process of its own, lest they agree by that. CUDA does not survive a copy.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    method = "spawn" if torch.cuda.is_available() else "forkserver"
    start: Any = mp.start_processes  # type: ignore[attr-defined]
    start(work, args, nprocs=world, start_method=method)


def _run(rank: int, work: Callable[..., None], world: int, store: str, args: tuple[Any, ...]) -> None:
    with group(rank, world, store):
        work(rank, *args)


@contextmanager
def group(rank: int, world: int, store: str) -> Iterator[None]:
    """The process group of one rank."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


class Attention(nn.Module):
    """Causal, with heads of 8 units: as many as there are, where they are split among ranks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (part(x).view(b, t, -1, 8).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(b, t, -1))
        return out


class PreNorm(nn.Module):
    """A block of a transformer, its norms first, with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width)
        self.norm2, self.up, self.act = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU()
        self.down, self.drop = nn.Linear(4 * width, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        out: Tensor = x + self.drop(self.down(self.act(self.up(self.norm2(x)))))
        return out


class PostNorm(PreNorm):
    """Its norms last: what the next block saves is made by the norm of this one."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x))
        out: Tensor = self.norm2(x + self.down(self.act(self.up(x))))
        return out


class Scaled(PreNorm):
    """Each branch times a vector of its own: the residual stream of the next block is made from it."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scale1, self.scale2 = (nn.Parameter(torch.full((width,), 0.5)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x)) * self.scale1
        out: Tensor = x + self.down(F.silu(self.up(self.norm2(x)))) * self.scale2
        return out


class Transformer(nn.Module):
    """Tokens to logits; ``around`` is what calls a block: a checkpoint, say."""

    def __init__(self, block: type[PreNorm] = PreNorm, depth: int = 3, width: int = 32, length: int = 64) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(WORDS, width)
        self.position = nn.Parameter(torch.randn(length, width))
        self.blocks = nn.ModuleList(block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 40)
        self.around: Callable[[nn.Module, Tensor], Tensor] = lambda block, x: block(x)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = self.around(block, x)
        out: Tensor = self.head(self.norm(x)).clone()  # FSDP2 warns of a view
        return out


def local(tensor: Tensor) -> Tensor:
    """What this rank has of it."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def loss_of(model: nn.Module, seed: int, batch: tuple[int, int] = (4, 64), device: str = "cpu") -> Tensor:
    """The loss of a batch of tokens that is drawn with ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, WORDS, batch, generator=generator).to(device)
    torch.manual_seed(seed)  # of dropout
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten() % 40)
