"""The commands of README.md, and a shell script that runs them as a reader would.

python -m tests.docs.readme FOLDER           # in a new clone below FOLDER, with fewer steps
python -m tests.docs.readme FOLDER --full    # exactly as they are; installs from the network
"""

import argparse
import os
import re
import shlex
import socket
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
_BLOCK = re.compile(r"```(bash|sh|python|py)\n(.*?)```", re.DOTALL)
_FEW = "4"
_SMALL = "--steps 4 --d-model 32 --d-hidden 32 --heads 2 --seq-len 64 --eval-every 0"
"""For `make train`; the model keeps its layers and experts."""


@dataclass(frozen=True)
class Block:
    """`bash` blocks run on any machine; `sh` blocks need files or a GPU, which the text before
    them names."""

    language: str
    text: str
    before: str
    """The paragraph above it."""

    @property
    def commands(self) -> list[str]:
        """One for each line, without comments."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [shlex.join(words) for line in lines if (words := shlex.split(line, comments=True))]


def blocks(page: str = README) -> Iterator[Block]:
    for match in _BLOCK.finditer(page):
        before = page[: match.start()].rstrip().rpartition("\n\n")[2]
        yield Block(match[1], match[2], before)


def script(full: bool, port: int) -> str:
    """All `bash` blocks in their order, the server in the background, and the client's lines."""
    lines = ["set -euo pipefail"]
    for block in blocks():
        if block.language == "bash":
            for command in block.commands:
                lines += [f"echo {shlex.quote(f'$ {command}')}", *_run(command, full, port)]
        elif block.text.startswith("from openai"):
            lines += ["python - <<'END'", block.text.rstrip(), "END"]
    lines += ["kill -INT $server", "wait $server || true", "echo all commands ran"]
    return "\n".join(lines).replace(":8000", f":{port}") + "\n"


def _run(command: str, full: bool, port: int) -> list[str]:
    if not full:
        command = re.sub(r"--steps (\d+)", lambda m: f"--steps {min(int(m[1]), 8)}", command)
        command = re.sub(r"--max-tokens \d+", "--max-tokens 8", command)
        if command == "make train":
            command += f" TRAIN_ARGS={shlex.quote(_SMALL)}"
    if command.startswith("overspill chat"):
        return [f"echo 'a question' | {command}"]
    if command.startswith("overspill serve"):
        ready = f"curl --silent --fail http://127.0.0.1:{port}/health > /dev/null"
        return [
            f"{command} --port {port} & server=$!",
            f"until {ready}; do kill -0 $server; sleep 1; done",
        ]
    return [command]


def clone(folder: Path) -> Path:
    """A new clone of this repository below `folder`."""
    checkout = folder / "overspill"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(checkout)], check=True)
    return checkout


def install_offline(checkout: Path) -> None:
    """A .venv as `make train` leaves it, with the packages of this Python."""
    home = checkout / ".venv"
    venv.create(home, with_pip=False, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = home / "lib" / version / "site-packages"
    paths = [str(checkout / "src"), sysconfig.get_paths()["purelib"]]
    (packages / "paths.pth").write_text("\n".join(paths) + "\n")
    for name, module in (("overspill", "overspill"), ("pip", "pip")):
        program = home / "bin" / name
        program.write_text(f'#!/bin/sh\nexec "{home}/bin/python" -m {module} "$@"\n')
        program.chmod(0o755)
    for stamp in (".pip", ".torch", ".early", ".installed"):
        (home / stamp).touch()


def run(folder: Path, full: bool) -> subprocess.CompletedProcess[str]:
    """Runs the commands in a new clone, with an empty home."""
    checkout = clone(folder)
    if not full:
        install_offline(checkout)
    (folder / "home").mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "CXX") if name in os.environ}
    kept |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    environment = {**kept, "HOME": str(folder / "home"), "CUDA_VISIBLE_DEVICES": ""}
    with open(folder / "log.txt", "w+") as log:
        done = subprocess.run(
            ["bash", "-c", script(full, port)], cwd=checkout, env=environment, stdout=log,
            stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        log.seek(0)
        return subprocess.CompletedProcess(done.args, done.returncode, stdout=log.read())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--full", action="store_true")
    given = parser.parse_args()
    given.folder.mkdir(parents=True)
    done = run(given.folder.resolve(), given.full)
    print(done.stdout)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
