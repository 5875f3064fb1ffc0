"""Answers that follow a JSON schema, whatever the model would say."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from overspill import LLM, SamplingParams
from overspill.core.errors import ConfigError, OrderError
from overspill.serve.grammar import Grammar, Grammars
from overspill.serve.schema_process import Attempt, SchemaProcess
from overspill.train.tokenizer import ByteTokenizer
from overspill.train.trained import RunCodec
from tests.serve.submissions import SHORT, gated, small_cache, wait_until_idle
from tests.serve.test_llm import checkpoint as checkpoint  # a fixture
from tests.serve.test_llm import run as run  # a fixture
from tests.serve.test_schema_process import HOURS
from tests.serve.test_text import byte_level, words
from tests.waiting import wait_until

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6, "pattern": "^[a-z]*$"},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}
BYTES = RunCodec(ByteTokenizer())


def check(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "size", "tags"]
    assert len(value["name"]) <= 6
    assert 0 <= value["size"] <= 99
    assert set(value["tags"]) <= {"a", "b"}


@pytest.fixture(scope="module")
def llm(run: Path) -> Iterator[LLM]:
    """Bytes, in the model of a run."""
    with LLM(run, device="cpu", context=256) as made:
        yield made


def asked(seed: int | None = None, **options: Any) -> SamplingParams:
    """Drawn tokens with a seed, or the likeliest ones."""
    drawn = {} if seed is None else {"temperature": 1.5, "seed": seed}
    return SamplingParams(**{"max_tokens": 150, "json_schema": SCHEMA, **drawn, **options})


def test_answers_of_a_run_follow_the_schema(llm: LLM) -> None:
    params = [
        asked(),
        asked(1),
        asked(2, top_p=0.9, top_k=20),
        asked(json_schema=json.dumps(SCHEMA)),
    ]
    results = llm.generate(["def f("] * 4, params)
    for result in results:
        check(result.text)
        assert result.finish_reason == "stop"
    assert results[0].text == results[3].text
    assert llm.generate("def f(", asked(1))[0].text == results[1].text, "also beside others"


def test_answers_of_a_checkpoint_follow_the_schema(checkpoint: Path) -> None:
    with LLM(checkpoint, device="cpu", context=256) as llm:
        for result in llm.generate(["a", "b a"], [asked(), asked(3)]):
            assert result.finish_reason in ("stop", "length")  # 64 positions
            if result.finish_reason == "stop":
                check(result.text)
            assert result.text.startswith("{")
        (short,) = llm.generate("a", asked(json_schema={"enum": ["aa", "b"]}))
        assert (json.loads(short.text) in ("aa", "b"), short.finish_reason) == (True, "stop")


def test_requests_with_and_without_a_schema_run_together(llm: LLM) -> None:
    plain = SamplingParams(max_tokens=12, temperature=1.0, seed=4)
    (alone,) = llm.generate("import", plain)
    submissions = [llm.submit("import", each) for each in (asked(), plain, asked(7))]
    results = [each.result(timeout=60) for each in submissions]
    assert results[1] == alone
    check(results[0].text)
    check(results[2].text)
    wait_until_idle(llm)


def test_a_request_that_is_computed_again_continues_its_json(llm: LLM, run: Path) -> None:
    params = [asked(seed, max_tokens=40) for seed in range(2)]
    alone = [llm.generate("def", each)[0] for each in params]
    computed: list[int] = []
    with small_cache(4), LLM(run, device="cpu", context=64) as tight:
        tight.model.embedding.register_forward_hook(lambda _, i, out: computed.append(out.shape[1]))
        with gated(tight):  # both at once
            submissions = [tight.submit("def", each) for each in params]
        results = [each.result(timeout=60) for each in submissions]
        assert [each.text for each in results] == [each.text for each in alone]
    needed = sum(each.prompt_tokens + len(each.token_ids) - 1 for each in results)
    assert sum(computed) > needed, "one gave its blocks back"


def test_too_few_tokens_end_json_early(llm: LLM) -> None:
    (result,) = llm.generate("def", asked(max_tokens=5))
    assert (result.finish_reason, len(result.token_ids)) == ("length", 5)
    assert result.text.startswith("{")


def test_a_number_ends_where_the_model_ends_it(llm: LLM) -> None:
    """More digits may follow each: only the end of the text completes it."""
    ended = [
        llm.generate("=", asked(seed, json_schema={"type": "integer"}, logit_bias={256: 4.0}))[0]
        for seed in range(3)
    ]
    for result in ended:
        assert result.finish_reason == "stop"
        assert isinstance(json.loads(result.text), int)
        assert result.token_ids[-1] == 256, "the end of the text is allowed after a digit"
    same = asked(0, json_schema={"type": "integer"}, logit_bias={256: 4.0}, ignore_eos=True)
    assert llm.generate("=", same)[0].text == ended[0].text, "nothing can follow"


def test_logprobs_are_those_of_the_model(llm: LLM) -> None:
    (result,) = llm.generate("def", asked(logprobs=1, max_tokens=1))
    (free,) = llm.generate("def", SamplingParams(max_tokens=1, logprobs=1))
    assert result.logprobs is not None
    assert free.logprobs is not None
    assert free.logprobs[0].items() <= result.logprobs[0].items()


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "nonsense"}, "json_schema cannot be used: Invalid type: nonsense"),
        ({"type": "string", "pattern": "(("}, "json_schema cannot be used: regex parse error"),
        ({"$ref": "http://localhost/x"}, "json_schema cannot be used: Resource"),
        ({"not": {}}, "json_schema cannot be used: Unimplemented keys"),
        ({"const": "\ud800"}, "json_schema cannot be used: unexpected end of hex escape"),
        ({"enum": ["x" * 70000]}, r"has 70\d\d\d characters; give one with at most 65536"),
        (json.loads('{"items":' * 300 + "{}" + "}" * 300), "cannot be used: recursion limit"),
        ({"enum": [f"v{number}" for number in range(7000)]}, None),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_an_invalid_schema_is_refused(llm: LLM, schema: Any, message: str | None) -> None:
    if message is None:
        assert llm.generate("a", asked(json_schema=schema))[0].text.startswith('"v')
        return
    with pytest.raises(ConfigError, match=message):
        llm.submit("a", asked(json_schema=schema))
    assert llm.submit("a", SHORT).result(timeout=60).finish_reason


def test_a_schema_that_becomes_too_complex_fails_its_request_alone(llm: LLM) -> None:
    wide = {f"p{number}": {"type": "null"} for number in range(1000)}
    schema = {"type": "object", "properties": wide, "additionalProperties": False}
    failing, other = llm.submit("a", asked(json_schema=schema)), llm.submit("a", asked())
    with pytest.raises(ConfigError, match="json_schema cannot be followed any further"):
        failing.result(timeout=60)
    check(other.result(timeout=60).text)


def test_a_missing_library_is_named(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"needs llguidance.*pip install '\.\[serve\]'"):
        llm.generate("a", SamplingParams(json_schema={"const": "not compiled yet"}))


def follow(grammar: Grammar, text: bytes) -> None:
    for byte in text:
        grammar.accept(byte)


def allowed(grammar: Grammar, vocabulary: int) -> set[int]:
    logits = torch.zeros(vocabulary)
    grammar.mask_(logits)
    return set(logits.isfinite().nonzero().flatten().tolist())


def test_only_what_may_follow_is_allowed() -> None:
    grammar = Grammars(BYTES, BYTES.ends, 320).from_schema('{"enum": [1, 12, "x"]}')
    assert allowed(grammar, 320) == {ord("1"), ord('"')}
    grammar.accept(ord("1"))
    assert allowed(grammar, 320) == {ord("2"), 256}, "the end of the text, as 1 is complete"
    assert not grammar.is_complete
    grammar.accept(ord("2"))
    assert grammar.is_complete
    with pytest.raises(ConfigError, match="cannot be followed any further"):
        Grammars(BYTES, BYTES.ends, 320).from_schema('{"const": 1}').accept(ord("2"))


def test_a_model_without_an_end_of_text_completes_json() -> None:
    grammar = Grammars(BYTES, [], 256).from_schema('{"const": {"a": 1}}')
    follow(grammar, b'{"a":1')
    assert allowed(grammar, 256) == {ord("}"), ord(" "), ord("\n")}
    grammar.accept(ord("}"))
    assert grammar.is_complete


STRING = '{"type": "string", "pattern": "^[abc. €é]*$"}'


def test_tokens_of_several_characters_are_allowed_as_a_whole() -> None:
    codec = byte_level()
    ids = len(codec.tokenizer)
    grammar = Grammars(codec, codec.ends, ids + 4).from_schema(STRING)
    (quote,) = codec.encode('"')
    grammar.accept(quote)
    texts = {codec.token_bytes(token) for token in allowed(grammar, ids + 4)}
    assert {b"a", b"b", b"b\xe2", b"\xc3\xa9", b'"', b"\xe2\x82"} <= texts
    assert b"d" not in texts


def test_a_vocabulary_that_cannot_write_the_schema_is_refused() -> None:
    codec = words()  # of a kind that llguidance does not read by itself, without digits
    with pytest.raises(ConfigError, match="no token of this model may follow"):
        Grammars(codec, codec.ends, 9).from_schema('{"type": "integer"}')


class Noted(SchemaProcess):
    """Notes what it compiles."""

    def __init__(self) -> None:
        super().__init__(600, 16 << 20)
        self.compiled: list[str] = []

    def compile(self, schema: str, attempt: Attempt) -> str:
        self.compiled.append(schema)
        return super().compile(schema, attempt)


@pytest.fixture
def noted() -> Iterator[tuple[Grammars, list[str]]]:
    grammars = Grammars(BYTES, BYTES.ends, 320)
    grammars._process = process = Noted()
    yield grammars, process.compiled
    grammars.close()


def test_grammars_of_one_schema_are_compiled_once_and_independent(
    noted: tuple[Grammars, list[str]],
) -> None:
    grammars, compiled = noted
    properties = {f"p{number}": {"type": "string"} for number in range(3)}
    schema = json.dumps({"type": "object", "properties": properties})
    first, second = (grammars.from_schema(schema) for _ in range(2))
    assert compiled == [schema]
    first.accept(ord("{"))
    second.accept(ord("{"))  # its own first token
    with pytest.raises(ConfigError):
        second.accept(ord("{"))
    first.accept(ord("}"))
    grammars.from_schema(schema)
    assert len(compiled) == 2, "copies share what may have made one fail"


def test_a_schema_that_reaches_a_limit_does_so_once(noted: tuple[Grammars, list[str]]) -> None:
    grammars, compiled = noted
    for _ in range(3):
        with pytest.raises(ConfigError, match="json_schema is too complex"):
            grammars.from_schema(HOURS)
    assert compiled == [HOURS]


def test_only_schemas_that_are_not_in_use_are_forgotten(noted: tuple[Grammars, list[str]]) -> None:
    grammars, compiled = noted
    schemas = [json.dumps({"const": number}) for number in range(20)]
    with grammars.compile(schemas[0]) as used:
        used.check()
        for schema in [*schemas[1:], schemas[0], schemas[1], schemas[19]]:
            grammars.from_schema(schema)
    assert compiled == [*schemas, schemas[1]]


def test_a_schema_whose_table_has_grown_is_not_kept(
    noted: tuple[Grammars, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars, compiled = noted
    for seconds, times in ((1e9, 1), (-1e9, 2)):
        monkeypatch.setattr("overspill.serve.grammar._WORN_SECONDS", seconds)
        grammars.from_schema('{"const": 2}')
        grammars.from_schema('{"const": 1}')
        assert compiled.count('{"const": 1}') == times
    assert list(grammars._entries) == ['{"const": 1}']


def test_a_schema_that_many_wait_for_is_cancelled_by_the_last() -> None:
    grammars = Grammars(BYTES, BYTES.ends, 320)
    grammars._process = SchemaProcess(600, 2 << 30)
    first, second = grammars.compile(HOURS), grammars.compile(HOURS)
    with first:
        with second:
            grammars.from_schema('{"const": 1}')
        assert not first.done
    wait_until(lambda: first.done)
    grammars.close()
    with pytest.raises(OrderError, match="closed"):
        grammars.compile(HOURS)


def test_an_answer_that_needs_too_many_states_fails_and_later_ones_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("overspill.serve.grammar._MOST_STATES", 300)
    grammars = Grammars(BYTES, BYTES.ends, 320)
    schema = '{"type": "string", "pattern": ".*a.{30}$"}'

    def answer(count: int) -> None:
        grammar = grammars.from_schema(schema)
        for byte in b'"' + b"ab" * count:
            grammar.mask_(torch.zeros(320))
            grammar.accept(byte)

    for _ in range(2):
        answer(2)
        with pytest.raises(ConfigError, match="too many states"):
            answer(1000)
