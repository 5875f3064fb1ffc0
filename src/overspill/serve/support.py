"""Kinds of models: whether they compute several requests in one pass, and prompts in pieces."""

from typing import Any

from overspill.models.gpt import GPTMoE
from overspill.models.huggingface import recurrent, relative, sparse
from overspill.models.huggingface.seq2seq import is_encoder_decoder

_LAYERS = {"full_attention", "sliding_attention"}
_ROPE = {"default", "linear", "llama3", "yarn", "proportional"}
"""Rotary embeddings that do not change with the length of the sequence."""
_KNOWN = recurrent.TYPES | relative.TYPES | sparse.TYPES
"""Types of models whose tokens are connected by more than keys and values, in known modules."""


def why_not_paged(model: Any) -> str | None:
    """Return the reason why a model computes one request after another; None if it computes them
    together: only attention to keys and values of earlier tokens, and known modules, connect the
    tokens of a sequence, and they can be replaced."""
    if isinstance(model, GPTMoE) or is_encoder_decoder(model.config):  # of those that are served
        return None
    config = model.config.get_text_config()
    rope = _rope_types(config) - _ROPE
    if rope:
        return f"its rotary embeddings ({', '.join(rope)}) change with the length of a sequence"
    if config.model_type == "minimax" and config.sliding_window is not None:
        return "with sliding_window, MiniMax computes otherwise with its own cache than without"
    if config.model_type in _KNOWN:
        return None
    layers = {*(getattr(config, "layer_types", None) or ())} - _LAYERS
    if layers:
        return f"its layers ({', '.join(sorted(layers))}) keep more than keys and values"
    if not getattr(model, "_supports_attention_backend", False):
        return "its attention cannot be replaced"
    return None


def has_states(model: Any) -> bool:
    """Return whether a model keeps a state of each sequence beside keys and values, in known
    modules."""
    if isinstance(model, GPTMoE) or why_not_paged(model) is not None:
        return False
    return model.config.get_text_config().model_type in recurrent.TYPES


def _rope_types(config: Any) -> set[str]:
    found = _all_rope_types(getattr(config, "rope_parameters", None))
    if config.model_type == "phimoe" and "longrope" in found:
        # its module has the same frequencies for every length, and may have the same scale
        rope = config.rope_parameters
        return found - {"longrope"} if rope["short_mscale"] == rope["long_mscale"] else found
    return found


def _all_rope_types(parameters: Any) -> set[str]:
    if not isinstance(parameters, dict):
        return set()
    if "rope_type" in parameters:
        return {parameters["rope_type"]}
    return {name for each in parameters.values() for name in _all_rope_types(each)}
