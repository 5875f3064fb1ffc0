import io
import json
import sys
from pathlib import Path

import pytest

from overspill.cli.main import app
from overspill.core.visible import visible
from overspill.serve.chat import Chat
from overspill.serve.llm import LLM
from overspill.serve.params import SamplingParams
from tests.train.fakes import tiny_settings


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    flags = [
        word
        for name, value in tiny_settings(folder, steps=1).items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    assert app(["train", *flags]) == 0
    return folder / "run"


def test_generate_streams_what_json_gives(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(run), "abc", "--max-tokens", "6", "--seed", "3"]
    assert app([*words, "--mode", "on-demand", "--slots", "0"]) == 0
    text = capsys.readouterr().out
    assert app([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert text == result["text"] + "\n"
    assert result["prompt_tokens"] == 3
    assert result["stats"]["new_tokens"] == len(result["token_ids"])


def test_a_terminal_gets_no_control_characters(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is untrained: many of its bytes are control characters."""
    words = ["generate", str(run), "abc", "--max-tokens", "40", "--seed", "3"]
    shown = []
    for terminal in (False, True):
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
        assert app(words) == 0
        shown.append(capsys.readouterr().out)
    assert shown[1] == visible(shown[0]) != shown[0]


def test_chat_answers_each_line(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def chat(lines: str) -> list[str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        words = ["chat", str(run), "--max-tokens", "4", "--temperature", "0", "--json"]
        assert app(words) == 0
        return [json.loads(line)["answer"] for line in capsys.readouterr().out.splitlines()]

    first, _ = chat("a\n\nb\n")
    assert chat("a\n/new\na\n/exit\nb\n") == [first, first]


def test_a_chat_leaves_out_its_oldest_turns(run: Path) -> None:
    with LLM(str(run), context=32) as llm:
        chat = Chat(llm, SamplingParams(max_tokens=4), system="S")
        prompts = []
        for question in "abcdefgh":
            "".join(chat.ask(question))
            prompts.append(len(llm.chat_tokens(chat.turns)))
        assert len(chat.turns) == 16
        assert prompts[-1] > llm.context


def test_a_question_that_is_too_long_ends_only_its_answer(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * 5000 + "\na\n"))
    assert app(["chat", str(run), "--max-tokens", "2"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("error: the question has 5000 tokens")
    assert rest


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "RUN", ""], "the prompt is empty"),
        (["generate", "RUN"], "PROMPT"),
        (["generate", "/nowhere", "a"], "/nowhere does not exist"),
        (["generate", "RUN", "a", "--top-p", "0"], "top_p=0.0 must be above 0"),
        (["generate", "RUN", "a", "--mode", "fast"], "--mode"),
        (["generate", "RUN", "a", "--mode", "pre-gated"], "train them with overspill pregate"),
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
