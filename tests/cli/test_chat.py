"""`overspill chat`: its input is lines of a script, or a terminal."""

import builtins
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from overspill.cli import chat as chat_command
from overspill.cli.main import app
from overspill.core.errors import EngineError
from overspill.serve.chat import Chat
from tests.cli.trained import run as run  # a fixture

INTERRUPT = "\x03"
Say = Callable[..., tuple[int, str, str]]


class _Input(io.StringIO):
    """The standard input, of a script or of a terminal."""

    is_terminal = False

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.fixture
def script(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Say:
    """Runs the command with these lines as its input; returns its exit code, output and errors."""

    def say(lines: str | io.TextIOWrapper | None, *flags: str) -> tuple[int, str, str]:
        stream = _Input(lines) if isinstance(lines, str) else lines
        monkeypatch.setattr("sys.stdin", stream)
        capsys.readouterr()
        words = ["chat", str(run), "--max-tokens", "4", "--temperature", "0", "--context", "16"]
        code = app([*words, *flags])
        return code, *capsys.readouterr()

    return say


@pytest.fixture
def terminal(script: Say, monkeypatch: pytest.MonkeyPatch) -> Say:
    """The same with what is typed at a terminal; a line INTERRUPT is Ctrl-C."""

    def say(lines: str, *flags: str) -> tuple[int, str, str]:
        typed = iter(lines.splitlines())

        def read(prompt: str = "") -> str:
            line = next(typed, None)
            if line is None:
                raise EOFError
            if line == INTERRUPT:
                raise KeyboardInterrupt
            return line

        with monkeypatch.context() as patch:
            patch.setattr(builtins, "input", read)
            patch.setattr(_Input, "is_terminal", True)
            code, out, err = script("", *flags)
        return code, out + err, err  # notes: the output is no terminal

    return say


def test_each_line_of_a_script_is_answered(script: Say) -> None:
    def chat(lines: str) -> list[str]:
        code, out, err = script(lines, "--json")
        assert (code, err) == (0, "")
        return [json.loads(line)["answer"] for line in out.splitlines()]

    first, _ = chat("a\n\nb\n")
    assert chat("a\n/new\na\n/exit\nb\n") == [first, first]
    assert chat("a\n/clear\na\n/bye\nb\n") == [first, first]


def test_a_script_gets_answers_and_nothing_else(script: Say) -> None:
    _, as_json, _ = script("a\n", "--json")
    record = json.loads(as_json)
    assert script("/help\na\n") == (0, record["answer"] + "\n", "")
    assert record["tokens"] == 4
    assert record["tokens_per_second"] > 0
    assert record["time_to_first_token"] > 0
    assert record["context_tokens"] == 5
    assert record["finish_reason"] == "length"


def test_a_terminal_shows_the_model_and_figures_of_each_answer(terminal: Say, run: Path) -> None:
    code, shown, _ = terminal("/help\na\n")
    assert code == 0
    for text in (
        f"{run}, no chat template: it continues the text",
        "all 8 experts on cpu",
        "context of 16 tokens",
        "Ctrl-D or /exit leaves, /help lists the commands",
        "/new, /clear     forget the conversation",
        "cut at --max-tokens 4 · 4 tokens · ",
        " tokens/s · first after ",
        "context 5 of 16",
    ):
        assert text in shown, shown


def test_a_message_of_several_lines_is_between_quotes(
    script: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    ask = Chat.ask
    monkeypatch.setattr(Chat, "ask", lambda self, text: asked.append(text) or ask(self, text))
    code, _, _ = script(
        '"""a\n /new\n\nb"""\n"""/new"""\n"""\n"""\n/usr/bin\n"""c\n', "--context", "64"
    )
    assert code == 0
    assert asked == ["a\n /new\n\nb", "/new", "/usr/bin", "c"]


def test_input_that_is_not_text_is_read_with_replacements(
    script: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    ask = Chat.ask
    monkeypatch.setattr(Chat, "ask", lambda self, text: asked.append(text) or ask(self, text))
    stream = io.TextIOWrapper(io.BytesIO(b"a\xff\n"), encoding="utf-8", errors="strict")
    assert script(stream)[0] == 0
    assert asked == ["a\ufffd"]


def test_a_closed_input_is_an_empty_one(script: Say) -> None:
    assert script(None) == (0, "", "")


def test_an_unknown_command_is_told_and_not_sent(script: Say) -> None:
    code, out, err = script("/foo\n")
    assert (code, out) == (1, "")
    assert "there is no command /foo; /help lists the commands" in err
    assert '"""/foo""" sends it' in err


def test_a_question_that_is_too_long_ends_only_its_answer(script: Say) -> None:
    code, out, err = script("x" * 5000 + "\na\n")
    assert code == 0
    assert err.startswith("error: the question has 5000 tokens, the context of 16 has room for 12")
    assert len(out.splitlines()) >= 1
    _, out, _ = script("x" * 5000 + "\na\n", "--json", "--system", "S")
    wrong, answered = map(json.loads, out.splitlines())
    assert wrong["error"].startswith("the question and the system message have 5002 tokens")
    assert answered["answer"]


def test_a_full_context_is_told_and_the_chat_goes_on(script: Say) -> None:
    code, _, err = script("abcdef\nghi\n")
    assert code == 0
    assert "the context of 16 tokens: its oldest 2 messages are left out. /new begins" in " ".join(
        err.split()
    )
    code, _, err = script("abcdefg\n", "--max-tokens", "99")
    assert code == 0
    assert "The context of 16 tokens is full, so the answer was cut. /new begins" in err
    assert "full" not in script("/new\na\n")[2]


def test_an_error_of_the_engine_is_told_and_fails_a_script(
    script: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Chat, question: str) -> Iterator[object]:
        raise EngineError("broken")
        yield

    monkeypatch.setattr(Chat, "ask", fail)
    code, out, err = script("a\nb\n")
    assert (code, out, err) == (1, "", "error: broken\n" * 2)


def test_ctrl_c_stops_the_answer_and_not_the_program(
    terminal: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    def show(text: str) -> None:
        shown.append(text)
        if len(shown) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(chat_command, "show", show)
    code, told, _ = terminal("a\nb\n")
    assert code == 0
    assert "stopped · 2 tokens" in told
    assert "cut at --max-tokens 4" in told, "the second question is answered"


def test_ctrl_c_at_the_prompt_leaves_only_if_pressed_twice(terminal: Say) -> None:
    code, told, _ = terminal(f"{INTERRUPT}\na\n{INTERRUPT}\n")
    assert code == 0
    assert told.count("Ctrl-D, /exit or another Ctrl-C leaves") == 2
    assert "4 tokens" in told
    assert terminal(f"{INTERRUPT}\n{INTERRUPT}\na\n")[0] == 130


def test_ctrl_c_ends_a_script(script: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    def show(text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(chat_command, "show", show)
    assert script("a\nb\n")[0] == 130
