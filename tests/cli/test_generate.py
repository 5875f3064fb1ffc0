import json
from pathlib import Path

import pytest

from overspill.cli.main import app
from tests.cli.trained import run as run  # a fixture


def test_generate_streams_what_json_gives(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(run), "abc", "--max-tokens", "6", "--seed", "3"]
    flags = ["--mode", "on-demand", "--migrate", "cpu", "--cache-policy", "lru", "--slots", "0"]
    assert app([*words, *flags]) == 0
    text = capsys.readouterr().out
    assert app([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert text == result["text"] + "\n"
    assert result["prompt_tokens"] == 3
    assert result["stats"]["new_tokens"] == len(result["token_ids"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "RUN", ""], "the prompt is empty"),
        (["generate", "RUN"], "PROMPT"),
        (["generate", "/nowhere", "a"], "/nowhere does not exist"),
        (["generate", "RUN", "a", "--top-p", "0"], "--top-p 0.0 must be above 0 and"),
        (["generate", "RUN", "a", "--mode", "fast"], "--mode"),
        (["generate", "RUN", "a", "--mode", "pre-gated"], "train them with overspill pregate"),
        (["generate", "RUN", "a", "--migrate", "copy", "--device", "cpu"], "is computed on cpu"),
        (["generate", "RUN", "a", "--mode", "gpu-only", "--migrate", "cpu"], "migrate='cpu' is"),
        (["generate", "RUN", "a", "--cache-policy", "fifo"], "give lfu or lru"),
        (["generate", "RUN", "abc", "--context", "3"], "leaves no room in the context of 3"),
        (["chat"], "MODEL"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str], message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert app([str(run) if word == "RUN" else word for word in words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.fixture(scope="module")
def nllb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.serve.languages import save_nllb

    return save_nllb(tmp_path_factory.mktemp("nllb"))


def test_a_translation_with_the_routing_that_nllb_was_trained_with(
    nllb: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from overspill import LLM, SamplingParams, Settings

    flags = ["--src-lang", "fra_Latn", "--tgt-lang", "deu_Latn", "--decoder-prompt", "ab"]
    words = ["generate", str(nllb), "le chat", *flags, "--temperature", "0", "--max-tokens", "5"]
    memory = ["--context", "32", "--device", "cpu", "--json"]
    params = SamplingParams(5, src_lang="fra_Latn", tgt_lang="deu_Latn", decoder_prompt="ab")
    found = []
    for fixed in (True, False):
        assert app([*words, *memory, *(["--fix-nllb-routing"] if fixed else [])]) == 0
        found.append(json.loads(capsys.readouterr().out)["token_ids"])
        settings = Settings(fix_nllb_routing=fixed)
        with LLM(nllb, context=32, device="cpu", settings=settings) as llm:
            assert llm.generate("le chat", params)[0].token_ids == found[-1]
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "NLLB", "a", "--tgt-lang", "fr"], "similar names: fra_Latn"),
        (["serve", "NLLB", "--src-lang", "xx", "--port", "0"], "src_lang='xx' is no language"),
        (
            ["chat", "NLLB"],
            "has an encoder and a decoder: it answers single prompts; use overspill",
        ),
        (["generate", "RUN", "a", "--tgt-lang", "fra_Latn"], "GPTMoE continues its prompt"),
        (["serve", "RUN", "--decoder-prompt", "a", "--port", "0"], "(--decoder-prompt)"),
        (["generate", "RUN", "a", "--fix-nllb-routing"], "fix_nllb_routing is for nllb-moe"),
        (["generate", "MIXTRAL", "a", "--src-lang", "a"], "--src-lang is for models with an enc"),
    ],
)
def test_flags_of_other_models_are_refused(
    words: list[str],
    message: str,
    nllb: Path,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from tests.train.finetune.tiny import save_mixtral

    places = {"NLLB": nllb, "RUN": run}
    if "MIXTRAL" in words:
        places["MIXTRAL"] = save_mixtral(tmp_path)
    assert app([str(places.get(word, word)) for word in words]) == 2
    error = capsys.readouterr().err
    assert message in error.splitlines()[-1]
