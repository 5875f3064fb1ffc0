"""Ranks that `--gpus` starts: they train as one process, fail together, and resume."""

import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from overspill.cli import runs
from overspill.cli.main import app
from overspill.parallel.launcher import rank_command
from overspill.parallel.rank_logs import RankLogs
from overspill.train.metrics import read_lines
from overspill.train.run_folder import RunFolder
from tests.cli.forks import HOLD, SILENT, Forks
from tests.ports import free_port
from tests.slow import slow_names
from tests.train.fakes import tiny_settings
from tests.train.finetune import tiny as finetune

ROOT = Path(__file__).resolve().parents[2]
TINY = ("tiny", "tuned")  # folders that the example names
LONG = {"steps": 10, "save_every": 2, "eval_every": 5, "gpus": 2, "layers": 1}


def _words(settings: dict[str, Any]) -> list[str]:
    flags = {f"--{name.replace('_', '-')}": value for name, value in settings.items()}
    return [str(word) for pair in flags.items() for word in pair if word is not True]


def _arguments(folder: Path, out: str, **changes: Any) -> list[str]:
    settings = {"batch": 4, "steps": 8, "save_every": 2, "keep": 9, **changes}
    return ["train", *_words(tiny_settings(folder, out=str(folder / out), **settings))]


def _resume(out: Path, **changes: Any) -> list[str]:
    return ["train", "--resume", "--out", str(out), *_words(changes)]


def _numbers(out: Path) -> list[float]:
    lines = read_lines(out / "metrics.jsonl")
    return [line[name] for line in lines for name in ("loss", "eval_loss") if name in line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


# -- losses --------------------------------------------------------------------------------------


def test_any_number_of_ranks_and_nodes_resumes_to_the_losses_of_one_process(
    forks: Forks, folder: Path, tmp_path: Path
) -> None:
    out, log = folder / "run", folder / "run.log"
    changes = {"steps": 5, "save_every": 1, "eval_every": 5}
    assert forks.run(_arguments(folder, "run", **changes), log) == 0, log.read_text()
    expected = _numbers(out)
    for step, ranks, *flags in ((1, "2 x 2"), (2, 1), (3, 2, "--shard-dense")):
        for path in (out / "checkpoints").iterdir():
            if int(path.name.removeprefix("step-")) > step:
                shutil.rmtree(path)
        if ranks == "2 x 2":
            codes, text = _torchrun(forks, [_resume(out)] * 4, tmp_path, node_size=2)
        else:
            codes = [forks.run([*_resume(out, gpus=ranks), *flags], log)]
            text = log.read_text()
        assert not any(codes), text
        assert text.count("step 5/5  loss") == 1  # one display
        assert ("rank 0 of" in text) == (ranks != 1)
        assert _numbers(out) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_ranks_divide_each_micro_batch(forks: Forks, folder: Path) -> None:
    log, changes = folder / "log.txt", {"accumulate": 2, "steps": 3}
    for out, more in (("alone", {}), ("grouped", {"gpus": 2})):
        assert forks.run(_arguments(folder, out, **changes, **more), log) == 0, log.read_text()
    words = [*_arguments(folder, "single", **changes, gpus=2), "--no-group"]
    words += ["--placement", "dynamic", "--mode", "host"]
    assert forks.run(words, log) == 0, log.read_text()
    assert "most over mean" in log.read_text()
    lines = [each for each in read_lines(folder / "single" / "metrics.jsonl") if "loss" in each]
    assert 1 <= lines[-1]["rank_balance"] <= lines[-1]["rank_balance_static"]
    expected = pytest.approx(_numbers(folder / "alone"), rel=1e-5)
    assert _numbers(folder / "grouped") == expected
    assert _numbers(folder / "single") == expected


# -- failures ------------------------------------------------------------------------------------


class Running:
    """A run of two ranks that waits after three steps, a resumed one after one more, until
    `go_on`."""

    def __init__(
        self, forks: Forks, arguments: list[str], out: Path, environment: dict[str, str]
    ) -> None:
        self.out, self.log, self._forks = out, out.with_suffix(".log"), forks
        self._hold, step = out.with_suffix(".hold"), max(3, self._last_step() + 1)
        self._hold.write_text(str(step))
        self.launcher = forks.start(arguments, self.log, {HOLD: str(self._hold), **environment})
        self._wait(lambda: self._last_step() == step)
        self.find_ranks()

    def find_ranks(self) -> None:
        children = Path(f"/proc/{self.launcher}/task/{self.launcher}/children").read_text()
        self.ranks = [int(pid) for pid in children.split()]

    def _last_step(self) -> int:
        return max((line["step"] for line in read_lines(self.out / "metrics.jsonl")), default=0)

    def go_on(self) -> None:
        self._hold.unlink()

    def await_line(self, part: str) -> None:
        self._wait(lambda: part in self.log.read_text())

    def _wait(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.01)

    def end(self) -> tuple[int, str]:
        """The exit code and the first line that is no progress, when all processes are gone."""
        code = self._forks.wait(self.launcher)
        self._wait(lambda: not any(Path(f"/proc/{pid}").exists() for pid in self.ranks))
        lines = self.log.read_text().splitlines()
        return code, next((line for line in lines if line.startswith("error")), lines[-1])


@pytest.fixture
def running(forks: Forks, folder: Path) -> Iterator[Callable[..., Running]]:
    """Starts the run, or resumes it."""
    out, found = folder / "failing", list[Running]()

    def start(*flags: str, **environment: str) -> Running:
        again = _resume(out) if found else _arguments(folder, "failing", **LONG)
        found.append(Running(forks, [*again, *flags], out, environment))
        return found[-1]

    yield start
    for run in found:
        for pid in run.ranks:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
    shutil.rmtree(out)  # the next test starts a new run


def test_ranks_fail_together_and_resume_to_the_same_losses(
    forks: Forks, folder: Path, running: Callable[..., Running]
) -> None:
    run = running("--max-restarts", "1")
    os.kill(run.ranks[1], signal.SIGKILL)
    run.await_line(f"resuming from {run.out}/checkpoints/step-00000002")
    run.find_ranks()
    os.kill(run.ranks[0], signal.SIGKILL)
    logs = run.out / "logs"
    killed = "error: rank {0} was killed by SIGKILL; its output is in {1}/rank-{0}.log"
    assert run.end() == (1, killed.format(1, logs))
    said = [line for line in run.log.read_text().splitlines() if not line.startswith("step")]
    assert said[-2:] == [
        killed.format(0, logs),
        f"the output of each rank is in {logs}/rank-0.log to rank-1.log",
    ]
    assert "restart 1 of 1, from step-00000002" in said
    first = (logs / "rank-0.log").read_text()
    assert [first.count(part) for part in ("step 1/10", "resuming from")] == [1, 1]

    run = running("--max-restarts", "0")
    # a full disk: the log is smaller than this, a file of the checkpoint is larger
    resource.prlimit(run.ranks[1], resource.RLIMIT_FSIZE, (2048, 2048))
    run.go_on()
    code, line = run.end()
    assert code == 2
    assert "on rank 1: DiskError" in line or line.startswith("error: rank 1: ")
    assert "(File too large); free some space" in line
    assert not list((run.out / "checkpoints").glob(".tmp-*"))

    run = running(**{SILENT: "4"})
    os.kill(run.ranks[1], signal.SIGSTOP)
    whole = folder / "whole.log"  # meanwhile
    assert forks.run(_arguments(folder, "whole", **LONG), whole) == 0, whole.read_text()
    assert run.end() == (1, "error: rank 1 has not responded for 4 s; it may be stopped")

    run = running()
    os.kill(run.launcher, signal.SIGINT)
    run.await_line("stopping after this step")
    run.go_on()
    code, line = run.end()
    assert (code, line) == (130, f"to continue: overspill train --resume --out {run.out}")
    newest = max(path.name for path in (run.out / "checkpoints").iterdir())
    step = list(read_lines(run.out / "metrics.jsonl"))[-1]["step"]
    assert newest == f"step-{step:08d}"

    assert forks.run(_resume(run.out), run.log) == 0, run.log.read_text()
    assert _numbers(run.out) == _numbers(folder / "whole")


class Attempts:
    """A launcher whose ranks write the checkpoint of each attempt, if it has one, and then end with
    its code."""

    def __init__(self, out: Path, *attempts: tuple[int, int | None]) -> None:
        self.given: list[list[str]] = []
        self._out, self._left = out, list(attempts)

    def launch(self, count: int, arguments: list[str], logs: RankLogs) -> int:
        assert count == 2
        self.given.append(arguments)
        code, step = self._left.pop(0)
        if step is not None:
            (self._out / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
        return code


@pytest.mark.parametrize(
    ("attempts", "flags", "resumed"),
    [
        ([(1, 2), (1, None), (0, 4)], [], [False, True, True]),
        ([(1, 2), (1, 4), (1, 6)], [], [False, True, True]),  # no more restarts
        ([(1, 2), (130, None)], [], [False, True]),
        ([(2, None)], [], [False]),  # nothing to continue, as after a wrong flag
        ([(1, None), (0, None)], ["--resume"], [True, True]),
    ],
)
def test_ranks_restart_from_checkpoints(
    attempts: list[tuple[int, int | None]], flags: list[str], resumed: list[bool],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    found = Attempts(tmp_path, *attempts)
    monkeypatch.setattr(runs, "launch", found.launch)
    monkeypatch.setattr(runs, "rank_command", lambda arguments, logs: arguments)
    if flags:
        (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    needed = runs.RanksNeeded(2, RunFolder(tmp_path), restarts=2)
    assert runs.start_ranks(["train", *flags], needed) == attempts[-1][0]
    assert ["--resume" in given for given in found.given] == resumed
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(resumed) - 1
    assert not lines or lines[0].startswith("restart 1 of 2, from step-0000000")


def test_restarts_need_ranks_and_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--gpus", "2"], ["--out", "run"]):
        assert app(["train", "nano", "--max-restarts", "1", *flags]) == 2
        assert "error: --max-restarts 1 starts the ranks of --gpus again" in capsys.readouterr().err


def test_binding_needs_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert app(["train", "nano", "--numa-binding", "node"]) == 2
    assert "--numa-binding node binds the ranks of --gpus or torchrun" in capsys.readouterr().err


@pytest.mark.slow
def test_ranks_end_with_a_launcher_that_is_killed(
    forks: Forks, running: Callable[..., Running]
) -> None:
    run = running()
    os.kill(run.launcher, signal.SIGKILL)  # the system ends the ranks
    assert run.end()[0] == -signal.SIGKILL
    assert forks.run(_resume(run.out), run.log) == 0, run.log.read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": 3}, "--batch 4 must be a multiple of the 3 ranks"),
        pytest.param(
            {"gpus": 2, "numa_binding": "node"},
            "--numa-binding node needs a GPU for each rank",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"gpus": 2, "data": "/no/such"},
            "--data /no/such does not exist",
            marks=pytest.mark.slow,
        ),
        pytest.param({"gpus": 2, "device": "cuda"}, "--device cuda: torch", marks=pytest.mark.slow),
    ],
)
def test_what_all_ranks_refuse_is_said_once(
    forks: Forks, folder: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    log = tmp_path / "log.txt"
    assert forks.run(_arguments(folder, "refused", **changes), log) == 2, log.read_text()
    (line,) = [line for line in log.read_text().splitlines() if line.startswith("error")]
    assert message in line
    assert line.startswith("error: rank ")
    assert not (folder / "refused").exists()


def _torchrun(
    forks: Forks, arguments: list[list[str]], logs: Path, node_size: int | None = None
) -> tuple[list[int], str]:
    """The exit codes of ranks that are started as torchrun does, and what they print. With
    `node_size` on several nodes, which are all this machine."""
    port, ranks = free_port(), []
    for rank, words in enumerate(arguments):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % (node_size or len(arguments))),
            "WORLD_SIZE": str(len(arguments)),
            "LOCAL_WORLD_SIZE": str(node_size or len(arguments)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        ranks.append(forks.start(words, logs / f"log-{rank}", environment))
    codes = [forks.wait(pid) for pid in ranks]
    return codes, "".join((logs / f"log-{rank}").read_text() for rank in range(len(ranks)))


def test_ranks_of_torchrun_with_different_flags_are_refused(
    forks: Forks, folder: Path, tmp_path: Path
) -> None:
    lines = [_arguments(folder, "different", lr=rate) for rate in (1e-3, 2e-3)]
    codes, text = _torchrun(forks, lines, tmp_path)
    assert codes == [2, 2]
    assert "--lr must be the same on all ranks: rank 0 has 0.001, rank 1 0.002" in text
    assert text.count("error") == 1


# -- as users start them -------------------------------------------------------------------------

EXAMPLE = ROOT / "examples" / "several_gpus.py"
COMMANDS = [
    shlex.split(line)
    for line in EXAMPLE.read_text().split('"""')[1].splitlines()
    if line.startswith("    ")
]


def _small(folder: Path) -> list[str]:
    """Flags for a smaller model than nano."""
    given = ("out", "device", "steps")
    settings = tiny_settings(folder, batch=4, eval_every=0)
    return _words({name: value for name, value in settings.items() if name not in given})


@pytest.mark.slow
def test_the_commands_of_the_example_run(forks: Forks, folder: Path, tmp_path: Path) -> None:
    """Each in forked processes, which start sooner."""
    for program, *words in COMMANDS:
        words = [word.replace("runs/", f"{tmp_path}/") for word in words]
        words = [str(tmp_path / word) if word.split("/")[0] in TINY else word for word in words]
        words = [str(EXAMPLE.parent / Path(w).name) if w.endswith(".py") else w for w in words]
        if "train" in words and "--resume" not in words:
            words += _small(folder)
        if "finetune" in words:
            words += ["--steps", "4"]
        log = tmp_path / "log.txt"
        if program == "torchrun":
            assert words[:2] == ["--nproc-per-node", "2"]
            words = words[4:] if words[2] == "-m" else words[2:]
            codes, text = _torchrun(forks, [words] * 2, tmp_path)
            assert codes == [0, 0], text
        else:
            assert program == "python" or words[0] in ("train", "finetune")
            assert forks.run(words, log) == 0, log.read_text()
    assert _numbers(tmp_path / "two")[:4] == _numbers(tmp_path / "same")[:4]
    for name in ("tuned/final", "tuned"):
        assert (tmp_path / name / "model.safetensors.index.json").is_file()


def test_a_rank_of_gpus_is_a_new_process_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the given words and environment. It fails before it imports torch."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    logs = RankLogs(tmp_path / "logs", after=tmp_path)
    process: Any = rank_command(["train", "nano"], logs)({"RANK": "4", "WORLD_SIZE": "4"})
    assert os.getsid(process.pid) == process.pid  # Ctrl-C in the terminal does not reach it
    assert process.wait() == 2
    logs.close()
    assert capfd.readouterr().err == "error: RANK=4 is not below WORLD_SIZE=4\n"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_commands_run_in_new_processes(folder: Path, tmp_path: Path) -> None:
    """Importing torch takes seconds in each rank."""
    programs = {"torchrun": ["-m", "torch.distributed.run"], "overspill": ["-m", "overspill"]}
    (tmp_path / "examples").symlink_to(EXAMPLE.parent)
    for program, *words in COMMANDS:
        line = [sys.executable, *programs.get(program, []), *words]
        if "train" in words and "--resume" not in words:
            line += _small(folder)
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"}
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert len(_numbers(tmp_path / "runs" / "two")) >= 4


# -- fine-tuning ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finetune.save_mixtral(tmp_path_factory.mktemp("checkpoints") / "tiny-mixtral")


FINETUNE: dict[str, dict[str, Any]] = {
    # 17 rows in steps of 6: the last step has fewer rows than a micro-batch has ranks
    "pairs": {"batch": 3, "accumulate": 2},
    "labels, adapters": {"batch": 4, "lora": 2, "lora_experts": True},
}


@pytest.mark.parametrize("name", slow_names(FINETUNE, "pairs"))
def test_ranks_finetune_as_one_process(
    forks: Forks, checkpoint: Path, tmp_path: Path, name: str
) -> None:
    data = (
        finetune.write_labels(tmp_path / "a.tsv", 14)
        if "labels" in name
        else finetune.write_pairs(tmp_path / "a.jsonl", 18)
    )
    for ranks in (1, 2):
        out = tmp_path / f"ranks-{ranks}"
        settings = finetune.tiny_settings(checkpoint, data, out, lr=3e-4, **FINETUNE[name])
        words = ["finetune", settings.pop("checkpoint"), *settings.pop("data")]
        words += [*_words(settings), "--gpus", str(ranks)]
        log = tmp_path / "log.txt"
        assert forks.run(words, log) == 0, log.read_text()
    one, two = (tmp_path / f"ranks-{ranks}" for ranks in (1, 2))
    assert _numbers(two) == pytest.approx(_numbers(one), rel=1e-5)
    names = sorted(file.name for file in (one / "final").iterdir())
    assert sorted(file.name for file in (two / "final").iterdir()) == names
    for file in (one / "final").glob("*.safetensors"):
        torch.testing.assert_close(load_file(two / "final" / file.name), load_file(file))


def test_ranks_divide_stages(forks: Forks, checkpoint: Path, tmp_path: Path) -> None:
    """Two ranks, and two along stages by two along experts, which resume the run of the two."""
    data = finetune.write_pairs(tmp_path / "a.jsonl", 18)
    changes = {"batch": 3, "accumulate": 2, "steps": 3, "save_every": 2, "keep": 2, "lr": 3e-4}
    log = tmp_path / "log.txt"

    def run(out: Path, *flags: str) -> None:
        settings = finetune.tiny_settings(checkpoint, data, out, **changes)
        words = ["finetune", settings.pop("checkpoint"), *settings.pop("data"), *_words(settings)]
        assert forks.run([*words, *flags], log) == 0, log.read_text()

    alone, divided = tmp_path / "alone", tmp_path / "divided"
    run(alone)
    run(divided, "--stages", "2", "--gpus", "2")
    for file in (alone / "final").glob("*.safetensors"):
        assert file.read_bytes() == (divided / "final" / file.name).read_bytes()
    shutil.rmtree(divided / "checkpoints" / "step-00000003")
    flags = "--stages", "2", "--gpus", "4", "--stage-gpus", "2", "--resume"
    (divided / "final").rename(tmp_path / "final")
    run(divided, *flags)
    assert "step-00000002" in log.read_text()
    assert _numbers(divided) == pytest.approx(_numbers(alone), rel=1e-5)


@pytest.mark.slow
def test_results_of_pre_gates_pass_between_ranks(
    forks: Forks, checkpoint: Path, tmp_path: Path
) -> None:
    """Two ranks along stages, and two that divide the experts and have both stages."""
    data = finetune.write_pairs(tmp_path / "a.jsonl", 18)
    changes = {"batch": 2, "accumulate": 2, "steps": 2, "lr": 3e-3, "eval_every": 2}
    log, found = tmp_path / "log.txt", []
    for name, *flags in (
        ("alone",),
        ("divided", "--stages", "2", "--gpus", "2"),
        ("whole", "--stages", "2", "--gpus", "2", "--stage-gpus", "1"),
    ):
        settings = finetune.tiny_settings(checkpoint, data, tmp_path / name, **changes)
        words = ["pregate", settings.pop("checkpoint"), *settings.pop("data"), *_words(settings)]
        assert forks.run([*words, *flags], log) == 0, log.read_text()
        assert _numbers(tmp_path / name) == pytest.approx(_numbers(tmp_path / "alone"), rel=1e-5)
        found.append(
            {
                file.name: load_file(file)
                for file in (tmp_path / name / "final").glob("*.safetensors")
            }
        )
    for file, tensors in found[0].items():
        for tensor, value in tensors.items():
            assert torch.equal(found[1][file][tensor], value), tensor
            torch.testing.assert_close(found[2][file][tensor], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_ranks_divide_the_stages_of_a_gpt(forks: Forks, folder: Path) -> None:
    """Two ranks along stages, then two by two along experts, then one process resume a run; the
    balance loss counts the assignments of the ranks that have parts of a batch."""
    log, changes = folder / "log.txt", {"accumulate": 2, "steps": 3, "layers": 3, "save_every": 1}
    alone = [*_arguments(folder, "whole", **changes), "--no-group"]
    assert forks.run(alone, log) == 0, log.read_text()
    expected, out = _numbers(folder / "whole"), folder / "divided"
    words = _arguments(folder, "divided", **changes)
    for step, flags in (
        (0, ["--stages", "3", "--gpus", "2"]),
        (1, ["--stages", "2", "--gpus", "4", "--stage-gpus", "2"]),
        (2, ["--stages", "3"]),
    ):
        for path in (out / "checkpoints").iterdir() if step else ():
            if int(path.name.removeprefix("step-")) > step:
                shutil.rmtree(path)
        words = _resume(out) if step else words
        assert forks.run([*words, *flags], log) == 0, log.read_text()
        assert _numbers(out) == pytest.approx(expected, rel=1e-5)
    norms = [
        [line["grad_norm"] for line in read_lines(run / "metrics.jsonl") if "ce" in line]
        for run in (out, folder / "whole")
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_stage_gpus_that_do_not_fit_or_differ_are_refused_once(
    forks: Forks, checkpoint: Path, tmp_path: Path
) -> None:
    data = finetune.write_pairs(tmp_path / "a.jsonl", 4)
    settings = finetune.tiny_settings(checkpoint, data, tmp_path / "out", stages=2, stage_gpus=2)
    words = ["finetune", settings.pop("checkpoint"), *settings.pop("data"), *_words(settings)]
    log = tmp_path / "log.txt"
    for flags, message in (
        (["--gpus", "3"], "--stage-gpus 2 must divide the 3 GPUs of a node"),
        ([], "--stage-gpus 2 needs several GPUs; give --gpus, or omit it"),
    ):
        assert forks.run([*words, *flags], log) == 2, log.read_text()
        assert log.read_text().count("error") == log.read_text().count(message) == 1
    words += ["--stages", "4"]
    codes, text = _torchrun(forks, [words, *[[*words, "--stage-gpus", "4"]] * 3], tmp_path)
    assert codes == [2] * 4
    assert text.count("error") == text.count("must be the same on all ranks: rank 0 has 2") == 1
