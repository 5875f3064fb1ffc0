"""`overspill.LLM`: what it loads, what it refuses, and what it gives back."""

import copy
import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import overspill
from overspill import LLM, SamplingParams
from overspill.core.errors import BudgetError, ConfigError, OrderError
from overspill.train.tokenizer import ByteTokenizer
from tests.models.huggingface.families import Family, make_model, tiny
from tests.models.huggingface.oracle import offloaded
from tests.moe.oracle import threads_left
from tests.serve.models import (
    GREEDY,
    N_NEW,
    PROMPTS,
    family,
    gpt_tokens,
    plain_generate,
    plain_gpt,
    plain_model,
    served,
    served_gpt,
    tokens_of,
)
from tests.serve.test_text import byte_level
from tests.train.test_export import plain, trained

WITH_TEXT = Family("mixtral", lambda: tiny("mixtral", vocab_size=264, intermediate_size=24))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of Hugging Face with a tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint")
    make_model(WITH_TEXT).save_pretrained(folder)
    byte_level().tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    with served_gpt("host", tmp_path) as made:
        yield made


@pytest.mark.parametrize("mode", ["auto", pytest.param("gpu-only", marks=pytest.mark.slow)])
def test_a_checkpoint_is_served_with_its_tokenizer(checkpoint: Path, mode: str) -> None:
    model: Any = make_model(WITH_TEXT).eval()
    codec = byte_level()
    text = "a bé€"
    expected = plain_generate(model, codec.encode(text), 12)
    with LLM(checkpoint, device="cpu", mode=mode, context=64, max_batch=2) as llm:
        result, other = llm.generate([text, "ab"], SamplingParams(max_tokens=12, ignore_eos=True))
        assert result.token_ids == expected
        assert result.text == codec.decode(expected)
        assert result.prompt_tokens == len(codec.encode(text))
        assert (result.finish_reason, result.logprobs) == ("length", None)
        assert other.token_ids == plain_generate(model, codec.encode("ab"), 12)


def test_a_stop_string_ends_the_text_before_it(checkpoint: Path) -> None:
    with LLM(str(checkpoint), device="cpu", context=64) as llm:
        params = {"max_tokens": 24, "ignore_eos": True}
        (whole,) = llm.generate("ab", SamplingParams(**params))
        letters = [n for n, letter in enumerate(whole.text) if n > 2 and letter.isprintable()]
        stop = whole.text[letters[0] : letters[0] + 2]
        (result,) = llm.generate("ab", SamplingParams(**params, stop=["never there", stop]))
        assert result.text == whole.text[: whole.text.index(stop)]
        assert result.finish_reason == "stop"
        assert len(result.token_ids) < 24
        assert result.token_ids == whole.token_ids[: len(result.token_ids)]


def test_the_text_of_a_stream_is_that_of_the_result(checkpoint: Path) -> None:
    with LLM(checkpoint, device="cpu", context=64) as llm:
        params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=2.0, seed=3)
        (result,) = llm.generate("ab", params)
        pieces = list(llm.stream("ab", params))
        assert "".join(piece.text for piece in pieces) == result.text
        assert [token for piece in pieces for token in piece.token_ids] == result.token_ids
        assert [piece.finish_reason for piece in pieces] == [None] * 23 + ["length"]


def test_a_run_is_served_as_it_was_trained(run: Path) -> None:
    model, text = plain(run), "expert 3"
    prompt = list(text.encode())
    out = model.generate(torch.tensor([prompt]), 12, temperature=0)[0, len(prompt) :].tolist()
    with LLM(run, device="cpu", mode="auto", slots=3, context=48) as llm:
        (result,) = llm.generate(text, SamplingParams(max_tokens=12, ignore_eos=True))
        assert result.token_ids == out
        expected = bytes(token for token in out if token < 256).decode(errors="replace")
        assert result.text == expected
        assert llm.stats()["bytes"]["host"] > 0


def test_a_run_is_not_converted_to_another_type(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"dtype=.*float32.*leave it out"):
        LLM(run, device="cpu", dtype=torch.bfloat16)
    with LLM(run, device="cpu", dtype=torch.float32):
        pass


def test_a_folder_that_is_neither_is_refused(tmp_path: Path) -> None:
    with pytest.raises(overspill.OverspillError, match="nothing"):
        LLM(tmp_path / "nothing", device="cpu")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match="not the folder of a run"):
        LLM(tmp_path, device="cpu")


def test_a_checkpoint_that_the_mode_is_not_for_is_closed_again(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="needs a model with pre-gates") as raised:
        LLM(checkpoint, device="cpu", mode="pre-gated", slots=2)
    assert raised.tb is not None, "it refers to the model"
    assert not threads_left()


def test_a_model_whose_experts_are_on_several_ranks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with offloaded(plain_model("mixtral")[0], "gpu", tmp_path) as model:
        monkeypatch.setattr(model.overspill, "ranks", SimpleNamespace(rank=0, size=2))
        with pytest.raises(ConfigError, match="serving is not supported for a model that was"):
            LLM(model)
        monkeypatch.undo()


def test_a_model_that_generates_no_text_is_refused(tmp_path: Path) -> None:
    model: Any = make_model(family("openai_privacy_filter")).eval()
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"OpenAIPrivacyFilterFor.* does not generate text"):
        LLM(tmp_path, device="cpu")
    overspill.offload(model, device="cpu", mode="gpu", quiet=True)
    with pytest.raises(ConfigError, match=r"OpenAIPrivacyFilterFor.* does not generate text"):
        LLM(model)
    model.overspill.close()


@pytest.mark.parametrize("model", [None, 5, make_model])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="is not offloaded; give a path"):
        LLM(model)


def test_a_closed_model_is_refused() -> None:
    model = overspill.offload(copy.deepcopy(plain_gpt()), device="cpu", mode="gpu", quiet=True)
    model.overspill.close()
    with pytest.raises(OrderError, match="closed"):
        LLM(model)


@pytest.mark.parametrize("name", ["mixtral", "jamba"])
def test_a_model_is_served_once_at_a_time(name: str, tmp_path: Path) -> None:
    """It generates by itself meanwhile."""
    expected = plain_model(name)[1]
    with served(name, "gpu", tmp_path) as llm:
        with pytest.raises(OrderError, match="is being served; close its LLM"):
            LLM(llm.model)
        assert tokens_of(llm, PROMPTS) == expected
        assert plain_generate(llm.model, PROMPTS[0]) == expected[0]
        assert tokens_of(llm, PROMPTS) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"gpu_memory": "1GiB"},
        {"host_memory": "1GiB"},
        {"disk": "."},
        {"mode": "gpu-only"},
        {"host_slots": 3},
        {"device": "cpu"},
        {"dtype": "bfloat16"},
    ],
)
def test_budgets_of_a_loaded_model_cannot_be_given_again(
    options: dict[str, Any], tmp_path: Path
) -> None:
    with served_gpt("host", tmp_path) as llm, pytest.raises(ConfigError) as refused:
        LLM(llm.model, **options)
    (name,) = options
    assert f"{name}=" in str(refused.value)
    assert "overspill.load" in str(refused.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "fast"}, "mode='fast' must be one of 'auto', 'gpu-only'"),
        ({"migrate": "move"}, "migrate='move' must be one of 'auto', 'cpu', 'copy'"),
        ({"cache_policy": "fifo"}, "cache_policy='fifo' must be one of 'lfu', 'lru'"),
        ({"context": 0}, "context=0 must be a whole number of at least 1"),
        ({"context": "4k"}, "context='4k' must be"),
        ({"max_batch": 0}, "max_batch=0 must be"),
        ({"max_batch": True}, "max_batch=True must be"),
    ],
)
def test_invalid_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        LLM("anything", **options)


def test_a_context_that_does_not_fit_into_memory_is_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overspill.serve.source.available_memory", lambda: 20_000)
    with pytest.raises(BudgetError, match=r"keys and values of 64 tokens need .*; lower context="):
        LLM(checkpoint, device="cpu", context=64)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("mixtral", 2 * 2 * 1 * 8),  # layers, k and v, heads
        ("mimo_v2_flash", 160),  # layers with a window have twice as many heads
    ],
)
def test_keys_and_values_use_no_more_memory_than_was_planned(
    name: str, numbers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = 4 * numbers * (64 * 3)
    monkeypatch.setattr("overspill.serve.source.available_memory", lambda: 4 * planned)
    with served(name, "gpu", tmp_path, context=64, max_batch=3) as llm:
        tokens_of(llm, PROMPTS)
        assert llm.stats()["cache_bytes"] == planned + 4 * numbers * 16, "and a spare block"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("text", "this model has no tokenizer; give token ids"),
        ([[]], "the prompt is empty"),
        ([[1, 48]], "prompt: token id 48 is not one of the 48 of this model"),
        ([[-1]], "prompt: token id -1 is not one of the 48"),
        ([[1, 2.0]], "prompt: 2.0 is not a token id"),
        ([[1, True]], "prompt: True is not a token id"),
        ([1, "a"], "1 is no prompt; give texts or lists of token ids"),
        ([list(range(40)) * 2], "a prompt of 80 tokens leaves no room in the context of 64"),
        ([[1] * 64], "a prompt of 64 tokens leaves no room"),
        (5, "5 is no prompt"),
        (None, "None is no prompt"),
        ([None], "None is no prompt"),
        (b"abc", "b'abc' is no prompt"),
        ([b"abc"], "b'abc' is no prompt"),
    ],
)
def test_an_invalid_prompt_is_named(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        llm.generate(prompt)
    assert tokens_of(llm, [[3, 4]]) == [gpt_tokens([3, 4], N_NEW)], "and others are served"


@pytest.mark.parametrize("prompt", [None, 5, b"abc", [[1, 2]], ["a"], []])
def test_a_stream_takes_one_prompt(llm: LLM, prompt: Any) -> None:
    with pytest.raises(ConfigError, match=r"prompt"):
        llm.stream(prompt)


@pytest.mark.parametrize("params", [{"max_tokens": 3}, 5, "greedy", [None], [{"top_k": 3}]])
def test_params_of_another_type_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(ConfigError, match=r"is not SamplingParams"):
        llm.generate([[1, 2]], params)
    if not isinstance(params, list):
        with pytest.raises(ConfigError, match=r"is not SamplingParams"):
            llm.stream([1, 2], params)


def test_params_are_for_all_prompts_or_one_for_each(llm: LLM) -> None:
    each = [SamplingParams(max_tokens=2), SamplingParams(max_tokens=5)]
    assert [len(tokens) for tokens in tokens_of(llm, [[1, 2], [3]], each)] == [2, 5]
    with pytest.raises(ConfigError, match="2 params for 1 prompts; give one for each"):
        llm.generate([1, 2], each)
    assert llm.generate([]) == []


def test_stop_strings_need_a_tokenizer(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="stop strings cannot be found"):
        llm.generate([1, 2], SamplingParams(stop="a"))


def test_an_invalid_prompt_among_others_starts_none(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="the prompt is empty"):
        llm.generate([[1, 2], []])
    assert llm.stats()["requests"] == 0


def test_the_context_ends_a_text(llm: LLM) -> None:
    (result,) = llm.generate([1] * 60, SamplingParams(max_tokens=100))
    assert (len(result.token_ids), result.finish_reason) == (4, "length")
    (result,) = llm.generate([1] * 63)
    assert result.token_ids == gpt_tokens([1] * 63, 1)


def test_the_context_is_at_most_that_of_the_model(tmp_path: Path) -> None:
    with served_gpt("gpu", tmp_path, context=4096) as llm:
        assert llm.context == 64


def test_seeds_reproduce_alone_and_beside_others(llm: LLM) -> None:
    seeded = SamplingParams(max_tokens=8, temperature=1.0, seed=11)
    free = SamplingParams(max_tokens=12, temperature=1.0)
    (alone,) = tokens_of(llm, [[1, 2, 3]], seeded)
    assert tokens_of(llm, [[1, 2, 3]], seeded) == [alone]
    together = tokens_of(llm, [[7] * 20, [1, 2, 3], [4, 5]], [free, seeded, free])
    assert together[1] == alone
    other = SamplingParams(max_tokens=8, temperature=1.0, seed=12)
    assert tokens_of(llm, [[1, 2, 3]], other) != [alone]
    again = [tokens_of(llm, [[1, 2, 3]], free)[0] for _ in range(2)]
    assert again[0] != again[1], "without a seed each request draws anew"


def test_logprobs_are_those_of_the_model(llm: LLM) -> None:
    prompt = [1, 2, 3]
    (result,) = llm.generate(prompt, SamplingParams(max_tokens=3, logprobs=2))
    assert result.logprobs is not None
    for count, (token, logs) in enumerate(zip(result.token_ids, result.logprobs, strict=True)):
        tokens = torch.tensor([prompt + result.token_ids[:count]])
        with torch.no_grad():
            output = plain_gpt()(tokens).logits
        assert output is not None
        expected = output[0, -1].log_softmax(-1)
        assert list(logs) == expected.topk(2).indices.tolist()
        assert next(iter(logs)) == token
        for each, log in logs.items():
            assert log == pytest.approx(float(expected[each]), abs=1e-4)


def test_statistics_count_what_was_served(llm: LLM) -> None:
    assert llm.stats()["time_to_first_token"] is None
    llm.generate([[1], [2, 3, 4]], SamplingParams(max_tokens=5))
    stats = llm.stats()
    assert (stats["requests"], stats["prompt_tokens"], stats["new_tokens"]) == (2, 4, 10)
    assert stats["tokens_per_second"] > 0
    assert stats["time_to_first_token"] > 0
    assert stats["uploaded_bytes"] > 0


def test_close_in_a_forked_child_leaves_the_parent_alone(tmp_path: Path) -> None:
    with served_gpt("host", tmp_path) as llm:
        params = SamplingParams(max_tokens=4)
        before = llm.generate([1, 2, 3], params)[0].token_ids
        child = os.fork()
        if child == 0:
            llm.close()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert llm.generate([1, 2, 3], params)[0].token_ids == before


def test_nothing_is_served_after_close(tmp_path: Path) -> None:
    with served_gpt("host", tmp_path) as llm:
        waiting = llm.stream([1, 2])
        half = llm.stream([1, 2, 3], SamplingParams(max_tokens=20))
        next(half)
        llm.close()
        llm.close()
        for call in (
            lambda: llm.generate([1, 2]),
            lambda: llm.stream([1, 2]),
            lambda: next(waiting),
            lambda: next(half),
        ):
            with pytest.raises(OrderError, match="this LLM was closed; make a new one"):
                call()


def test_an_abandoned_stream_leaves_its_blocks(llm: LLM) -> None:
    stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=50))
    next(stream)
    pool = llm._loop.scheduler.pool
    assert pool.n_free < pool.n_blocks
    stream.close()  # type: ignore[attr-defined]
    assert tokens_of(llm, [[3, 4]]) == [gpt_tokens([3, 4], N_NEW)]
    assert pool.n_free == pool.n_blocks
    assert llm.stats()["requests"] == 1


def test_a_stream_that_is_collected_within_a_batch_does_not_hang(llm: LLM) -> None:
    """The garbage collector runs in whatever thread allocates memory."""
    streams = [llm.stream([1, 2, 3], SamplingParams(max_tokens=50))]
    next(streams[0])
    hook = llm.model.embedding.register_forward_hook(lambda *_: streams.clear())
    assert tokens_of(llm, [[3, 4]]) == [gpt_tokens([3, 4], N_NEW)]
    hook.remove()
    pool = llm._loop.scheduler.pool
    assert pool.n_free == pool.n_blocks


def test_a_stream_begins_when_it_is_read_and_computes_no_more_than_that(llm: LLM) -> None:
    stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=50))
    assert llm.stats()["prompt_tokens"] == 0
    time.sleep(0.01)
    assert next(stream).token_ids == gpt_tokens([1, 2, 3], 1)
    assert llm.stats()["prompt_tokens"] == 3
    assert [next(stream).token_ids[0] for _ in range(2)] == gpt_tokens([1, 2, 3], 3)[1:]


def test_streams_may_be_read_in_turn(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6)
    prompts = [[1, 2, 3], [4], [5, 6]]
    streams = [llm.stream(prompt, params) for prompt in prompts]
    rows = [[piece.token_ids[0] for piece in pieces] for pieces in zip(*streams, strict=True)]
    columns = [list(column) for column in zip(*rows, strict=True)]
    assert columns == [gpt_tokens(prompt, 6) for prompt in prompts]


@pytest.mark.slow
def test_many_prompts_are_more_than_a_batch(llm: LLM) -> None:
    prompts = [[number % 40 + 1, number % 7] for number in range(10)]
    assert tokens_of(llm, prompts, GREEDY) == [gpt_tokens(prompt, N_NEW) for prompt in prompts]


def test_text_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    """As of bytes on a command line."""
    with served_gpt("gpu", tmp_path) as llm:
        llm._source = dataclasses.replace(llm._source, codec=ByteTokenizer())
        for ask in (llm.encode, lambda text: llm.chat_tokens([{"role": "user", "content": text}])):
            with pytest.raises(ConfigError, match=r"not valid UTF-8: .*at character 1"):
                ask("a\udcff")
