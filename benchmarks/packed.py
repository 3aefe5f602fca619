"""Packed gradients against plain ones: accumulation of four micro-batches, clipping, and an AdamW step.

    python -m benchmarks.packed                  # wide MLP and a small Llama, on the CPU
    python -m benchmarks.packed --device cuda    # the same MLP larger, and the Llama of 1B shape, in bfloat16

One process runs all forms of a case: their steps are timed in alternation, and a ratio to plain is the median over the
rounds of the ratios within a round. A phase is timed from an idle device to an idle device, so it includes all of the
host's time. Peaks include gradients, but not parameters and optimizer state. `temporary_bytes` are the bytes that
backward of a micro-batch other than the first allocates in blocks of the size of a weight matrix. Rows are written to
`benchmarks/results/packed_cpu.json` and `packed_h200.json`.
"""

import argparse
import copy
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.environment import environment, write_rows
from leangrad.measure import measure
from leangrad.packed import pack_gradients

MICRO_BATCHES = 4
ODD = 23  # rows of a small batch whose activations do not have the size of any weight matrix
CLIPS = 5  # how many times as often clip and step are timed

#: Returns the loss of a model on one micro-batch; with `odd`, on a batch of `ODD` rows.
Loss = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    name: str
    kind: str
    width: int
    layers: int
    rows: int
    length: int = 1
    dtype: str = "float32"
    vocabulary: int = 0


CASES = {
    "cpu": [
        Case("wide-mlp", "mlp", 1024, 6, 32),
        Case("llama-small", "llama", 256, 4, 2, 128, vocabulary=4096),
    ],
    "cuda": [
        Case("wide-mlp", "mlp", 8192, 8, 1024, dtype="bfloat16"),
        Case("llama-1b", "llama", 2048, 16, 4, 2048, "bfloat16", 128256),
    ],
}


def build(case: Case, device: str) -> tuple[nn.Module, Loss]:
    """Return the model of a case, and its loss function."""
    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    if case.kind == "mlp":
        layers: list[nn.Module] = []
        for _ in range(case.layers):
            layers += [nn.Linear(case.width, case.width), nn.GELU()]
        x = torch.randn(case.rows, case.width, device=device, dtype=dtype)

        def square(model: nn.Module, odd: bool = False) -> Tensor:
            y: Tensor = model(x[:ODD] if odd else x)
            return y.square().mean()

        return nn.Sequential(*layers).to(device, dtype), square
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=case.vocabulary,
        hidden_size=case.width,
        intermediate_size=4 * case.width,
        num_hidden_layers=case.layers,
        num_attention_heads=case.width // 64,
        num_key_value_heads=max(1, case.width // 256),
        tie_word_embeddings=True,
        use_cache=False,
    )
    with torch.device(device):
        model = LlamaForCausalLM(config).to(dtype)
    tokens = torch.randint(case.vocabulary, (case.rows, case.length + 1), device=device)

    def loss(model: nn.Module, odd: bool = False) -> Tensor:
        used = tokens[:1, : ODD + 1] if odd else tokens
        logits = model(used[:, :-1]).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), used[:, 1:].flatten())

    return model, loss


class Form:
    """Plain training: autograd's own gradients, clipped by torch's function; base class of the other forms."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self.model, self.loss = model, loss
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def accumulate(self) -> None:
        for _ in range(MICRO_BATCHES):
            self.loss(self.model).backward()

    def clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)

    def clip_and_step(self) -> None:
        self.clip()
        self.optimizer.step()

    def step(self) -> None:
        self.accumulate()
        self.clip_and_step()
        self.zero_grad()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


class Packed(Form):
    """Packed gradients."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__(model, loss)
        self.packed = pack_gradients(model)

    def clip(self) -> None:
        self.packed.clip_norm_(1.0)


class PackedFloat32(Form):
    """Packed gradients that are accumulated in float32, and cast to the parameters' dtype for the optimizer."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__(model, loss)
        self.packed = pack_gradients(model, torch.float32)

    def clip(self) -> None:
        self.packed.clip_norm_(1.0, cast=True)


class PlainFloat32(Form):
    """Accumulation in float32 without leangrad: a hook adds each gradient to a float32 sum and releases it."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__(model, loss)
        self.sums: dict[nn.Parameter, Tensor] = {}
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.add)

    def add(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        if parameter in self.sums:
            self.sums[parameter].add_(parameter.grad)
        else:
            self.sums[parameter] = parameter.grad.float()
        parameter.grad = None

    @torch.no_grad()
    def clip(self) -> None:
        sums = list(self.sums.values())
        factor = (1.0 / (torch.nn.utils.get_total_norm(sums, foreach=True) + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(sums, factor)
        del sums
        for parameter in list(self.sums):
            parameter.grad = self.sums.pop(parameter).to(parameter.dtype)

    def zero_grad(self) -> None:
        super().zero_grad()
        self.sums.clear()


#: The forms by their names in a row. Those in float32 are run only for parameters in a smaller dtype.
FORMS: dict[str, type[Form]] = {
    "plain": Form,
    "packed": Packed,
    "plain float32": PlainFloat32,
    "packed float32": PackedFloat32,
}


def seconds_of(call: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def time_in_turns(forms: dict[str, Form], device: str, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each phase of each form, one entry for each round; each round runs all forms.

    Clip and step take a fraction of the time and vary more, so they are timed five times as often, after small batches.
    """
    seconds: dict[str, dict[str, list[float]]] = {name: {"accumulate": [], "clip and step": []} for name in forms}
    for _ in range(repeats):
        for name, form in forms.items():
            seconds[name]["accumulate"].append(seconds_of(form.accumulate, device))
            form.clip_and_step()
            form.zero_grad()
    for _ in range(CLIPS * repeats):
        for name, form in forms.items():
            form.loss(form.model, True).backward()
            seconds[name]["clip and step"].append(seconds_of(form.clip_and_step, device))
            form.zero_grad()
    return seconds


def peak_of(step: Callable[[], object], device: str) -> int:
    """Return the peak of a step in bytes, above what was allocated before it."""
    if device != "cuda":
        return measure(step, timed_runs=0).peak_bytes
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - before


def temporaries(form: Form) -> int:
    """Return the bytes that backward of a second micro-batch allocates in blocks of exactly a weight matrix's size.

    The batch has `ODD` rows, so that no activation is as large as a matrix of the model.
    """
    sizes = {p.numel() * p.element_size() for p in form.model.parameters() if p.dim() == 2}
    form.loss(form.model, True).backward()
    found = measure(lambda: form.loss(form.model, True).backward(), timed_runs=0)
    form.zero_grad()
    return sum(event.bytes for event in found.timeline if event.phase == "backward" and event.bytes in sizes)


def run(case: Case, device: str, repeats: int) -> dict[str, Any]:
    """Return the row of one case: every form's peak, temporaries and seconds, and its ratios to plain."""
    model, loss = build(case, device)
    kinds = FORMS if case.dtype != "float32" else {name: FORMS[name] for name in ("plain", "packed")}
    forms = {name: kind(copy.deepcopy(model), loss) for name, kind in kinds.items()}
    del model
    for form in forms.values():  # allocate the optimizer's state, and all else that the first steps allocate for good
        form.step()
        form.step()
    seconds = time_in_turns(forms, device, repeats)
    rows: dict[str, Any] = {}
    for name, form in forms.items():
        gc.collect()
        entry: dict[str, Any] = {"peak_bytes": peak_of(form.step, device), "temporary_bytes": temporaries(form)}
        for phase, values in seconds[name].items():
            entry[phase] = {
                "seconds": statistics.median(values),
                "ratio": statistics.median(a / b for a, b in zip(values, seconds["plain"][phase], strict=True)),
            }
        rows[name] = entry
    return {"case": asdict(case), "micro_batches": MICRO_BATCHES, "repeats": repeats, "forms": rows}


def table(row: dict[str, Any], device: str) -> str:
    """Return the row as a text table."""
    where = environment(device)
    lines = [f"{row['case']['name']} on {where['hardware']}, {MICRO_BATCHES} micro-batches, torch {where['torch']}"]
    lines.append(
        f"{'':<16}{'peak MB':>10}{'temporary MB':>14}{'accumulate ms':>15}{'ratio':>8}{'clip+step ms':>14}{'ratio':>8}"
    )
    for name, entry in row["forms"].items():
        line = f"{name:<16}{entry['peak_bytes'] / 1e6:>10.1f}{entry['temporary_bytes'] / 1e6:>14.1f}"
        for phase, width in (("accumulate", 15), ("clip and step", 14)):
            line += f"{entry[phase]['seconds'] * 1e3:>{width}.2f}{entry[phase]['ratio']:>8.3f}"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=sorted(CASES))
    parser.add_argument("--case", help="one case of that name only; nothing is written then")
    parser.add_argument("--repeats", type=int, default=12)
    options = parser.parse_args()
    rows = []
    for case in CASES[options.device]:
        if options.case in (None, case.name):
            rows.append(run(case, options.device, options.repeats))
            print(table(rows[-1], options.device), flush=True)
    if options.case is None:
        write_rows("packed_h200" if options.device == "cuda" else "packed_cpu", options.device, rows)


if __name__ == "__main__":
    main()
