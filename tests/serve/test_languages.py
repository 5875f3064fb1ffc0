"""Languages and decoder prompts of encoder-decoders, compared with transformers."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from overspill import LLM, SamplingParams
from overspill.core.errors import ConfigError
from overspill.serve.chat import Chat
from tests.models.huggingface.oracle import offloaded
from tests.serve.languages import LANGUAGES, make_tokenizer, save_nllb, translation
from tests.serve.models import plain_model as decoder_only
from tests.serve.seq2seq import N_NEW, SOURCES, plain_answer, plain_model
from tests.train.finetune.tiny import save_switch


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=N_NEW, ignore_eos=True, **options)


@pytest.fixture(scope="module", params=[False, True], ids=["prefix", "suffix"])
def nllb(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Any]]:
    folder = save_nllb(tmp_path_factory.mktemp("nllb"), request.param)
    with LLM(folder, context=32, max_batch=4, device="cpu", prefill_chunk=16) as llm:
        yield llm, make_tokenizer(request.param)


CASES = [
    ("a cat sat", "eng_Latn", "fra_Latn", ""),
    ("a cat sat", "fra_Latn", "deu_Latn", ""),
    ("a cat sat", "eng_Latn", "fra_Latn", "le chat"),
    ("the dog", "zho_Hans", None, ""),
    ("the dog", "zho_Hans", "eng_Latn", "a very long beginning"),
    ("the dog", "deu_Latn", None, "un"),
]


def test_translations_of_a_batch_are_those_of_transformers(nllb: tuple[LLM, Any]) -> None:
    """With several languages and decoder prompts, and more requests than run at once."""
    llm, tokenizer = nllb
    params = [
        greedy(src_lang=src, tgt_lang=tgt, decoder_prompt=prompt or None)
        for _, src, tgt, prompt in CASES
    ]
    results = llm.generate([text for text, *_ in CASES], params)
    expected = [translation(tokenizer, *case) for case in CASES]
    assert [each.token_ids for each in results] == expected
    assert expected[0] not in expected[1:3]
    assert expected[3] != expected[5]
    assert [each.prompt_tokens for each in results] == [len(text) + 3 for text, *_ in CASES]
    assert results[0].text == llm.decode(expected[0])


def test_a_source_has_the_tokens_of_the_tokenizer_in_its_language(nllb: tuple[LLM, Any]) -> None:
    llm, tokenizer = nllb
    texts: list[str] = []

    def encode(language: str) -> None:
        own = make_tokenizer(tokenizer.legacy_behaviour)
        own.src_lang = language
        expected = own("hello")["input_ids"]
        texts.extend([language] * (llm.encode("hello", language) != expected))

    threads = [threading.Thread(target=encode, args=(name,)) for name in LANGUAGES * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == []
    assert llm.encode("hello") == tokenizer("hello")["input_ids"], "nothing has changed"
    assert llm.languages == LANGUAGES


def test_token_ids_for_the_decoder_follow_its_start_or_have_it(nllb: tuple[LLM, Any]) -> None:
    llm, tokenizer = nllb
    start = llm.model.config.decoder_start_token_id
    french = tokenizer.convert_tokens_to_ids("fra_Latn")
    letters = tokenizer("le", add_special_tokens=False)["input_ids"]
    expected = translation(tokenizer, "a cat", "eng_Latn", "fra_Latn", "le")
    for prompt, language in [
        (letters, "fra_Latn"),
        ([french, *letters], None),
        ([start, french, *letters], None),
        ((start, french, *letters), "fra_Latn"),
    ]:
        params = greedy(src_lang="eng_Latn", tgt_lang=language, decoder_prompt=prompt)
        assert llm.generate("a cat", params)[0].token_ids == expected
    with pytest.raises(ConfigError, match=r"not with the token .* of tgt_lang='fra_Latn' after it"):
        llm.generate("a cat", greedy(tgt_lang="fra_Latn", decoder_prompt=[start, *letters]))


def test_the_language_of_the_generation_config_comes_before_a_prompt_too(
    nllb: tuple[LLM, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, tokenizer = nllb
    german = tokenizer.convert_tokens_to_ids("deu_Latn")
    monkeypatch.setattr(llm.model.generation_config, "forced_bos_token_id", german)
    for language, prompt in [(None, "un"), ("fra_Latn", "un"), (None, "")]:
        params = greedy(src_lang="eng_Latn", tgt_lang=language, decoder_prompt=prompt)
        expected = translation(tokenizer, "a cat", "eng_Latn", language or "deu_Latn", prompt)
        assert llm.generate("a cat", params)[0].token_ids == expected


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"tgt_lang": "fra"}, "tgt_lang='fra' is no language .*; similar names: fra_Latn"),
        ({"src_lang": "ENG_latn"}, "src_lang='ENG_latn' is no .*; similar names: eng_Latn"),
        ({"tgt_lang": "Klingon"}, "it has 4, such as eng_Latn, fra_Latn, deu_Latn"),
        ({"tgt_lang": "<pad>"}, "tgt_lang='<pad>' is no language"),
        ({"decoder_prompt": "a" * 31}, "decoder_prompt: the decoder begins with 33 tokens, .* 32"),
        ({"decoder_prompt": [5, 4000]}, "token id 4000 is not one of"),
        ({"decoder_prompt": "\udcff"}, "not valid UTF-8"),
    ],
)
def test_what_a_translation_cannot_have_is_refused_by_name(
    nllb: tuple[LLM, Any], options: dict[str, Any], match: str
) -> None:
    llm, _ = nllb
    params = greedy(**options)
    with pytest.raises(ConfigError, match=match):
        llm.check_params(params)
    with pytest.raises(ConfigError, match=match):
        llm.generate("a cat", params)


def test_a_language_for_token_ids_and_chats_are_refused(nllb: tuple[LLM, Any]) -> None:
    llm, _ = nllb
    with pytest.raises(ConfigError, match="src_lang='eng_Latn' is for texts"):
        llm.generate([[5, 6, 2]], greedy(src_lang="eng_Latn"))
    with pytest.raises(ConfigError, match="answers single prompts, no chats"):
        llm.chat_tokens([{"role": "user", "content": "a"}])
    with pytest.raises(ConfigError, match="answers single prompts, no chats"):
        Chat(llm, greedy())


@pytest.mark.parametrize("name", ["src_lang", "tgt_lang", "decoder_prompt"])
def test_decoder_only_models_refuse_each(name: str, tmp_path: Path) -> None:
    with offloaded(decoder_only("mixtral")[0], "gpu", tmp_path) as model, LLM(model) as llm:
        match = rf"{name}='a' is for models with an encoder .* \(--{name.replace('_', '-')}\)"
        with pytest.raises(ConfigError, match=match):
            llm.generate([[5, 6]], greedy(**{name: "a"}))
        assert not llm.has_encoder


def test_switch_takes_a_decoder_prompt_and_knows_no_languages(tmp_path: Path) -> None:
    plain, source = plain_model("switch_transformers"), SOURCES[0]
    start = plain.config.decoder_start_token_id
    with offloaded(plain, "host", tmp_path) as model, LLM(model, context=64) as llm:
        whole = plain_answer(plain, source)
        (result,) = llm.generate([source], greedy(decoder_prompt=whole[:3]))
        assert [*whole[:3], *result.token_ids][:N_NEW] == whole
        assert llm.generate([source], greedy(decoder_prompt=[start]))[0].token_ids == whole
        with pytest.raises(ConfigError, match="this model has no tokenizer"):
            llm.generate([source], greedy(decoder_prompt="a"))
        with pytest.raises(ConfigError, match="tgt_lang='fra_Latn': this model has no tokenizer"):
            llm.generate([source], greedy(tgt_lang="fra_Latn"))


def test_texts_of_switch_whose_tokenizer_knows_no_languages(tmp_path: Path) -> None:
    with LLM(save_switch(tmp_path), context=64, device="cpu") as llm:
        tokens = llm.generate([llm.encode("a text")], greedy(decoder_prompt=llm.encode("so ")))
        (result,) = llm.generate("a text", greedy(decoder_prompt="so "))
        assert result.token_ids == tokens[0].token_ids
        assert result.token_ids != llm.generate("a text", greedy())[0].token_ids
        assert llm.languages == []
        for name in ("src_lang", "tgt_lang"):
            flag = "--" + name.replace("_", "-")
            with pytest.raises(ConfigError, match=rf"{name}='fra_Latn': .*\({flag}\)"):
                llm.generate("a text", greedy(**{name: "fra_Latn"}))
