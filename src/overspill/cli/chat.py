"""`overspill chat`."""

import contextlib
import io
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from overspill.cli.arguments import Model
from overspill.cli.flags import with_flags
from overspill.cli.output import is_terminal, show
from overspill.core.errors import OverspillError
from overspill.serve.config import ServeConfig

if TYPE_CHECKING:
    from overspill.serve.chat import Chat
    from overspill.serve.llm import LLM
    from overspill.serve.params import SamplingParams

_HELP = """Chat with a Mixture-of-Experts model that may be larger than the GPU.

The model's chat template is used; a model without one continues the text. Ctrl-C ends an answer, \
/new begins a new conversation, /help lists the commands, Ctrl-D or /exit leaves. If the input is \
not a terminal, each line is a question, and only answers are printed.

[bold]Examples[/bold]

  overspill chat runs/nano

  overspill chat Qwen/Qwen3-30B-A3B --gpu-memory 8GiB --system "Answer briefly."

  overspill chat Qwen/Qwen3-30B-A3B --adapter runs/adapter
"""
_QUOTES = '"""'
_COMMANDS = """\
/new, /clear     forget the conversation and begin a new one
/help, /?        show this list
/exit, /bye      leave; so does Ctrl-D
Ctrl-C           stop the answer
\"""              begin and end a message of several lines, or one that begins with /"""
_COMMAND = re.compile(r"/([a-z]+|\?)\s*")
"""A line that is a command, known or not; /usr/bin is no command."""


def add_to(app: typer.Typer) -> None:
    system = Annotated[str | None, typer.Option(help="The system message.", show_default=False)]
    command = with_flags(_chat, {"model": Model, "system": system}, ServeConfig.settings())
    app.command("chat", help=_HELP)(command)


def _chat(model: str, system: str | None, as_json: bool, **flags: Any) -> None:
    """Chat on the terminal. With --json each answer is one line of JSON."""
    given = {name: value for name, value in flags.items() if value is not None}
    config = ServeConfig.make(given)
    params = config.params()
    from overspill.serve.chat import Chat

    notes = _Notes(shown=is_terminal(sys.stdin) and not as_json)
    notes.dim(f"loading {model} ...")
    with config.open(model) as llm:
        session = _Session(llm, Chat(llm, params, system), params, notes, as_json)
        notes.banner(model, llm)
        session.run()
    if session.failed and not notes.shown:
        raise typer.Exit(1)


class _Notes:
    """Printer of the banner, figures and errors beside the answers at a terminal.

    They go to the standard error if the answers go to a file.
    """

    def __init__(self, shown: bool) -> None:
        self.shown = shown
        self._console = Console(stderr=not is_terminal(sys.stdout), highlight=False, soft_wrap=True)
        self._errors = self._console if shown else Console(stderr=True, soft_wrap=True)

    def dim(self, text: str) -> None:
        if self.shown:
            self._console.print(Text(text, "dim"))

    def warn(self, text: str, style: str = "yellow") -> None:
        """Print a warning, for scripts too: they read it on the standard error."""
        self._errors.print(Text(text, style))

    def banner(self, model: str, llm: "LLM") -> None:
        template = "" if llm.has_chat_template else ", no chat template: it continues the text"
        adapter = "" if llm.adapter is None else f" with the adapter {llm.adapter}"
        self.dim(f"{model}{adapter}{template}")
        self.dim(llm.model.overspill.describe())
        self.dim(f"context of {llm.context:,} tokens")
        self.dim("Ctrl-C stops an answer, Ctrl-D or /exit leaves, /help lists the commands")


@dataclass(frozen=True)
class _Answer:
    """An answer, its length and its times."""

    text: str
    tokens: int
    first_after: float | None
    """Seconds from the question to the first token; None without a token."""
    rest: float
    """Seconds from the first token to the end."""
    finish_reason: str
    """Reason of its end; "stopped" after Ctrl-C."""

    @property
    def tokens_per_second(self) -> float | None:
        return (self.tokens - 1) / self.rest if self.tokens > 1 and self.rest > 0 else None


class _Session:
    """Loop over questions and commands until the end of the input. `failed` tells whether a
    question has ended with an error."""

    def __init__(
        self, llm: "LLM", chat: "Chat", params: "SamplingParams", notes: _Notes, as_json: bool
    ) -> None:
        self._llm = llm
        self._chat = chat
        self._params = params
        self._notes = notes
        self._as_json = as_json
        self._reader = _Reader(notes)
        self.failed = False
        self._commands: dict[str, Callable[[], object]] = {
            "new": self._forget, "clear": self._forget,
            "help": lambda: notes.dim(_COMMANDS), "?": lambda: notes.dim(_COMMANDS),
        }  # fmt: skip

    def run(self) -> None:
        while (message := self._reader.next()) is not None:
            command = None if message.quoted else _COMMAND.fullmatch(message.text)
            if command is None:
                self._answer(message.text)
            elif command[1] in ("exit", "bye", "quit"):
                return
            elif command[1] in self._commands:
                self._commands[command[1]]()
            else:
                self.failed = True
                self._notes.warn(
                    f"there is no command /{command[1]}; /help lists the commands. "
                    f"{_QUOTES}/{command[1]}{_QUOTES} sends it as a message."
                )

    def _forget(self) -> None:
        self._chat.forget()
        self._notes.dim("new conversation")

    def _answer(self, question: str) -> None:
        from overspill.serve.chat import QuestionTooLong

        left_out = self._chat.left_out
        try:
            answer = self._ask(question)
        except OverspillError as error:
            self.failed = self.failed or not isinstance(error, QuestionTooLong)
            self._tell_error(error)
            return
        if self._as_json:
            print(json.dumps(self._as_record(answer)), flush=True)
            return
        print()
        self._notes.dim(self._figures(answer))
        if self._chat.left_out > left_out:
            self._notes.warn(
                f"The conversation no longer fits into the context of {self._llm.context:,} "
                f"tokens: its oldest {self._chat.left_out} messages are left out. /new begins a "
                "new conversation."
            )
        if answer.finish_reason == "length" and self._chat.is_full:
            self._notes.warn(
                f"The context of {self._llm.context:,} tokens is full, so the answer was cut. "
                "/new begins a new conversation; --context allows a longer one."
            )

    def _ask(self, question: str) -> _Answer:
        text, tokens, reason = "", 0, "stopped"
        began = time.perf_counter()
        first: float | None = None
        pieces = self._chat.ask(question)
        try:
            for piece in pieces:
                if first is None and piece.token_ids:
                    first = time.perf_counter()
                text += piece.text
                tokens += len(piece.token_ids)
                reason = piece.finish_reason or reason
                if not self._as_json:
                    show(piece.text)
        except KeyboardInterrupt:
            pieces.close()
            if not self._notes.shown:  # a script is ended as a whole
                raise
        if first is None:
            return _Answer(text, tokens, None, 0.0, reason)
        return _Answer(text, tokens, first - began, time.perf_counter() - first, reason)

    def _tell_error(self, error: OverspillError) -> None:
        if self._as_json:
            print(json.dumps({"error": str(error)}), flush=True)
            return
        self._notes.warn(f"error: {error}", "red")

    def _figures(self, answer: _Answer) -> str:
        cut = answer.finish_reason == "length" and not self._chat.is_full
        return " · ".join(
            filter(
                None,
                (
                    "stopped" if answer.finish_reason == "stopped" else "",
                    f"cut at --max-tokens {self._params.max_tokens}" if cut else "",
                    f"{answer.tokens:,} tokens",
                    f"{speed:.1f} tokens/s" if (speed := answer.tokens_per_second) else "",
                    ""
                    if answer.first_after is None
                    else f"first after {_seconds(answer.first_after)}",
                    f"context {self._chat.used_tokens:,} of {self._llm.context:,}",
                ),
            )
        )

    def _as_record(self, answer: _Answer) -> dict[str, Any]:
        return {
            "answer": answer.text,
            "finish_reason": answer.finish_reason,
            "tokens": answer.tokens,
            "tokens_per_second": answer.tokens_per_second,
            "time_to_first_token": answer.first_after,
            "context_tokens": self._chat.used_tokens,
            "left_out_messages": self._chat.left_out,
        }


def _seconds(value: float) -> str:
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.1f} s"


@dataclass(frozen=True)
class _Message:
    """Typed text. Text between quotes is never a command."""

    text: str
    quoted: bool


class _Reader:
    """Reader of messages from the standard input."""

    def __init__(self, notes: _Notes) -> None:
        self._notes = notes
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")  # tokenizers take only UTF-8
        if notes.shown:
            with contextlib.suppress(ImportError):  # some builds of Python lack it
                import readline  # noqa: F401 - from now on `input` edits lines and has a history

    def next(self) -> _Message | None:
        """The next message; None at the end of the input, and after two Ctrl-C in a row."""
        interrupted = False
        while True:
            try:
                message = self._read()
            except EOFError:
                self._notes.dim("")  # the shell's prompt begins a line
                return None
            except KeyboardInterrupt:
                if interrupted or not self._notes.shown:
                    raise
                interrupted = True
                self._notes.dim("\nCtrl-D, /exit or another Ctrl-C leaves")
                continue
            interrupted = False
            if message.text:
                return message

    def _read(self) -> _Message:
        line = self._line("> ").strip()
        if not line.startswith(_QUOTES):
            return _Message(line, quoted=False)
        lines = [line.removeprefix(_QUOTES)]
        while not lines[-1].rstrip().endswith(_QUOTES):
            try:
                lines.append(self._line("  "))
            except EOFError:
                break
        lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
        return _Message("\n".join(lines).strip("\n"), quoted=True)

    def _line(self, prompt: str) -> str:
        if not self._notes.shown:
            if sys.stdin is None or not (line := sys.stdin.readline()):
                raise EOFError
            return line.removesuffix("\n")
        if is_terminal(sys.stdout):
            return input(prompt)
        print(prompt, end="", file=sys.stderr, flush=True)  # answers go to a file
        return input()
