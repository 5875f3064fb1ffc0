"""The plan of a request: the answers that the engine computes, and the form of the response."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from overspill.server.answers import Job
from overspill.server.errors import invalid
from overspill.server.forms import Form

if TYPE_CHECKING:
    from overspill.serve.llm import LLM


@dataclass(frozen=True)
class Plan:
    """Answers that a request asks for, and the form of its response."""

    jobs: Sequence[Job]
    """Prompt and parameters of each answer, in the order of the prompts."""
    samples: int
    """Number of answers to each prompt."""
    form: Form
    schema_field: str = "response_format"
    """Field of the request with the JSON schema of its answers."""


def check_length(count: int, llm: "LLM", param: str, words: str = "") -> None:
    """Raise an error if a prompt of so many tokens is too long; `param` is the field of the body
    that has it."""
    context = llm.context
    if llm.has_encoder and count > context:
        raise invalid(
            f"this model's encoder takes {context} tokens, and the prompt has {words}{count}; "
            "shorten it",
            param,
            "context_length_exceeded",
        )
    if not llm.has_encoder and count >= context:
        raise invalid(
            f"this model's context is {context} tokens, and the prompt has {words}{count}, "
            "which leaves no room for an answer; shorten it",
            param,
            "context_length_exceeded",
        )
