from pathlib import Path
from typing import Any

import pytest

from overspill.core.errors import ConfigError
from overspill.train.finetune.chat import encode_chats, set_template
from overspill.train.finetune.examples import Chat
from overspill.train.finetune.rows import IGNORED
from tests.train.finetune.tiny import END, make_tokenizer

MESSAGES = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Ho"},
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": "No."},
]
# A turn is `role:content;`, and `assistant:` opens the next one.
TURNS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# The same, with what the model says marked.
MARKED = (
    "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }};{% endgeneration %}{% else %}{{ m.content }};{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
# The same, and no turn is ever opened.
NEVER_OPENED = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
TEXT = "system:S;user:Hi;assistant:Ho;user:?;assistant:No.;"
MASK = "---------------------------Ho;-----------------No.;"


def _row(template: str, messages: list[dict[str, Any]] = MESSAGES) -> Any:
    (row,) = encode_chats(make_tokenizer(template), [Chat("f:1", messages)])
    return row


@pytest.mark.parametrize("template", [TURNS, MARKED, NEVER_OPENED])
def test_only_the_answers_are_learned(template: str) -> None:
    row = _row(template)
    tokenizer = make_tokenizer()
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert row.tokens.tolist() == ids
    assert len(MASK) == len(TEXT)
    assert row.labels.tolist() == [
        IGNORED if mark == "-" else token for mark, token in zip(MASK, ids, strict=True)
    ]


def test_an_answer_that_occurs_earlier_is_found_where_it_is() -> None:
    row = _row(TURNS, [{"role": "user", "content": "Ho"}, {"role": "assistant", "content": "Ho"}])
    assert (row.labels != IGNORED).nonzero()[0].tolist() == [18, 19, 20]


def test_special_tokens_of_a_template_are_tokens() -> None:
    row = _row(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    assert (row.tokens == END).sum() == len(MESSAGES)
    assert (row.labels == END).sum() == 2


def test_a_template_that_rewrites_the_past_is_refused() -> None:
    forgets = "{{ messages | length }}" + TURNS
    with pytest.raises(ConfigError, match=r"f:1: the chat template renders earlier messages"):
        _row(forgets)


def test_a_template_that_refuses_says_why() -> None:
    with pytest.raises(ConfigError, match=r"f:1: the chat template refuses .*no system"):
        _row("{{ raise_exception('no system') }}")
    with pytest.raises(ConfigError, match=r"f:1: the chat template renders no answer"):
        _row("{% if false %}{% generation %}x{% endgeneration %}{% endif %}y")


def test_a_chat_that_begins_with_the_assistant_is_named() -> None:
    tokenizer = make_tokenizer(TURNS)
    chat = Chat("f:1", [{"role": "assistant", "content": "hi"}, *MESSAGES])
    with pytest.raises(ConfigError, match=r'f:1: "messages" begin with .*put a message'):
        list(encode_chats(tokenizer, [chat]))


def test_a_tokenizer_without_a_template_needs_one(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    with pytest.raises(ConfigError, match=r"has no chat template.*--chat-template FILE"):
        set_template(tokenizer, None)
    with pytest.raises(ConfigError, match=r"--chat-template /no/such cannot be read"):
        set_template(tokenizer, "/no/such")
    (tmp_path / "chat.jinja").write_text(TURNS)
    set_template(tokenizer, str(tmp_path / "chat.jinja"))
    (row,) = encode_chats(tokenizer, [Chat("f:1", MESSAGES)])
    assert tokenizer.decode(row.tokens) == TEXT
