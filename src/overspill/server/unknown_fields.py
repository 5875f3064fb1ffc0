"""Fields of a request that the protocol does not have.

As in OpenAI's API they are refused: a setting that is ignored, or misspelt, would go unnoticed.
Exceptions are fields that cannot change an answer, and values that ask for what is done anyway.
"""

from collections.abc import Mapping
from typing import Any

from overspill.server.errors import invalid

_WITHOUT_EFFECT = frozenset(
    {
        "include_obfuscation", "metadata", "prediction", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user",
    }
)  # fmt: skip
"""Of OpenAI's API: they concern its accounts, its storage and its speed."""

_USUAL: Mapping[str, Any] = {
    "add_generation_prompt": True, "best_of": 1, "continue_final_message": False, "echo": False,
    "include_stop_str_in_output": False, "length_penalty": 1, "min_p": 0, "repetition_penalty": 1,
    "skip_special_tokens": True, "stop_token_ids": [], "use_beam_search": False,
}  # fmt: skip
"""Fields of other servers, which clients often send with the value that changes nothing."""


def check_unknown(given: Mapping[str, Any] | None, inside: str = "") -> None:
    """Raises an error for the first field that could change the answer. `inside` is the field that
    has them."""
    for name, value in (given or {}).items():
        usual = name in _USUAL and value == _USUAL[name]
        if value is None or name in _WITHOUT_EFFECT or usual:
            continue
        param = f"{inside}{name[:80]}"
        raise invalid(f"{param!r} is not supported here; leave it out", param, "unknown_parameter")
