import pytest

from overspill.core.errors import ConfigError
from overspill.train.finetune.examples import Kind
from overspill.train.finetune.json_lines import parse_line
from overspill.train.finetune.kinds import Chat, Pair
from overspill.train.finetune.questions import AnswerLimits, check_kind, encode_questions
from tests.train.finetune.tiny import END, PAD, make_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
LIMITS = AnswerLimits(seq_len=64, most=10, truncate=False)


def test_prompts_of_pairs_are_those_of_training() -> None:
    tokenizer = make_tokenizer()
    pairs = [Pair("f:1", "2 + 2 = ", "4"), Pair("f:2", "Who?", "I", ("I", "me"))]
    found = encode_questions(tokenizer, Kind.PAIR, pairs, LIMITS, None)
    assert [tokenizer.decode(question.prompt) for question in found.items] == ["2 + 2 = ", "Who?"]
    assert [question.references for question in found.items] == [("4",), ("I", "me")]
    assert (found.ends, list(found.start)) == ({END}, [])
    found = encode_questions(tokenizer, Kind.PAIR, pairs, LIMITS, decoder_start=PAD)
    assert list(found.start) == [PAD]


def test_answers_end_at_the_longest_sequence() -> None:
    tokenizer = make_tokenizer()
    pair = Pair("f:1", "x" * 60, "abc")  # with its end token it fits exactly
    limits = AnswerLimits(64, most=10, truncate=False)
    assert encode_questions(tokenizer, Kind.PAIR, [pair], limits, None).items[0].most == 4
    longer = Pair("f:1", "y" + "x" * 63, "abc")
    with pytest.raises(ConfigError, match="f:1: 68 tokens exceed --seq-len 64"):
        encode_questions(tokenizer, Kind.PAIR, [longer], limits, None)
    cut = AnswerLimits(64, most=10, truncate=True)
    question = encode_questions(tokenizer, Kind.PAIR, [longer], cut, None).items[0]
    assert tokenizer.decode(question.prompt) == "x" * 60
    assert question.most == 4


def test_the_last_answer_of_a_chat_is_asked_for() -> None:
    turns = ["Hi", "Hello!", "Bye", "So long."]
    roles = ["user", "assistant"] * 2
    messages = [{"role": r, "content": t} for r, t in zip(roles, turns, strict=True)]
    tokenizer = make_tokenizer(TEMPLATE)
    found = encode_questions(tokenizer, Kind.CHAT, [Chat("f:1", messages)], LIMITS, None)
    prompt = "user:Hi<end>assistant:Hello!<end>user:Bye<end>assistant:"
    assert tokenizer.decode(found.items[0].prompt) == prompt
    assert found.items[0].references == ("So long.",)
    assert found.ends == {END}
    # a turn may end with another token than a text
    tokenizer = make_tokenizer(TEMPLATE.replace("<end>", "<pad>"))
    found = encode_questions(tokenizer, Kind.CHAT, [Chat("f:1", messages)], LIMITS, None)
    assert found.ends == {END, PAD}
    first = Chat("f:2", messages[1:3])
    with pytest.raises(ConfigError, match=r"^f:2: --metric needs an answer of the assistant"):
        encode_questions(tokenizer, Kind.CHAT, [first], LIMITS, None)


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (Kind.TEXT, r"f:1 is text; drop it"),
        (Kind.LABELLED, r"f:1 is a sentence, a tab and a label; accuracy is computed without it"),
    ],
)
def test_kinds_without_answers_are_refused(kind: Kind, found: str) -> None:
    with pytest.raises(
        ConfigError, match=f"--metric em,f1 needs prompts with answers, and {found}"
    ):
        check_kind(kind, "f:1", ["em", "f1"])


def test_examples_may_list_several_answers() -> None:
    def read(line: str) -> Pair:
        kind, pair = parse_line(line, "f:1", None)
        assert kind is Kind.PAIR
        assert isinstance(pair, Pair)
        return pair

    listed = read('{"prompt": "p", "answers": ["one", "two"]}')
    assert (listed.completion, listed.references) == ("one", ("one", "two"))
    both = read('{"prompt": "p", "completion": " one.", "answers": ["one", "two"]}')
    assert (both.completion, both.references) == (" one.", ("one", "two"))
    assert read('{"prompt": "p", "completion": "one"}').references == ("one",)


@pytest.mark.parametrize(
    ("answers", "found"),
    [("[]", r'"answers" = \[\]'), ('"x"', "\"answers\" = 'x'"), ("[1]", '"answers" = 1'),
     ('["a", ""]', 'an empty "answers"')],
)  # fmt: skip
def test_wrong_answers_are_refused_by_name(answers: str, found: str) -> None:
    with pytest.raises(ConfigError, match=rf'^f:1: expected .*"prompt" and "answers".*{found}'):
        parse_line(f'{{"prompt": "p", "answers": {answers}}}', "f:1", None)
