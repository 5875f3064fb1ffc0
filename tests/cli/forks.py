"""The command line in processes that can be killed, without waiting for torch each time."""

import contextlib
import math
import os
import runpy
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from overspill.parallel.rank_logs import RankLogs
from tests.fork_server import fork_server

_IMPORTS = (
    "overspill.cli.main",
    "overspill.parallel.watchdog",
    "torch._dynamo",
    "overspill.train.trainer",
    "overspill.train.finetune.finetuner",
    "transformers.models.mixtral.modeling_mixtral",
    "rich._emoji_codes",
    "tests.cli.first_use",
)


# Variables in the environment of a command. A test changes the files while it runs: so what it does
# comes before the end, also on a busy machine.
SILENT = "TESTS_SILENT"  # seconds after which a rank that is stopped is noticed, and ended soon
HOLD = "TESTS_HOLD"  # a file with the number of steps after which training waits while it exists
SLOW = "TESTS_SLOW"  # a file: batches of a server take 50 ms until it exists


class Forks:
    """Starts commands; each is a process of its own."""

    def __init__(self) -> None:
        fork_server().preload(_IMPORTS)  # else each process would import them late

    def start(
        self, arguments: list[str], log: Path, environment: dict[str, str] | None = None
    ) -> int:
        """Run `overspill`, or a script, with these arguments; its process id. `log` gets what it
        prints."""
        return fork_server().start(_run, arguments, environment or {}, log=log)

    def wait(self, pid: int) -> int:
        """The exit code, negative for the signal that ended it."""
        return fork_server().wait(pid)

    def run(self, arguments: list[str], log: Path) -> int:
        return fork_server().run(_run, arguments, {}, log=log)


class Fork:
    """A rank of `overspill`, with the interface of `subprocess.Popen`."""

    def __init__(
        self, arguments: list[str], logs: RankLogs, environment: Mapping[str, str]
    ) -> None:
        self._code: int | None = None
        with logs.streams(int(environment["RANK"])) as streams:
            self.pid = os.fork()
            if self.pid:
                return
            for stream, end in enumerate(streams, 1):
                os.dup2(end, stream)
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", 1, closefd=False) for fd in (1, 2))
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        code = _run(arguments, environment)
        sys.stdout.flush()
        os._exit(code)

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)


def _hold_steps(file: Path) -> None:
    from overspill.train.team import Team

    seed_step = Team.seed_step

    def last() -> float:
        try:
            return int(file.read_text())
        except FileNotFoundError:  # the test removes it
            return math.inf

    def hold(self: Team, seed: int, step: int) -> None:
        while step >= last():
            time.sleep(5e-3)
        seed_step(self, seed, step)

    Team.seed_step = hold  # type: ignore[method-assign]


def _slow_batches(file: Path) -> None:
    from torch import nn

    def wait(module: nn.Module, _: object) -> None:
        if isinstance(module, nn.Embedding) and not file.exists():
            time.sleep(0.05)

    nn.modules.module.register_module_forward_pre_hook(wait)


def _run(arguments: list[str], environment: Mapping[str, str]) -> int:
    """Runs the command line, or a script."""
    os.environ.update(environment)
    main, runs, launcher, join, watchdog, loop = (
        sys.modules[f"overspill.{name}"]
        for name in (
            "cli.main",
            "cli.runs",
            "parallel.launcher",
            "parallel.join",
            "parallel.watchdog",
            "train.loop",
        )
    )
    # no pictures: they take as long as training
    loop.draw_loss = lambda *args: None  # type: ignore[attr-defined]
    # it counts the objects of all imported modules, which the server has frozen
    loop.short_collections = contextlib.nullcontext  # type: ignore[attr-defined]
    # ranks of --gpus are forked too
    runs.rank_command = lambda *command: lambda more: Fork(*command, more)  # type: ignore[attr-defined]
    if SILENT in os.environ:
        watchdog.SILENT = int(os.environ[SILENT])  # type: ignore[attr-defined]
        # a stopped rank does not end by itself, and was not killed
        launcher.GRACE = join.LAUNCHER_FIRST = 0.1  # type: ignore[attr-defined]
    if HOLD in os.environ:
        _hold_steps(Path(os.environ[HOLD]))
    if SLOW in os.environ:
        _slow_batches(Path(os.environ[SLOW]))
    if not arguments[0].endswith(".py"):
        return int(main.app(arguments))
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")
    return 0
