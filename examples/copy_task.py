"""Remember a few symbols over a long silence and say them again: a copy task for `leangrad.nn`'s state-space blocks.

python examples/copy_task.py            # about a minute on two cores
python examples/copy_task.py --small    # some seconds, as the tests run it

The model is trained on whole sequences, with a silence that grows. Then it is asked step by step, with nothing but its
states between the steps, over a silence twice as long as any it was trained on.
"""

import argparse
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from leangrad.nn import MambaBlock, RGLRUBlock

SYMBOLS = 8
SILENCE = SYMBOLS  # then come the questions, one for each place: which symbol was first, which second, ...


@dataclass(frozen=True)
class Size:
    """Of the task, of the model, and of its training."""

    remembered: int = 4
    length: int = 256
    width: int = 32
    batch: int = 16
    steps: int = 300


SMALL = Size(remembered=2, length=40, steps=100)


class Residual(nn.Module):
    """x + block(norm(x))."""

    def __init__(self, width: int, block: RGLRUBlock | MambaBlock):
        super().__init__()
        self.norm, self.block = nn.RMSNorm(width), block

    def forward(self, x: Tensor) -> Tensor:
        """A whole sequence."""
        return x + self.block(self.norm(x))

    def step(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The next part of a sequence."""
        y, state = self.block(self.norm(x), state)
        return x + y, state


class Copier(nn.Module):
    """Embed, one block of each kind, and the logits of the symbol to say."""

    def __init__(self, size: Size):
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS + 1 + size.remembered, size.width)
        blocks = (RGLRUBlock(size.width, 2 * size.width, rms=True), MambaBlock(size.width, states=8))
        self.blocks = nn.Sequential(*(Residual(size.width, block) for block in blocks))
        self.norm, self.logits = nn.RMSNorm(size.width), nn.Linear(size.width, SYMBOLS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens of (B, T) to logits of (B, T, SYMBOLS)."""
        return self.logits(self.norm(self.blocks(self.embedding(tokens))))

    @torch.no_grad()
    def listen(self, tokens: Tensor) -> Tensor:
        """The same, one step after another."""
        states = [layer.block.initial_state(len(tokens)) for layer in self.blocks]
        logits = []
        for token in tokens.split(1, 1):
            x = self.embedding(token)
            for i, layer in enumerate(self.blocks):
                x, states[i] = layer.step(x, states[i])
            logits.append(self.logits(self.norm(x)))
        return torch.cat(logits, 1)


def draw_batch(batch: int, remembered: int, length: int) -> tuple[Tensor, Tensor]:
    """Symbols, silence, then the questions; and the symbols."""
    symbols = torch.randint(SYMBOLS, (batch, remembered))
    silence = torch.full((batch, length - 2 * remembered), SILENCE)
    questions = torch.arange(SILENCE + 1, SILENCE + 1 + remembered).expand(batch, -1)
    return torch.cat([symbols, silence, questions], 1), symbols


def train(model: Copier, size: Size) -> float:
    """AdamW with a warm-up and a linear end; the mean loss of the last tenth, in nats a symbol."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 20, 1.0, 2 - 2 * step / size.steps)
    )
    losses = []
    shortest = 4 * size.remembered
    for step in track(range(size.steps), "listening", console=Console(file=sys.stderr)):
        grown = min(1.0, step / (0.7 * size.steps))
        tokens, symbols = draw_batch(size.batch, size.remembered, int(shortest + grown * (size.length - shortest)))
        answers = model(tokens)[:, -size.remembered :]
        loss = F.cross_entropy(answers.flatten(0, 1), symbols.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    last = losses[-max(1, size.steps // 10) :]
    return sum(last) / len(last)


def main() -> None:
    """Train, ask, print the loss."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a run of some seconds")
    size = SMALL if parser.parse_args().small else Size()
    torch.manual_seed(0)
    model = Copier(size)
    loss = train(model, size)
    for length in (size.length, 2 * size.length):
        tokens, symbols = draw_batch(50, size.remembered, length)
        said = model.listen(tokens)[:, -size.remembered :].argmax(-1)
        print(f"{(said == symbols).float().mean().item():.0%} right after {length} steps, one by one")
    print(f"loss {loss:.4f}")


if __name__ == "__main__":
    main()
