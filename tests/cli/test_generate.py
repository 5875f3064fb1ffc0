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
        (["generate", "RUN", "a", "--top-p", "0"], "top_p=0.0 must be above 0"),
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
