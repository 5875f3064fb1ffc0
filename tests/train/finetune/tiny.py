"""A tiny tokenizer, tiny checkpoints and tiny data to fine-tune them on."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    NllbMoeConfig,
    NllbMoeForConditionalGeneration,
    PreTrainedTokenizerFast,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)

END, PAD = 256, 257
VOCAB = 260


def make_tokenizer(chat_template: str | None = None) -> Any:
    """One token for each byte, then <end> and <pad>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        chat_template=chat_template,
    )
    assert (fast.pad_token_id, fast.eos_token_id) == (PAD, END)
    return fast


def mixtral_config(**changes: Any) -> MixtralConfig:
    settings = {
        "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4,
        "num_experts_per_tok": 2, "max_position_embeddings": 256, "pad_token_id": PAD,
        "bos_token_id": None, "eos_token_id": END, "initializer_range": 0.2, **changes,
    }  # fmt: skip
    return MixtralConfig(**settings)


def save_mixtral(folder: Path, chat_template: str | None = None) -> Path:
    torch.manual_seed(5)
    MixtralForCausalLM(mixtral_config()).save_pretrained(folder)
    make_tokenizer(chat_template).save_pretrained(folder)
    return folder


def save_switch(folder: Path, layers: int = 2, sparse: int = 1, dropout: float = 0.0) -> Path:
    """Encoder and decoder have so many `layers`, `sparse` ones of them with experts."""
    torch.manual_seed(5)
    config = SwitchTransformersConfig(
        vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=24, num_layers=layers, num_decoder_layers=layers,
        num_heads=2, num_experts=4, num_sparse_encoder_layers=sparse,
        num_sparse_decoder_layers=sparse, expert_capacity=64, dropout_rate=dropout,
        router_jitter_noise=0.0, pad_token_id=PAD, eos_token_id=END, decoder_start_token_id=PAD,
    )  # fmt: skip
    SwitchTransformersForConditionalGeneration(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def save_nllb(folder: Path) -> Path:
    torch.manual_seed(5)
    config = NllbMoeConfig(
        vocab_size=VOCAB, d_model=16, encoder_ffn_dim=24, decoder_ffn_dim=24, encoder_layers=2,
        decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2, num_experts=4,
        encoder_sparse_step=1, decoder_sparse_step=1, dropout=0.0, attention_dropout=0.0,
        encoder_layerdrop=0.05, decoder_layerdrop=0.0, moe_token_dropout=0.2, pad_token_id=PAD,
        max_position_embeddings=256, bos_token_id=END, eos_token_id=END,
        decoder_start_token_id=END,
    )  # fmt: skip
    NllbMoeForConditionalGeneration(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def write_jsonl(path: Path, lines: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_pairs(path: Path, count: int = 40) -> Path:
    lines = [{"prompt": f"{n % 7} + 1 = ", "completion": str(n % 7 + 1)} for n in range(count)]
    return write_jsonl(path, lines)


def write_labels(path: Path, count: int = 60) -> Path:
    """The label says whether the sentence is of the letter a."""
    lines = [f"{'ab'[n % 2] * (3 + n % 4)}\t{n % 2}\n" for n in range(count)]
    path.write_text("sentence\tlabel\n" + "".join(lines))
    return path


def tiny_settings(checkpoint: Path, data: Path, out: Path, **changes: Any) -> dict[str, Any]:
    """Settings of a run that takes a moment."""
    return {
        "checkpoint": str(checkpoint), "data": [str(data)], "out": str(out), "batch": 4, "lr": 3e-3,
        "warmup": 0, "log_every": 2, "trace_steps": 0, "save_every": 3, "eval_every": 4,
        "device": "cpu", "slots": 3, **changes,
    }  # fmt: skip
