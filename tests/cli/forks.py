"""The command line in processes that can be killed, without waiting for torch each time.

Run as a program, it imports everything once and then forks a child for every command line that it
reads. Nothing has computed before the fork, so no thread of torch's is lost by it.
"""

import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_HANDLERS = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
SOURCES = Path(__file__).parents[2] / "src"


class Forks:
    """Starts commands; each is a process of its own."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # One thread each: on tensors this small, threads only wait for each other.
            env={**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"},
        )
        self._ask("ready")

    def start(
        self, arguments: list[str], log: Path, environment: dict[str, str] | None = None
    ) -> int:
        """Run `overspill`, or a script, with these arguments; its process id. `log` gets what it
        prints."""
        return int(self._ask("start", arguments, str(log), environment or {}))

    def wait(self, pid: int) -> int:
        """The exit code, negative for the signal that ended it."""
        return int(self._ask("wait", pid))

    def run(self, arguments: list[str], log: Path) -> int:
        return self.wait(self.start(arguments, log))

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(timeout=30)

    def _ask(self, *request: object) -> str:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return self._server.stdout.readline()


class Fork:
    """A process that runs `overspill`, with the interface of `subprocess.Popen`."""

    def __init__(
        self, arguments: list[str], environment: Mapping[str, str], log: str | None = None
    ) -> None:
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        os.setsid()
        os.environ.update(environment)
        if log is not None:
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
            os.dup2(out, 1)
            os.dup2(out, 2)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _HANDLERS[number])
        code = _run(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)


def _run(arguments: list[str]) -> int:
    """Runs the command line, or a script."""
    if not arguments[0].endswith(".py"):
        return int(sys.modules["overspill.cli.main"].app(arguments))
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")
    return 0


def _serve() -> None:
    # Imported once for all children, which would otherwise each do it late.
    for name in (
        "overspill.cli.main",
        "overspill.parallel.watchdog",
        "torch._dynamo",
        "overspill.train.trainer",
        "overspill.train.finetune.finetuner",
        "transformers.models.mixtral.modeling_mixtral",
    ):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else each child would count the objects of all modules
    # no pictures: they take as long as training
    sys.modules["overspill.train.loop"].draw_loss = lambda *args: None  # type: ignore[attr-defined]

    # ranks of --gpus are forked too, and a rank that is stopped is noticed soon
    main, watchdog = sys.modules["overspill.cli.main"], sys.modules["overspill.parallel.watchdog"]
    main.rank_command = lambda arguments: lambda more: Fork(arguments, more)  # type: ignore[attr-defined]
    watchdog.SILENT = 8  # type: ignore[attr-defined]

    for line in sys.stdin:
        what, *rest = json.loads(line)
        if what == "start":
            arguments, log, environment = rest
            print(Fork(arguments, environment, log).pid, flush=True)
        elif what == "wait":
            print(os.waitstatus_to_exitcode(os.waitpid(rest[0], 0)[1]), flush=True)
        else:
            print("", flush=True)


if __name__ == "__main__":
    _serve()
