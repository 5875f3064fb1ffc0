"""The command line in processes that can be killed, without waiting for torch each time."""

import sys
from pathlib import Path

from tests.fork_server import fork_server


class Forks:
    """Starts commands; each is a process of its own."""

    def __init__(self) -> None:
        # else each process would import them late
        fork_server().preload(
            [
                "torch._dynamo",
                "overspill.train.trainer",
                "overspill.train.finetune.finetuner",
                "transformers.models.mixtral.modeling_mixtral",
            ]
        )

    def start(self, arguments: list[str], log: Path) -> int:
        """Run `overspill` with these arguments; its process id. `log` gets what it prints."""
        return fork_server().start(_run, arguments, log=log)

    def wait(self, pid: int) -> int:
        """The exit code, negative for the signal that ended it."""
        return fork_server().wait(pid)

    def run(self, arguments: list[str], log: Path) -> int:
        return fork_server().run(_run, arguments, log=log)


def _run(arguments: list[str]) -> int:
    from overspill.cli.main import app

    # no pictures: they take as long as training
    sys.modules["overspill.train.loop"].draw_loss = lambda *args: None  # type: ignore[attr-defined]
    return app(arguments)
