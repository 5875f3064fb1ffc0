"""Which models compute several requests in one pass."""

from typing import Any

from overspill.models.gpt import GPTMoE
from overspill.models.huggingface import recurrent, sparse
from overspill.models.huggingface.seq2seq import is_encoder_decoder

_LAYERS = {"full_attention", "sliding_attention"}
_ROPE = {"default", "linear", "llama3", "yarn", "proportional"}
"""Rotary embeddings that do not change with the length of the sequence."""
_OTHERWISE = frozenset({"phimoe"})
"""Model types whose attention is not told all: sliding windows are in its mask only."""


def can_page(model: Any) -> bool:
    """Whether attention to keys and values of earlier tokens, and states in known modules, are all
    that connects the tokens of a sequence, and can be replaced."""
    if isinstance(model, GPTMoE):
        return True
    if is_encoder_decoder(model.config):  # of those that are served at all
        return True
    config = model.config.get_text_config()
    if has_states(model) or is_sparse(model):
        return _rope_types(getattr(config, "rope_parameters", None)) <= _ROPE
    return (
        bool(getattr(model, "_supports_attention_backend", False))
        and config.model_type not in _OTHERWISE
        and set(getattr(config, "layer_types", None) or ()) <= _LAYERS
        and _rope_types(getattr(config, "rope_parameters", None)) <= _ROPE
    )


def has_states(model: Any) -> bool:
    """Whether a model keeps a state of each sequence beside keys and values, in known modules."""
    if isinstance(model, GPTMoE):
        return False
    config = model.config.get_text_config()
    # with a window, MiniMax computes otherwise with its own cache than without
    window = config.model_type == "minimax" and config.sliding_window is not None
    return config.model_type in recurrent.TYPES and not window


def is_sparse(model: Any) -> bool:
    """Whether an indexer chooses the tokens that a token sees, in known modules."""
    if isinstance(model, GPTMoE):
        return False
    return model.config.get_text_config().model_type in sparse.TYPES


def splits_prompts(model: Any) -> bool:
    """Whether a prompt may be computed in pieces. Jamba's modules begin a piece of several tokens
    with an empty state."""
    return can_page(model) and (isinstance(model, GPTMoE) or model.config.model_type != "jamba")


def _rope_types(parameters: Any) -> set[str]:
    if not isinstance(parameters, dict):
        return set()
    if "rope_type" in parameters:
        return {parameters["rope_type"]}
    return {name for each in parameters.values() for name in _rope_types(each)}
