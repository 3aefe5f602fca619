"""The models on which the ways are compared: real ones on a GPU, small ones of the same kinds on a CPU.

On a GPU: the four of `benchmarks.models`, a BERT of BERT-large's shape, a diffusion U-Net of diffusers, a Mamba on long
sequences, and ten models of timm. On a CPU: models of `tests/zoo` and of `leangrad demo`, with conv nets instead of
timm's models; a step takes a fraction of a second. Each worker process calls `make`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leangrad.bench.builtin import WithLoss
from leangrad.demo import gpt, swiglu
from leangrad.frontier.fit.rows import with_rows
from tests.zoo import case as zoo

# The substitutes of the models on a CPU. ZOO: a model of the zoo, and the rows of its batch. DEMO: a model of the demo.
ZOO = {
    "resnet50": ("resnet", 4),
    "vit_l": ("vit", 4),
    "bert_large": ("bert", 2),
    "unet": ("unet", 2),
    "mamba": ("mamba", 2),
    "convnext": ("convnext", 2),
    "mobilenet": ("depthwise", 4),
    "resnet_inplace": ("resnet_inplace", 4),
}
DEMO = {"gpt2_medium": gpt, "llama_1b": swiglu}
SHAPES = {"batch": 4, "length": 64, "layers": 3, "width": 64}
WORDS = {"gpt2_medium": 512, "llama_1b": 2048}
MAMBA_LENGTH = 64

TABLE = ("resnet50", "vit_l", "gpt2_medium", "llama_1b")
SMALL = (*TABLE, *(name for name in ZOO if name not in TABLE))
TIMM = (
    "convnext_tiny", "densenet121", "efficientnet_b0", "hrnet_w18", "mixer_b16_224", "mobilenetv3_large_100",
    "nf_resnet50", "regnety_016", "swin_tiny_patch4_window7_224", "vit_base_patch16_224",
)  # fmt: skip
FULL = (*TABLE, "bert_large", "unet", "mamba", *(f"timm:{name}" for name in TIMM))
UNROLLED = ("mamba",)  # not compiled: without its own kernels it loops over positions, which compile would unroll
PLAIN_DTYPE = ("llama_1b",)  # its parameters are in bfloat16; all others run under autocast


def make(name: str, device: str = "cpu", **shape: int) -> tuple[Any, ...]:
    """Return the model and a batch of one case, and for a model of the zoo its loss; `shape` overrides `SHAPES`."""
    return _full(name) if device == "cuda" else _small(name, **shape)


def _small(name: str, **shape: int) -> tuple[Any, ...]:
    if name in DEMO:
        sizes = {**SHAPES, **shape}
        batch, length = sizes.pop("batch"), sizes.pop("length")
        if name == "llama_1b":
            sizes["hidden"] = 3 * sizes["width"]
        case = DEMO[name](batch, length, vocabulary=WORDS[name], **sizes)
        return WithLoss(case.make_model()), case.make_batch(torch.Generator().manual_seed(0))
    kind, rows = ZOO[name]
    found = zoo(kind)
    tokens = found.batch() if name != "mamba" else (torch.randint(512, (rows, MAMBA_LENGTH)),)
    return found.make(), with_rows(tokens, rows), found.loss


# ------------------------------------------------------------------------------------------------------------- on a GPU


class Classifier(nn.Module):
    """A classifier that returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the cross entropy of a batch."""
        logits = self.model(images)
        return F.cross_entropy(logits[0] if isinstance(logits, tuple) else logits, labels)


class LanguageModel(nn.Module):
    """A transformers model that computes its own loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """Return the loss of a batch, as the model itself defines it."""
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss


class Denoiser(nn.Module):
    """A U-Net that predicts the noise in an image, and returns the mean squared error."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, noisy: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """Return the error of a batch."""
        return F.mse_loss(self.model(noisy, time).sample, noise)


def _full(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    with torch.device("cuda"):
        if name in TABLE:
            return _of_the_table(name)
        if name.startswith("timm:"):
            return _of_timm(name.removeprefix("timm:"))
        return {"bert_large": _bert_large, "unet": _unet, "mamba": _mamba}[name]()


def _of_the_table(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    from benchmarks import models

    case = next(one for one in models.CASES if one.name == name)
    model = case.make().train()
    if name == "gpt2_medium":
        model.loss_type = "ForCausalLM"  # type: ignore[assignment]  # else a warning of it breaks the compiled graph
    wrap = LanguageModel if name in ("gpt2_medium", "llama_1b") else Classifier
    return wrap(model), case.batch(case.size)


def _of_timm(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    import timm

    model: nn.Module = timm.create_model(name).to(memory_format=torch.channels_last).train()
    size: Any = model.default_cfg["input_size"]  # type: ignore[index]
    images = torch.randn(128, *size).to(memory_format=torch.channels_last)
    return Classifier(model), (images, torch.arange(128))


def _bert_large() -> tuple[nn.Module, tuple[Tensor, ...]]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    return LanguageModel(BertForMaskedLM(config).train()), (torch.randint(5, 30000, (32, 512)),)


def _unet() -> tuple[nn.Module, tuple[Tensor, ...]]:
    from diffusers import UNet2DModel

    model: Any = UNet2DModel(sample_size=64, block_out_channels=(128, 256, 512, 512), layers_per_block=2)
    noisy, noise = torch.randn(16, 3, 64, 64), torch.randn(16, 3, 64, 64)
    return Denoiser(model).train(), (noisy, noise, torch.randint(0, 1000, (16,)))


def _mamba() -> tuple[nn.Module, tuple[Tensor, ...]]:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(hidden_size=768, num_hidden_layers=2, vocab_size=32000, use_cache=False)
    return LanguageModel(MambaForCausalLM(config).train()), (torch.randint(5, 32000, (4, 512)),)
