"""Small models of `transformers` from configs, and rows of a text that is shipped, for tests with real trainers.

The libraries are imported when something here is called, never with this module.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

TEXT = Path(__file__).parent.parent.parent / "examples" / "data" / "logbook.txt"
LENGTH = 32
VOCABULARY = 128  # ASCII
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def rows(count: int = 48) -> list[dict[str, Tensor]]:
    """Pieces of the text, a token for each character, as a causal language model or a T5 takes them."""
    tokens = torch.tensor(list(TEXT.read_bytes()[: count * LENGTH]))
    return [{"input_ids": row, "labels": row} for row in tokens.view(count, LENGTH)]


def classified_rows(count: int = 48) -> list[dict[str, Tensor]]:
    """The same for a classifier: whether the piece has a full stop."""
    return [{**row, "labels": (row["input_ids"] == ord(".")).any().long()} for row in rows(count)]


def gpt2(vocabulary: int = VOCABULARY) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=vocabulary, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2, **SPECIAL)
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        **SPECIAL,
    )
    return LlamaForCausalLM(config)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    return BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, **sizes, pad_token_id=0))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    special = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, **sizes, **special))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "gpt2": (gpt2, rows),
    "llama": (llama, rows),
    "bert": (bert, classified_rows),
    "t5": (t5, rows),
}


def character_tokenizer() -> Any:
    """A token for each character of ASCII, made here."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {0: "<pad>", 1: "<s>", 2: "</s>"}
    words = {special.get(n, chr(n)): n for n in range(128)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=chr(3)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": chr(3)}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
