"""A character language model on a small text, out of `leangrad.nn.TransformerBlock`.

python examples/char_lm.py            # about a minute on two cores; prints a page that it made up
python examples/char_lm.py --small    # some seconds, as the tests run it
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from leangrad.nn import TransformerBlock

TEXT = Path(__file__).parent / "data" / "logbook.txt"


@dataclass(frozen=True)
class Size:
    """Of the model and of its training."""

    width: int = 128
    heads: int = 4
    blocks: int = 3
    length: int = 128
    batch: int = 12
    steps: int = 300


SMALL = Size(width=64, heads=2, blocks=1, length=64, batch=12, steps=60)


class CharacterModel(nn.Module):
    """Embed, a few causal blocks with rotary positions, and the logits of the next character."""

    def __init__(self, characters: int, size: Size):
        super().__init__()
        self.length = size.length
        self.embedding = nn.Embedding(characters, size.width)
        options = {"causal": True, "rotary": True, "norm": "rms", "activation": "swiglu", "bias": False}
        self.blocks = nn.Sequential(*(TransformerBlock(size.width, size.heads, **options) for _ in range(size.blocks)))
        self.norm = nn.RMSNorm(size.width)
        self.logits = nn.Linear(size.width, characters, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens of (B, T) to logits of (B, T, characters)."""
        return self.logits(self.norm(self.blocks(self.embedding(tokens))))

    @torch.no_grad()
    def write(self, start: Tensor, count: int) -> Tensor:
        """`count` more characters after `start`, each drawn from what the model expects."""
        tokens = start
        for _ in range(count):
            logits = self(tokens[None, -self.length :])[0, -1]
            tokens = torch.cat([tokens, torch.multinomial(F.softmax(logits / 0.8, -1), 1)])
        return tokens


def draw_batch(data: Tensor, size: Size) -> tuple[Tensor, Tensor]:
    """Pieces of the text, and the same one character on."""
    starts = torch.randint(len(data) - size.length - 1, (size.batch,)).tolist()
    rows = torch.stack([data[start : start + size.length + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


def train(model: CharacterModel, data: Tensor, size: Size) -> float:
    """AdamW with a warm-up and a linear end; the mean loss of the last tenth, in nats a character."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    warm_up = size.steps // 20 + 1
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, 1 - step / (size.steps + 1))
    )
    losses = []
    for _ in track(range(size.steps), "reading", console=Console(file=sys.stderr)):
        tokens, targets = draw_batch(data, size)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    last = losses[-max(1, size.steps // 10) :]
    return sum(last) / len(last)


def main() -> None:
    """Train, write a page, print the loss."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a run of some seconds")
    size = SMALL if parser.parse_args().small else Size()
    torch.manual_seed(0)
    text = TEXT.read_text()
    characters = sorted(set(text))
    data = torch.tensor([characters.index(c) for c in text])
    model = CharacterModel(len(characters), size)
    loss = train(model, data, size)
    page = model.eval().write(data[:12], 100 if size is SMALL else 600)
    print("".join(characters[i] for i in page.tolist()))
    print(f"loss {loss:.4f}")


if __name__ == "__main__":
    main()
