"""Completions of an encoder-decoder: translations."""

from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from overspill.core.errors import ConfigError
from overspill.serve.llm import LLM
from overspill.serve.params import SamplingParams
from tests.serve.languages import LANGUAGES, save_nllb
from tests.server.running import Running, running

LETTERS = dict.fromkeys(range(5, 31), 100)
"""A bias, so that answers are letters."""
GREEDY: dict[str, Any] = {
    "model": "tiny", "temperature": 0, "max_tokens": 6,
    "logit_bias": {str(token): bias for token, bias in LETTERS.items()},
}  # fmt: skip
DEFAULTS = {"src_lang": "eng_Latn", "tgt_lang": "fra_Latn"}


@pytest.fixture(scope="module")
def nllb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = save_nllb(tmp_path_factory.mktemp("nllb"))
    with LLM(folder, context=32, max_batch=4, device="cpu") as llm:
        yield llm


@pytest.fixture(scope="module")
def server(nllb: LLM) -> Iterator[Running]:
    with running(nllb, **DEFAULTS) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[OpenAI]:
    with server.client() as made:
        yield made


def expected(llm: LLM, text: str, **options: Any) -> Any:
    params = SamplingParams(max_tokens=6, logit_bias=LETTERS, **{**DEFAULTS, **options})
    return llm.generate(text, params)[0]


def test_fields_of_a_request_come_before_the_flags_of_the_server(client: OpenAI, nllb: LLM) -> None:
    own: dict[str, Any] = {"src_lang": "deu_Latn", "tgt_lang": "eng_Latn", "decoder_prompt": "a"}
    texts = []
    for fields in ({}, {"tgt_lang": "zho_Hans"}, own):
        answer = client.completions.create(prompt="der hund", extra_body=fields, **GREEDY)
        whole = expected(nllb, "der hund", **fields)
        texts.append(answer.choices[0].text)
        assert answer.choices[0].text == whole.text
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == whole.prompt_tokens == len(nllb.encode("der hund"))
    assert len(set(texts)) == 3


def test_streams_samples_logprobs_and_token_ids(client: OpenAI, nllb: LLM) -> None:
    whole = expected(nllb, "the cat")
    chunks = client.completions.create(prompt="the cat", stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    source = nllb.encode("the cat", "eng_Latn")
    answer = client.completions.create(prompt=[source, source], n=2, logprobs=1, **GREEDY)
    assert [choice.text for choice in answer.choices] == [whole.text] * 4
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.token_logprobs or []) == 6
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 2 * len(source)
    full = nllb.encode("a" * 29, "eng_Latn")
    assert len(full) == nllb.context
    assert client.completions.create(prompt=full, **GREEDY).choices[0].text


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tgt_lang": "fr"}, "tgt_lang", "similar names: fra_Latn"),
        ({"src_lang": "x"}, "src_lang", "is no language"),
        ({"tgt_lang": ""}, "tgt_lang", "at least 1 character"),
        ({"decoder_prompt": "a" * 40}, "decoder_prompt", "the decoder begins with 43 tokens"),
        ({"decoder_prompt": 5}, "decoder_prompt", "valid"),
        ({"prompt": [5, 6], "src_lang": "eng_Latn"}, "src_lang", "token ids are taken as they"),
        ({"prompt": "a" * 31}, "prompt", "encoder takes 32 tokens, and the prompt has 34"),
        ({"echo": True}, "echo", "answers of this model continue no prompt"),
        ({"suffix": "b"}, "suffix", "suffix is not supported"),
    ],
)
def test_what_is_refused_is_named(
    client: OpenAI, fields: dict[str, Any], param: str, message: str
) -> None:
    asked = {"prompt": "a", **fields}
    with pytest.raises(BadRequestError, match=message) as error:
        client.completions.create(prompt=asked.pop("prompt"), extra_body=asked, **GREEDY)
    assert error.value.param == param


def test_there_are_no_chats_and_the_list_of_models_says_so(client: OpenAI, server: Running) -> None:
    with pytest.raises(BadRequestError, match=r"no chats; use .*/v1/completions"):
        client.chat.completions.create(messages=[{"role": "user", "content": "a"}], **GREEDY)
    (card,) = server.http.get("/v1/models").json()["data"]
    assert card["encoder_decoder"] is True
    assert card["languages"] == LANGUAGES


def test_a_server_with_an_unknown_language_does_not_start(nllb: LLM) -> None:
    with (
        pytest.raises(ConfigError, match="tgt_lang='fra' is no language"),
        running(nllb, tgt_lang="fra"),
    ):
        pass


def test_decoder_only_models_refuse_each_field(server: Running, llm: LLM) -> None:
    with running(llm) as other:
        for name in ("src_lang", "tgt_lang", "decoder_prompt"):
            answer = other.http.post("/v1/completions", json={"prompt": "a", name: "fra_Latn"})
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["param"] == name
            assert "is for models with an encoder and a decoder" in error["message"]
        assert "encoder_decoder" not in other.http.get("/v1/models").json()["data"][0]
