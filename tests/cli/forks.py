"""The command line in processes that can be killed, without waiting for torch each time.

Run as a program, it imports everything once and then forks a child for every command line that it
reads. Nothing has computed before the fork, so no thread of torch's is lost by it.
"""

import gc
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

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

    def start(self, arguments: list[str], log: Path) -> int:
        """Run `overspill` with these arguments; its process id. `log` gets what it prints."""
        return int(self._ask("start", arguments, str(log)))

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


def _serve() -> None:
    from overspill.cli.main import app

    # Imported once for all children, which would otherwise each do it late.
    for name in (
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

    for line in sys.stdin:
        what, *rest = json.loads(line)
        if what == "start":
            arguments, log = rest
            pid = os.fork()
            if pid == 0:
                out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(out, 1)
                os.dup2(out, 2)
                code = app(arguments)
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
            print(pid, flush=True)
        elif what == "wait":
            print(os.waitstatus_to_exitcode(os.waitpid(rest[0], 0)[1]), flush=True)
        else:
            print("", flush=True)


if __name__ == "__main__":
    _serve()
