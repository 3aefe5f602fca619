"""Ten models of `transformers`, from configs, with random weights: nothing is downloaded.

`transformers` is imported when the first of them is made, never with the zoo: it takes seconds.
"""

# A module's call returns Any.
# mypy: disable-error-code="no-any-return"

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .case import Case, cross_entropy, images

VOCABULARY = 512
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


class Named(nn.Module):
    """A model of `transformers` that takes tensors in a fixed order and returns one field of its output."""

    def __init__(self, model: nn.Module, inputs: tuple[str, ...], field: str, **options: Any) -> None:
        super().__init__()
        self.model = model.train()
        self.inputs, self.field, self.options = inputs, field, options

    def forward(self, *tensors: Tensor) -> Tensor:
        output = self.model(**dict(zip(self.inputs, tensors, strict=True)), **self.options)
        return getattr(output, self.field)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=128,
        n_embd=128,
        n_layer=3,
        n_head=4,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="sdpa",
    )
    return Named(GPT2LMHeadModel(config), ("input_ids", "labels"), "loss", use_cache=False)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=128,
        attn_implementation="sdpa",
        **SPECIAL,
    )
    return Named(LlamaForCausalLM(config), ("input_ids", "labels"), "loss", use_cache=False)


def bert() -> nn.Module:
    """Attention "eager": the scores, their softmax and its dropout are all there to be kept."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=128,
        pad_token_id=0,
        attn_implementation="eager",
    )
    return Named(BertForMaskedLM(config), ("input_ids", "attention_mask", "labels"), "loss")


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=128,
        d_kv=32,
        d_ff=384,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
        attn_implementation="sdpa",
    )
    return Named(T5ForConditionalGeneration(config), ("input_ids", "labels"), "loss", use_cache=False)


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=512,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        image_size=64,
        patch_size=8,
        num_labels=10,
        attn_implementation="sdpa",
    )
    return Named(ViTForImageClassification(config), ("pixel_values",), "logits")


def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[32, 64], depths=[2, 2], layer_type="bottleneck", num_labels=10
    )
    return Named(ResNetForImageClassification(config), ("pixel_values",), "logits")


def convnext() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(
        patch_size=2,
        num_stages=2,
        hidden_sizes=[32, 64],
        depths=[2, 2],
        drop_path_rate=0.1,
        image_size=48,
        num_labels=10,
    )
    return Named(ConvNextForImageClassification(config), ("pixel_values",), "logits")


def mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=128, state_size=16, num_hidden_layers=2, **SPECIAL)
    return Named(MambaForCausalLM(config), ("input_ids", "labels"), "loss", use_cache=False)


def whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=40,
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=384,
        decoder_ffn_dim=384,
        max_source_positions=128,
        max_target_positions=64,
        dropout=0.1,
        decoder_start_token_id=1,
        attn_implementation="sdpa",
        **SPECIAL,
    )
    return Named(WhisperForConditionalGeneration(config), ("input_features", "labels"), "loss", use_cache=False)


def clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    tower = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = CLIPConfig(
        text_config={"vocab_size": VOCABULARY, "max_position_embeddings": 64, **tower, **SPECIAL},
        vision_config={"image_size": 64, "patch_size": 8, **tower},
        projection_dim=64,
        attn_implementation="sdpa",
    )
    return Named(CLIPModel(config), ("input_ids", "pixel_values"), "loss", return_loss=True)


def words(rows: int, length: int) -> Tensor:
    """Ids that are none of the special ones."""
    return torch.randint(3, VOCABULARY, (rows, length))


def language(rows: int, length: int) -> Callable[[], tuple[Tensor, ...]]:
    """Ids, and the same ids as labels: the model shifts them itself."""

    def batch() -> tuple[Tensor, ...]:
        ids = words(rows, length)
        return ids, ids.clone()

    return batch


def masked_language() -> tuple[Tensor, Tensor, Tensor]:
    ids = words(4, 128)
    mask = torch.arange(128) < torch.randint(64, 129, (4, 1))
    labels = ids.masked_fill((torch.rand(ids.shape) > 0.15) | ~mask, -100)
    return ids * mask, mask.long(), labels


def translation() -> tuple[Tensor, Tensor]:
    return words(4, 96), words(4, 64)


def speech() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 40, 256), words(4, 48)


def captions() -> tuple[Tensor, Tensor]:
    ids = words(8, 48)
    ids[:, -1] = SPECIAL["eos_token_id"]
    return ids, torch.randn(8, 3, 64, 64)


def own_loss(loss: Tensor) -> Tensor:
    """The model has computed it: cross-entropy, or CLIP's contrast."""
    return loss


def tags(*names: str) -> frozenset[str]:
    return frozenset({"hf", *names})


CASES = (
    Case("hf_gpt2", gpt2, language(4, 128), own_loss, tags("attention", "dropout", "tied")),
    Case("hf_llama", llama, language(4, 128), own_loss, tags("attention")),
    Case("hf_bert", bert, masked_language, own_loss, tags("attention", "dropout", "tied")),
    Case("hf_t5", t5, translation, own_loss, tags("attention", "dropout", "tied")),
    Case("hf_vit", vit, images(8, 3, 64, 64), cross_entropy, tags("conv", "attention", "dropout")),
    Case("hf_resnet", resnet, images(4, 3, 128, 128), cross_entropy, tags("conv", "batchnorm")),
    Case("hf_convnext", convnext, images(4, 3, 48, 48), cross_entropy, tags("conv", "dropout")),
    Case("hf_mamba", mamba, language(4, 32), own_loss, tags("recurrent", "conv", "tied")),
    Case("hf_whisper", whisper, speech, own_loss, tags("attention", "conv", "dropout", "tied", "frozen")),
    Case("hf_clip", clip, captions, own_loss, tags("conv", "attention")),
)
