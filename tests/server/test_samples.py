"""`n` answers to a prompt are those of n requests, one after the other."""

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest

from overspill.serve.llm import LLM
from tests.server.running import Running
from tests.slow import slow_rows

N, SEED = 3, 11
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = {"messages": [{"role": "user", "content": "Hello"}]}
NUMBER = {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 2, "maxItems": 3}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": NUMBER}}
CASES: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any]]] = {
    "chat": (CHAT, [MESSAGES], {"logprobs": True, "top_logprobs": 1}),
    "prompts": (COMPLETIONS, [{"prompt": "One"}, {"prompt": "and two"}], {"logprobs": 1}),
    "rules": (
        COMPLETIONS, [{"prompt": "One"}],
        {"frequency_penalty": 1.5, "presence_penalty": 0.5, "top_p": 0.9, "top_k": 30},
    ),
    "schema": (CHAT, [MESSAGES], {"response_format": SCHEMA, "max_tokens": 60}),
}  # fmt: skip
Choice = dict[str, Any]


def ask(server: Running, path: str, body: dict[str, Any], **change: Any) -> Any:
    given = {"max_tokens": 12, "seed": SEED, "ignore_eos": True, **body, **change}
    answer = server.http.post(path, json=given)
    assert answer.status_code == 200, answer.text
    return answer.json()


def together(prompts: list[dict[str, Any]]) -> dict[str, Any]:
    """The body for all prompts at once."""
    if len(prompts) == 1:
        return prompts[0]
    return {"prompt": [each["prompt"] for each in prompts]}


Singles = tuple[list[Choice], int, int]


def one_by_one(
    server: Running, path: str, prompts: list[dict[str, Any]], options: dict[str, Any]
) -> Singles:
    """The choices, and how many tokens their prompts and they have."""
    choices, prompt_tokens, new_tokens = [], 0, 0
    for prompt in prompts:
        for number in range(N):
            made = ask(server, path, {**prompt, **options, "seed": SEED + number})
            (choice,) = made["choices"]
            choices.append({**choice, "index": len(choices)})
            new_tokens += made["usage"]["completion_tokens"]
        prompt_tokens += made["usage"]["prompt_tokens"]
    return choices, prompt_tokens, new_tokens


@pytest.fixture(scope="module")
def singles(server: Running) -> Callable[[str], Singles]:
    return functools.cache(lambda case: one_by_one(server, *CASES[case]))


@pytest.mark.parametrize("case", CASES)
def test_n_answers_are_those_of_n_requests(
    case: str, server: Running, singles: Callable[[str], Singles]
) -> None:
    path, prompts, options = CASES[case]
    expected, prompt_tokens, new_tokens = singles(case)
    made = ask(server, path, {**together(prompts), **options}, n=N)
    texts, logprobs = divided(made["choices"])
    assert texts == divided(expected)[0]
    # products of matrices with other numbers of rows may differ in the last bits
    assert logprobs == pytest.approx(divided(expected)[1], abs=1e-4)
    usage = made["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt_tokens, new_tokens)
    assert usage["total_tokens"] == prompt_tokens + new_tokens
    assert len({json.dumps(text_of(choice)) for choice in expected}) > 1, "seeds differ"


def divided(value: Any) -> tuple[Any, list[float]]:
    """All of the choices but their numbers, and these."""
    numbers: list[float] = []
    rest = json.loads(json.dumps(value), parse_float=lambda text: numbers.append(float(text)))
    return rest, numbers


def text_of(choice: Choice) -> str:
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def streamed(server: Running, path: str, body: dict[str, Any]) -> tuple[list[Choice], Any]:
    """The text and the reasons of each choice of a stream, and the usage."""
    found: dict[int, Choice] = {}
    usage = None
    given = {
        "max_tokens": 12, "seed": SEED, "ignore_eos": True, **body,
        "n": N, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    with server.http.stream("POST", path, json=given) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            usage = event["usage"] or usage
            for part in event["choices"]:
                choice = found.setdefault(part["index"], {"text": "", "reasons": []})
                assert not choice["reasons"], "nothing follows the end of a choice"
                choice["text"] += part.get("text") or part.get("delta", {}).get("content") or ""
                if part["finish_reason"] is not None:
                    choice["reasons"].append(part["finish_reason"])
    return [found[index] for index in sorted(found)], usage


@pytest.mark.parametrize("case", slow_rows(list(CASES), 0, 3))
def test_a_stream_has_the_same_choices(
    case: str, server: Running, singles: Callable[[str], Singles]
) -> None:
    path, prompts, options = CASES[case]
    expected, prompt_tokens, new_tokens = singles(case)
    choices, usage = streamed(server, path, {**together(prompts), **options})
    assert [each["text"] for each in choices] == [text_of(each) for each in expected]
    assert [each["reasons"] for each in choices] == [[e["finish_reason"]] for e in expected]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt_tokens, new_tokens)


def test_a_stop_text_ends_one_choice_and_no_other(server: Running) -> None:
    prompt = {"prompt": "One"}
    texts = [text_of(c) for c in one_by_one(server, COMPLETIONS, [prompt], {})[0]]
    stop = next(text[i : i + 2] for text in texts for i in range(2, 9)
                if sum(text[i : i + 2] in each for each in texts) == 1)  # fmt: skip
    made = ask(server, COMPLETIONS, prompt, n=N, stop=stop)
    for choice, text in zip(made["choices"], texts, strict=True):
        stopped = stop in text
        assert choice["text"] == text.partition(stop)[0]
        assert choice["finish_reason"] == ("stop" if stopped else "length")
    expected = one_by_one(server, COMPLETIONS, [prompt], {"stop": stop})
    assert made["usage"]["completion_tokens"] == expected[2] < N * 12
    assert streamed(server, COMPLETIONS, {**prompt, "stop": stop})[0] == [
        {"text": choice["text"], "reasons": [choice["finish_reason"]]} for choice in made["choices"]
    ]


def test_more_answers_than_fit_in_a_batch_are_those_of_single_requests(
    llm: LLM, server: Running
) -> None:
    n = server.service.max_batch + 2
    body = {"prompt": "One", "max_tokens": 4}
    made = ask(server, COMPLETIONS, body, n=n)
    singles = [ask(server, COMPLETIONS, body, seed=SEED + i) for i in range(n)]
    assert [text_of(c) for c in made["choices"]] == [text_of(s["choices"][0]) for s in singles]
    assert made["usage"]["completion_tokens"] == 4 * n
    assert server.wait_until(lambda: server.idle)
