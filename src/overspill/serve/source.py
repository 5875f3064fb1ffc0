"""Loading of the served model: from a checkpoint, a run, or a model that is loaded already."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from overspill.core.errors import BudgetError, ConfigError
from overspill.core.sizes import format_size, parse_size, round_up
from overspill.hardware.machine import available_memory
from overspill.models.budgets import Budgets
from overspill.models.gpt import GPTMoE
from overspill.models.huggingface.checks import find_folder, has_tokenizer, is_adapter
from overspill.models.huggingface.folder import read_config
from overspill.models.huggingface.load import load_within
from overspill.models.huggingface.lora_config import find_adapter, find_base, read_lora_config
from overspill.models.huggingface.recurrent import is_recurrent, state_bytes
from overspill.models.huggingface.seq2seq import (
    cache_elements,
    check_served,
    is_encoder_decoder,
)
from overspill.models.huggingface.skeleton import meta_model, model_class
from overspill.models.huggingface.sparse import index_width
from overspill.models.huggingface.tokenizer import open_tokenizer
from overspill.serve.options import LLMOptions
from overspill.serve.support import has_states
from overspill.serve.text import Codec, TransformersCodec
from overspill.train.run_folder import is_run
from overspill.train.trained import find_model, load_trained, read_trained

_SEGMENT = 2 << 20
_CACHE_SHARE = 0.25
"""Share of the GPU's budget, or of free host memory, that keys and values get at most."""


@dataclass(frozen=True)
class CacheRequest:
    """Sequences for whose keys, values and states memory is needed."""

    context: int
    max_batch: int
    block_size: int
    with_source: bool = False
    """Whether sequences have a source of as many tokens."""
    state_bytes: int = 0
    """Bytes of the state of a sequence, beside keys and values."""

    def blocks(self, token_bytes: int, memory: int) -> int:
        """Return the number of blocks for `max_batch` requests of `context` tokens, or less if only
        these fit into `memory`."""
        each = -(-self.context // self.block_size) * (2 if self.with_source else 1)
        fit = memory // (token_bytes * self.block_size)
        if fit < each:
            need = format_size(each * self.block_size * token_bytes, up=True)
            source = " and those of a source of as many" if self.with_source else ""
            raise BudgetError(
                f"the keys and values of {self.context} tokens{source} need {need}, a quarter of "
                f"the memory is {format_size(memory)}; lower context= (--context), or give more "
                "memory"
            )
        return min(self.max_batch * each, fit)

    def bytes(self, n_blocks: int, token_bytes: int) -> int:
        """Return the bytes of `n_blocks` blocks and all states, with a spare block and a spare
        state, as the allocator of a GPU rounds them."""
        states = round_up((self.max_batch + 1) * self.state_bytes, _SEGMENT)
        return round_up((n_blocks + 1) * self.block_size * token_bytes, _SEGMENT) + states


@dataclass(frozen=True)
class Source:
    """Model for inference, with its tokenizer and its limits."""

    model: Any
    codec: Codec | None
    ends: frozenset[int]
    context: int
    """Number of tokens of the longest sequence."""
    n_blocks: int
    owned: bool
    """Whether the model was loaded here."""
    adapter: Path | None = None
    """Folder of the LoRA adapter in its weights, or beside those of experts."""

    @property
    def has_encoder(self) -> bool:
        return not isinstance(self.model, GPTMoE) and is_encoder_decoder(self.model.config)


def open_source(model: Any, budgets: Budgets, options: LLMOptions, block_size: int) -> Source:
    """Load the model of a path or a repository, or prepare a given model, for inference."""
    asked = CacheRequest(options.context, options.max_batch, block_size)
    adapter, dtype = options.adapter, options.dtype
    if not isinstance(model, str | os.PathLike):
        return _given(model, asked)
    path = find_model(Path(model).expanduser())
    if is_run(path):
        if adapter is not None:
            raise ConfigError(
                f"adapter={os.fspath(adapter)!r} is for checkpoints of Hugging Face, {path} is a "
                "run of overspill train; overspill export makes a checkpoint of it"
            )
        if options.packed:
            raise ConfigError(
                f"packed=True (--packed) is for quantized checkpoints, {path} is a run of "
                "overspill train; leave it out"
            )
        trained = read_trained(path)
        if dtype not in (None, "auto", trained.dtype, str(trained.dtype).removeprefix("torch.")):
            raise ConfigError(
                f"dtype={dtype} is for checkpoints of Hugging Face; {path} was trained in "
                f"{trained.dtype} and is served in it; leave it out, or use overspill export"
            )
        asked = _within(asked, trained.shape.max_seq)
        token_bytes = 2 * trained.shape.n_layers * trained.shape.d_model * trained.dtype.itemsize
        budgets, n_blocks = _reserve(budgets, asked, token_bytes)
        run_model = load_trained(trained, budgets, options.quantize)
        _use_all(run_model, budgets, asked.bytes(n_blocks, token_bytes))
        ends = trained.codec.ends
        return Source(run_model, trained.codec, ends, asked.context, n_blocks, owned=True)
    folder = find_folder(path if path.exists() else model)
    lora = None if adapter is None else find_adapter(adapter)
    if is_adapter(folder):
        if lora is not None:
            raise ConfigError(
                f"{folder} and {lora} are both LoRA adapters; make a checkpoint of the first one "
                "with overspill merge"
            )
        lora, folder = folder, find_base(read_lora_config(folder))
    config = read_config(folder)
    asked = _asked_of(config, folder, asked)
    _check_generates(model_class(config))
    meta = meta_model(config)
    token_bytes = _token_bytes(meta, dtype)
    if has_states(meta):
        asked = replace(asked, state_bytes=state_bytes(meta))
    budgets, n_blocks = _reserve(budgets, asked, token_bytes)
    # first: an error leaves no model behind
    codec = (None if lora is None else find_codec(lora)) or find_codec(folder)
    loaded = load_within(
        folder, budgets, dtype, train=False, adapter=lora, packed=options.packed,
        quantize=options.quantize, merged=False,
    )  # fmt: skip
    _use_all(loaded, budgets, asked.bytes(n_blocks, token_bytes))
    ends = _ends(loaded, codec)
    return Source(loaded, codec, ends, asked.context, n_blocks, owned=True, adapter=lora)


def _given(model: Any, asked: CacheRequest) -> Source:
    if not hasattr(model, "overspill"):
        raise ConfigError(
            f"{type(model).__name__} is not offloaded; give a path, or a model from "
            "overspill.load(..., train=False) or overspill.offload"
        )
    engine = model.overspill
    engine.lifetime.check()
    engine.check_whole("serving")
    if isinstance(model, GPTMoE):
        config = model.config
        token_bytes = 2 * config.n_layers * config.d_model * engine.dtype.itemsize
        asked, codec = _within(asked, config.max_seq), None
        ends: frozenset[int] = frozenset()
    else:
        asked = _asked_of(model.config, model.config.name_or_path, asked)
        _check_generates(type(model))
        token_bytes = _token_bytes(model, engine.dtype)
        folder = Path(model.config.name_or_path or "/nowhere")
        codec = find_codec(folder) if folder.exists() else None
        ends = _ends(model, codec)
    use = engine.memory.gpu_use()
    free = available_memory() if use is None else use["budget"]
    n_blocks = asked.blocks(token_bytes, int(_CACHE_SHARE * free))
    return Source(model, codec, ends, asked.context, n_blocks, owned=False)


def _reserve(budgets: Budgets, asked: CacheRequest, token_bytes: int) -> tuple[Budgets, int]:
    """Return the budgets without the memory of keys and values, and the number of blocks."""
    if budgets.compute_device.type != "cuda":
        return budgets, asked.blocks(token_bytes, int(_CACHE_SHARE * available_memory()))
    device = budgets.compute_device
    given = budgets.gpu_memory
    total = (
        torch.cuda.mem_get_info(device)[0] if given is None else parse_size(given, "--gpu-memory")
    )
    n_blocks = asked.blocks(token_bytes, int(_CACHE_SHARE * total))
    left = total - asked.bytes(n_blocks, token_bytes)
    return budgets.with_gpu_memory(left), n_blocks


def _use_all(model: Any, budgets: Budgets, cache_bytes: int) -> None:
    """Add the memory of keys and values, which the first pass allocates, to the budget again."""
    if budgets.compute_device.type == "cuda":
        assert isinstance(budgets.gpu_memory, int)
        model.overspill.memory.limit(budgets.gpu_memory + cache_bytes)


def _within(asked: CacheRequest, positions: int | None) -> CacheRequest:
    if positions is None or asked.context <= positions:
        return asked
    return replace(asked, context=positions)


def _asked_of(config: Any, where: object, asked: CacheRequest) -> CacheRequest:
    """Return the part of the request that fits a model of transformers."""
    if is_encoder_decoder(config):
        check_served(config, where)
        asked = replace(asked, with_source=True)
    return _within(asked, getattr(config.get_text_config(), "max_position_embeddings", None))


def _check_generates(kind: Any) -> None:
    if not kind.can_generate():
        raise ConfigError(f"{kind.__name__} does not generate text; give a language model")


def _token_bytes(model: Any, dtype: torch.dtype | str | None) -> int:
    """Return the bytes of the keys and values of one token in all layers."""
    text = model.config.get_text_config()
    kind = dtype if dtype not in (None, "auto") else getattr(text, "dtype", None)
    if isinstance(kind, str):
        kind = getattr(torch, kind, None)
    size = kind.itemsize if isinstance(kind, torch.dtype) else 4
    if is_encoder_decoder(model.config):
        return cache_elements(model) * size
    elements = sum(_key_elements(module) for module in model.get_decoder().modules())
    if has_states(model) or getattr(text, "kv_lora_rank", None):  # not all layers have such keys
        return elements * size
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    return int(size * max(text.num_hidden_layers * 2 * kv_heads * width, elements))


def _key_elements(module: Any) -> int:
    """Return the widths of the keys and values of an attention module together, or of the keys of
    an indexer; 0 for other modules, and for modules whose projections have other names."""
    if hasattr(module, "v_proj_delayed"):  # Zaya's keys, with halves of values
        return 2 * int(module.k_proj.out_features)
    if is_recurrent(module):
        return 0
    if index_width(module):
        return index_width(module)
    if hasattr(module, "kv_b_proj"):  # latent attention keeps all heads
        return int(module.num_heads * (module.qk_head_dim + module.v_head_dim))
    k, v = getattr(module, "k_proj", None), getattr(module, "v_proj", None)
    if isinstance(k, nn.Linear) and isinstance(v, nn.Linear):
        return k.out_features + v.out_features
    return 0


def find_codec(folder: Path) -> Codec | None:
    """Return the tokenizer in a checkpoint's folder; None if there is none."""
    if not has_tokenizer(folder):
        return None
    try:
        return TransformersCodec(open_tokenizer(folder))
    except Exception as error:  # transformers raises many types
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"the tokenizer in {folder} cannot be read ({reason})") from error


def _ends(model: Any, codec: Codec | None) -> frozenset[int]:
    """Return the tokens that end a text, as in `generate` of transformers: of the generation
    config, or else of the tokenizer."""
    found = getattr(model.generation_config, "eos_token_id", None)
    if found is None:
        return frozenset() if codec is None else codec.ends
    return frozenset(found if isinstance(found, list | tuple) else [found])
