from collections.abc import Callable, Sequence
from typing import Any

import pytest

from overspill.core.errors import ConfigError
from overspill.train.messages import Message, fit_template, read_message

CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
CALLS: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [CALL]}
WRITTEN = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def _template(accepts: Callable[[Message], bool]) -> Callable[[Sequence[Message]], str]:
    def render(messages: Sequence[Message]) -> str:
        if not all(accepts(message) for message in messages):
            raise ConfigError("refused")
        return "".join(str(message["content"]) for message in messages)

    return render


def test_arguments_become_dictionaries() -> None:
    assert read_message({"role": "assistant", "tool_calls": [WRITTEN]}) == CALLS


@pytest.mark.parametrize(
    ("accepts", "expected"),
    [
        (lambda message: True, {**CALLS, "content": ""}),  # it writes "None"
        (lambda message: message["content"] is not None, {**CALLS, "content": ""}),
        (
            lambda message: isinstance(message["tool_calls"][0]["function"]["arguments"], str),
            {**CALLS, "content": "", "tool_calls": [WRITTEN]},
        ),
        (lambda message: message["content"] is None, CALLS),
    ],
)
def test_a_template_gets_the_form_that_it_accepts(
    accepts: Callable[[Message], bool], expected: Message
) -> None:
    assert list(fit_template([CALLS], _template(accepts))) == [expected]


def test_messages_without_calls_are_not_rendered() -> None:
    plain = [{"role": "user", "content": "None"}]
    assert fit_template(plain, lambda messages: pytest.fail("rendered")) is plain


def test_what_is_refused_in_every_form_says_why_the_first_was() -> None:
    refusals = iter(("first", "second", "third", "fourth"))

    def render(messages: Sequence[Message]) -> str:
        raise ConfigError(next(refusals))

    with pytest.raises(ConfigError, match="first"):
        fit_template([CALLS], render)
    assert next(refusals, None) is None
