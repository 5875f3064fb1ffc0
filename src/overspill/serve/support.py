"""Which models compute several requests in one pass."""

from typing import Any

from overspill.models.gpt import GPTMoE
from overspill.models.huggingface.seq2seq import is_encoder_decoder

_LAYERS = {"full_attention", "sliding_attention"}
_ROPE = {"default", "linear", "llama3", "yarn", "proportional"}
"""Rotary embeddings that do not change with the length of the sequence."""
_OTHERWISE = frozenset({"phimoe"})
"""Model types whose attention is not told all: sliding windows are in its mask only."""


def can_page(model: Any) -> bool:
    """Whether attention to keys and values of earlier tokens is all that connects the tokens of a
    sequence, and can be replaced."""
    if isinstance(model, GPTMoE):
        return True
    if is_encoder_decoder(model.config):  # of those that are served at all
        return True
    config = model.config.get_text_config()
    return (
        bool(getattr(model, "_supports_attention_backend", False))
        and config.model_type not in _OTHERWISE
        and set(getattr(config, "layer_types", None) or ()) <= _LAYERS
        and _rope_types(getattr(config, "rope_parameters", None)) <= _ROPE
    )


def _rope_types(parameters: Any) -> set[str]:
    if not isinstance(parameters, dict):
        return set()
    if "rope_type" in parameters:
        return {parameters["rope_type"]}
    return {name for each in parameters.values() for name in _rope_types(each)}
