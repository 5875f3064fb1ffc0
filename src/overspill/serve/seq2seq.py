"""Prompts of encoder-decoders: the source, and the tokens that the decoder begins with."""

from typing import Any


def first_tokens(model: Any) -> list[int]:
    """What the decoder begins with: its start token, and one that the generation config forces."""
    config, generation = model.config, model.generation_config
    start = getattr(generation, "decoder_start_token_id", None)
    start = config.decoder_start_token_id if start is None else start
    forced = getattr(generation, "forced_bos_token_id", None)
    return [start] if forced is None else [start, forced]
