import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.core.errors import ConfigError
from overspill.train.finetune.chat import encode_chats, set_template
from overspill.train.finetune.kinds import Chat
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


def _learned(row: Any) -> str:
    return str(make_tokenizer().decode(row.labels[row.labels != IGNORED]))


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


@pytest.mark.parametrize("answer", ["a", "s", "assistant", ": ", "10"])
def test_an_answer_that_is_part_of_the_name_of_its_role_is_found(answer: str) -> None:
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    chat = [{"role": "user", "content": answer}, {"role": "assistant", "content": answer}]
    assert _learned(_row(template, chat * 2)) == f"{answer}\n" * 2


def test_special_tokens_of_a_template_are_tokens() -> None:
    row = _row(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    assert (row.tokens == END).sum() == len(MESSAGES)
    assert (row.labels == END).sum() == 2


@pytest.mark.parametrize(
    "template",
    [
        # what it renders before an answer depends on the answer, or on its length
        "{{ messages | map(attribute='content') | join | length }}" + NEVER_OPENED,
        "{% for m in messages %}{{ m.content[:1] }}:{{ m.content }};{% endfor %}",
        # no answer, or each of them twice
        "{% for m in messages if m.role != 'assistant' %}{{ m.content }};{% endfor %}",
        "{% for m in messages %}{{ m.content }}={{ m.content }};{% endfor %}",
    ],
)
def test_answers_that_cannot_be_located_are_refused(template: str) -> None:
    with pytest.raises(ConfigError, match=r"f:1: the answer in message 3 cannot be located"):
        _row(template)


def test_an_answer_of_a_template_that_skips_empty_messages_is_refused() -> None:
    skips = "{% for m in messages if m.content %}{{ m.role }}:{{ m.content }};{% endfor %}"
    answers = [{"role": "assistant", "content": content} for content in ("", "x")]
    with pytest.raises(ConfigError, match=r"f:1: the answer in message 2 cannot be located"):
        _row(skips, [{"role": "user", "content": "Hi"}, *answers])


def test_a_template_that_refuses_says_why() -> None:
    with pytest.raises(ConfigError, match=r"f:1: the chat template refuses .*no system"):
        _row("{{ raise_exception('no system') }}")
    with pytest.raises(ConfigError, match=r"f:1: the chat template renders no answer"):
        _row("{% if false %}{% generation %}x{% endgeneration %}{% endif %}y")


@pytest.mark.parametrize("template", [TURNS, MARKED, NEVER_OPENED])
def test_a_chat_may_begin_with_the_assistant(template: str) -> None:
    chat = [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "ho"}]
    assert _learned(_row(template, chat)) == "hi;"


@pytest.mark.parametrize("template", [TURNS, MARKED, NEVER_OPENED])
def test_of_an_empty_answer_only_the_end_of_the_turn_is_learned(template: str) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]
    assert _learned(_row(template, [*chat, *chat])) == ";;"
    with pytest.raises(ConfigError, match=r"f:1: the chat template renders no answer"):
        _row(template.replace("content };", "content }").replace("}};", "}}"), chat)


def test_the_end_of_the_text_is_learned_only_in_the_last_turn() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% if loop.last %}<end>{% else %}|{% endif %}{% endfor %}"
    )
    assert _learned(_row(template)) == "HoNo.<end>"


def test_an_answer_is_learned_as_the_template_renders_it() -> None:
    """As Qwen3: only the last answer keeps its thoughts."""
    thinks = (
        "{% for m in messages %}{{ m.role }}:{{ m.content if loop.last or m.role == 'user' else "
        "m.content.split('</think>')[-1] }};{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    turn = [
        {"role": "user", "content": "assistant:"},
        {"role": "assistant", "content": "<think>a</think>assistant:"},
    ]
    for template in (thinks, thinks.partition("{% if add")[0]):
        row = _row(template, [*turn, *turn])
        assert _learned(row) == "assistant:;<think>a</think>assistant:;"


PIECES = ["a", "assistant", "user", ":", ": ", ";", "\n", "</think>", "\u00df", "10", " ", ""]
contents = st.lists(st.sampled_from(PIECES), max_size=4).map("".join)
turns = st.lists(st.tuples(contents, contents), min_size=1, max_size=3)
Render = Callable[[str, bool], str]
# The Jinja expression of a content, and the same in Python, told whether it is in the last message.
FORMS: list[tuple[str, Render]] = [
    ("m.content", lambda text, last: text),
    ("m.content | trim", lambda text, last: text.strip()),
    ("m.content | upper", lambda text, last: text.upper()),
    (
        "(m.content if loop.last else m.content.split('</think>')[-1])",
        lambda text, last: text if last else text.split("</think>")[-1],
    ),
]


@settings(max_examples=100, deadline=None)
@given(
    turns=turns,
    form=st.sampled_from(FORMS),
    header=st.sampled_from(["{}: ", "{}\n", "{}"]),
    end=st.sampled_from([";", "\n", " assistant", ""]),
    opened=st.booleans(),
    begins=st.booleans(),
)
def test_the_tokens_of_answers_are_learned_whatever_they_contain(
    turns: list[tuple[str, str]],
    form: tuple[str, Render],
    header: str,
    end: str,
    opened: bool,
    begins: bool,
) -> None:
    """The oracle knows the template: it builds the text piece by piece."""
    expression, render = form
    template = (
        f"{{% for m in messages %}}{{{{ '{header}'.format(m.role) + {expression} + '{end}' }}}}"
        "{% endfor %}"
    ).replace("\n", "\\n")
    if opened:
        prompt = header.format("assistant").replace("\n", "\\n")
        template += f"{{% if add_generation_prompt %}}{{{{ '{prompt}' }}}}{{% endif %}}"
    roles = [pair for asked, told in turns for pair in (("user", asked), ("assistant", told))]
    roles = roles[1:] if begins else roles
    text, learned = "", ""
    for number, (role, content) in enumerate(roles):
        piece = render(content, number == len(roles) - 1) + end
        text += header.format(role) + piece
        learned += "-" * len(header.format(role)) + ("x-"[role == "user"] * len(piece))
    messages = [{"role": role, "content": content} for role, content in roles]
    if "x" not in learned:
        with pytest.raises(ConfigError, match=r"f:1: the chat template renders no answer"):
            _row(template, messages)
        return
    row = _row(template, messages)
    assert make_tokenizer().decode(row.tokens) == text
    marks = "".join(mark * len(char.encode()) for mark, char in zip(learned, text, strict=True))
    assert [label != IGNORED for label in row.labels] == [mark == "x" for mark in marks]


def test_a_tokenizer_without_a_template_needs_one(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    with pytest.raises(ConfigError, match=r"has no chat template.*--chat-template FILE"):
        set_template(tokenizer, None)
    with pytest.raises(ConfigError, match=r"--chat-template /no/such cannot be read"):
        set_template(tokenizer, "/no/such")
    (tmp_path / "chat.jinja").write_text(TURNS, encoding="utf-8-sig")
    set_template(tokenizer, str(tmp_path / "chat.jinja"))
    (row,) = encode_chats(tokenizer, [Chat("f:1", MESSAGES)])
    assert tokenizer.decode(row.tokens) == TEXT


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
CALLING: list[dict[str, Any]] = [
    {"role": "user", "content": "2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "5"},
    {"role": "assistant", "content": "5."},
]
WRITTEN = '{"name": "add", "arguments": {"a": 2}}'
# As Qwen's templates: calls after a text that may be missing.
QWEN = (
    "{% if tools %}{{ tools | tojson }};{% endif %}{% for m in messages %}{{ m.role }}:"
    "{% if m.content is string %}{{ m.content }}{% endif %}{% for call in m.tool_calls %}"
    "<call>{{ call.function | tojson }}</call>{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# As those of gpt-oss and Llama: a result needs the call before it, and a call has another end.
STRICT = (
    "{% set ns = namespace(called=false) %}{% for m in messages %}"
    "{% if m.role == 'tool' and not ns.called %}{{ raise_exception('no call') }}{% endif %}"
    "{{ m.role }}:{% if m.tool_calls %}{% set ns.called = true %}"
    "<call>{{ m.tool_calls[0].function | tojson }}|{% else %}{{ m.content }};{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "learned"),
    [
        (QWEN, f"<call>{WRITTEN}</call>;5.;"),
        (QWEN.partition("{% if add_")[0], f"<call>{WRITTEN}</call>;5.;"),
        (QWEN.replace("m.content is string", "true"), f"<call>{WRITTEN}</call>;5.;"),
        (QWEN.replace("m.content is string", "m.content + ''"), f"<call>{WRITTEN}</call>;5.;"),
        (STRICT, f"<call>{WRITTEN}|5.;"),
        # as DeepSeek's, which take arguments as text
        (
            QWEN.replace("call.function | tojson", "'' + call.function.arguments"),
            '<call>{"a": 2}</call>;5.;',
        ),
    ],
)
def test_calls_of_tools_are_learned_and_their_results_are_not(template: str, learned: str) -> None:
    assert _learned(_row(template, CALLING)) == learned


def test_calls_that_cannot_be_located_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"f:1: the answer in message 2 cannot be located"):
        _row(STRICT.partition("{% if add_")[0], CALLING)


def test_the_template_gets_the_tools() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    (row,) = encode_chats(make_tokenizer(QWEN), [Chat("f:1", CALLING, tools)])
    assert str(make_tokenizer().decode(row.tokens)).startswith(json.dumps(tools) + ";user:2?;")
    assert _learned(row) == f"<call>{WRITTEN}</call>;5.;"


def test_a_template_that_would_leave_out_tools_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"f:1: the chat template does not support tool_calls"):
        _row(TURNS, CALLING)
    chat = Chat("f:1", MESSAGES, [{"type": "function"}])
    with pytest.raises(ConfigError, match=r"f:1: the chat template does not support tools; give"):
        list(encode_chats(make_tokenizer(TURNS), [chat]))
