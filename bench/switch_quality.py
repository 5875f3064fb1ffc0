"""Quality of pre-gates on a Switch Transformer: exact match and F1 with N = 0 (conventional) to 3.

PYTHONPATH=src python3 bench/switch_quality.py --data FOLDER --work FOLDER --out FOLDER --minutes 9
PYTHONPATH=src python3 bench/switch_quality.py --plot-only   # docs/switch-quality.png

The tasks and metrics of Table 2 and Figure 13 of the Pre-gated MoE paper, with `overspill finetune`
and `overspill pregate`. A model with the shape of Switch-Base-8 is pre-trained on passages of
wikitext-2 and SQuAD: the published weights are not used, so scores are far below those of the
paper. It is then fine-tuned for each task and level, with the same steps on the same batches.

The work can be divided into several calls with the same flags: a call ends after --minutes and says
that it must be repeated (exit code 1), until the record is written (exit code 0). --parallel N
fine-tunes N models at the same time on the GPU, which one alone does not fill.
"""

import argparse
import dataclasses
import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from quality_plot import Panel, draw_plot
from record import RESULTS, ROOT, Metric, metric, write_record
from rich.console import Console
from safetensors.torch import load_file, save_file
from sst2 import make_tokenizer
from switch_balance import COEFFICIENT, Balance
from switch_text import FILES, SENTINELS, passages, pretraining, squad, webquestions, write

import overspill
from overspill.models.checkpoint_presets import preset_config
from overspill.train.finetune.config import FinetuneConfig, PregateConfig
from overspill.train.finetune.finetuner import FinetuneSummary, finetune
from overspill.train.metrics import StepMetrics
from overspill.train.progress import Display
from overspill.train.run_spec import RunSpec
from overspill.train.session import Session, build_session

RECORD = "switch-quality"
PLOT = ROOT / "docs" / f"{RECORD}.png"
LEVELS = (0, 1, 2, 3)
SQUAD, WEB = "squad", "webquestions"
SCORES = {"em": "exact match", "f1": "F1"}
TASKS = {SQUAD: "SQuAD, with its passage", WEB: "WebQuestions, closed book"}
PAPER = {SQUAD: {0: "77.4 / 85.8", 1: "78.2 / 86.0"}, WEB: {0: "26.0 / 30.9", 1: "28.2 / 32.6"}}
"""Exact match and F1 of Switch-Base-8 in Table 2, with Google's pre-training."""
PANELS = {name: Panel(title, "score, %", 100) for name, title in TASKS.items()}
LINES = {"_em": ("exact match", "-", "#2f6db3"), "_f1": ("F1", "--", "#c8702a")}
_START_S = 60  # a run is not started with less time than that
_END_S = 20  # for the checkpoint of a run that is stopped


@dataclass(frozen=True)
class Settings:
    """The model and its training."""

    layers: int = 12
    experts: int = 8
    shape: dict[str, int] = dataclasses.field(default_factory=dict)
    """Fields that differ from those of Switch-Base-8."""
    vocab: int = 8192
    seq_len: int = 384
    dropout: float = 0.0
    passages: int | None = None
    """How many are used; None: all."""
    examples: int = 40_000
    """Examples of pre-training."""
    base_steps: int = 2000
    base_batch: int = 64
    base_lr: float = 5e-4
    steps: int = 300
    batch: int = 64
    web_steps: int = 250
    web_batch: int = 128
    lr: float = 3e-4
    questions: int | None = None
    """Questions of each task, for training and for the test; None: all."""
    metric_tokens: int = 16

    @property
    def digest(self) -> str:
        return hashlib.blake2b(repr(self).encode(), digest_size=4).hexdigest()


SMOKE = Settings(
    layers=4, experts=4,
    shape={
        "d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2,
        "num_sparse_encoder_layers": 4, "num_sparse_decoder_layers": 4,
    },
    vocab=400, seq_len=48, passages=40, examples=16, base_steps=2, base_batch=4, steps=1, batch=4,
    web_steps=1, web_batch=4, questions=6, metric_tokens=4,
)  # fmt: skip
"""Learns nothing."""


@dataclass(frozen=True)
class Measurement:
    """The scores of one fine-tuned model, a line of measurements.jsonl."""

    task: str
    seed: int
    level: int
    eval_loss: float
    scores: dict[str, float]


class NotComplete(Exception):
    """There is no time left in this call."""


class Deadline(Display):
    """A display that stops a run when the time of this call has passed."""

    def __init__(self, seconds: float) -> None:
        super().__init__(Console())
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    def step(self, metrics: StepMetrics, log: bool) -> None:
        super().step(metrics, log)
        if self.left < _END_S:
            os.kill(os.getpid(), signal.SIGINT)  # finishes the step and writes a checkpoint


class Bench:
    """Models, pre-trained and fine-tuned in `work`; finished work is not repeated."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.settings: Settings = args.settings
        self.data: Path = args.data
        self.device: str = args.device
        self.only: str | None = args.only
        self.parallel: int = args.parallel
        self.work: Path = args.work / f"{self.settings.digest}-{self.device}"
        self.texts = self.work / "texts"
        self.lines = self.work / "measurements.jsonl"
        self.display = Deadline(60 * args.minutes)

    def measure(self, seeds: Sequence[int]) -> list[Measurement]:
        """All measurements; raises NotComplete if there is no time for one that is missing."""
        self._prepare()
        known = {(one.task, one.seed, one.level) for one in self._read()}
        for seed in seeds:
            base = self._base(seed)
            missing = [
                (task, level)
                for task in TASKS
                for level in LEVELS
                if (task, seed, level) not in known and self._wanted(task, level)
            ]
            if self.parallel > 1:
                self._tune_at_once(seed, missing)
            else:
                for task, level in missing:
                    self._tune(base, task, seed, level)
        return [*self._read()]

    def _wanted(self, task: str, level: int) -> bool:
        return self.only in (None, f"{task}-{level}")

    def _tune_at_once(self, seed: int, missing: Sequence[tuple[str, int]]) -> None:
        """Fine-tune several models, each in a process of its own, which runs this command for one
        model."""

        def tune(one: tuple[str, int]) -> int:
            task, level = one
            given = ["--only", f"{task}-{level}", "--seeds", str(seed), "--parallel", "1"]
            given += ["--minutes", str(self.display.left / 60)]
            command = [sys.executable, __file__, *sys.argv[1:], *given]
            with (self.work / f"{task}-{seed}-{level}.log").open("a") as log:
                return subprocess.run(command, stdout=log, stderr=log).returncode

        with ThreadPoolExecutor(self.parallel) as pool:
            codes = list(pool.map(tune, missing))
        if any(codes):
            raise NotComplete(", ".join(
                f"{task}-{seed}-{level}"
                for (task, level), code in zip(missing, codes, strict=True) if code
            ))  # fmt: skip

    def _read(self) -> Iterator[Measurement]:
        if self.lines.exists():
            for line in self.lines.read_text().splitlines():
                yield Measurement(**json.loads(line))

    def _prepare(self) -> None:
        """The examples of all runs, and the tokenizer."""
        if (self.texts / "tokenizer" / "tokenizer.json").exists():
            return
        self.texts.mkdir(parents=True, exist_ok=True)
        most = self.settings.questions
        for name, (train, test) in {SQUAD: squad(self.data), WEB: webquestions(self.data)}.items():
            write(self.texts / f"{name}.jsonl", train[:most])
            write(self.texts / f"{name}-test.jsonl", test[:most])
        texts = passages(self.data)[: self.settings.passages]
        write(self.texts / "base.jsonl", pretraining(texts, self.settings.examples, seed=0))
        write(self.texts / "base-test.jsonl", pretraining(texts, self.settings.base_batch, seed=1))
        aside = self.texts / "tokenizer.part"
        self._tokenizer(texts).save_pretrained(aside)
        aside.rename(self.texts / "tokenizer")

    def _tokenizer(self, texts: list[str]) -> Any:
        from transformers import PreTrainedTokenizerFast

        # a space before each passage: the first word has the same tokens as elsewhere
        made = make_tokenizer([f" {text}" for text in texts], self.settings.vocab)
        tokenizer: Any = PreTrainedTokenizerFast(
            tokenizer_object=made, eos_token="<|endoftext|>", pad_token="<pad>"
        )
        tokenizer.add_tokens(SENTINELS, special_tokens=True)
        return tokenizer

    def _base(self, seed: int) -> Path:
        """The pre-trained checkpoint."""
        settings, base = self.settings, self.work / f"base-{seed}"
        start = self.work / f"start-{seed}"
        if not (base / "final").exists():
            if not start.exists():
                self._write_start(seed, start)
            balances: list[Balance] = []
            self._run(
                f"pre-training, seed {seed}",
                base,
                balances=balances,
                checkpoint=str(start),
                data=[str(self.texts / "base.jsonl")],
                eval_data=str(self.texts / "base-test.jsonl"),
                steps=settings.base_steps,
                batch=settings.base_batch,
                lr=settings.base_lr,
                warmup=settings.base_steps // 20,
                min_lr=0.1,
                seed=seed,
            )
            write(self._routing(seed), [{"most_used": balances[0].most_used}])
            shutil.rmtree(base / "checkpoints")
        return base / "final"

    def _routing(self, seed: int) -> Path:
        return self.work / f"routing-{seed}.jsonl"

    def most_used(self, seed: int) -> float:
        """The share of tokens of the most used expert of a layer at the end of pre-training."""
        return float(json.loads(self._routing(seed).read_text())["most_used"])

    def _write_start(self, seed: int, folder: Path) -> None:
        """A checkpoint with random weights."""
        from transformers import AutoTokenizer

        settings = self.settings
        tokenizer = AutoTokenizer.from_pretrained(self.texts / "tokenizer")
        config = preset_config(
            "switch-base-8",
            layers=settings.layers,
            experts=settings.experts,
            vocab_size=-(-len(tokenizer) // 64) * 64,
            dropout_rate=settings.dropout,
            expert_capacity=settings.seq_len,  # drops no token
            router_jitter_noise=0.0,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            decoder_start_token_id=tokenizer.pad_token_id,
            **settings.shape,
        )
        torch.manual_seed(seed)
        model = overspill.from_config(config, train=False, device=self.device, progress=False)
        overspill.save(model, folder)
        model.overspill.close()
        _change_start(folder, config)
        tokenizer.save_pretrained(folder)

    def _tune(self, base: Path, task: str, seed: int, level: int) -> Measurement:
        """Fine-tunes for a task, with pre-gates of this level or without, and scores the model."""
        settings, out = self.settings, self.work / f"{task}-{seed}-{level}"
        web = task == WEB
        steps = settings.web_steps if web else settings.steps
        summary = self._run(
            f"{task}, seed {seed}, N = {level}",
            out,
            level=level,
            checkpoint=str(base),
            data=[str(self.texts / f"{task}.jsonl")],
            eval_data=str(self.texts / f"{task}-test.jsonl"),
            steps=steps,
            batch=settings.web_batch if web else settings.batch,
            lr=settings.lr,
            warmup=steps // 20,
            min_lr=1.0,  # constant, as in the paper
            seed=seed,
            metric=list(SCORES),
            metric_tokens=settings.metric_tokens,
        )
        assert summary.eval_loss is not None
        assert summary.scores is not None
        found = Measurement(task, seed, level, summary.eval_loss, summary.scores)
        with self.lines.open("a") as lines:
            lines.write(json.dumps(asdict(found)) + "\n")
        shutil.rmtree(out)
        return found

    def _run(
        self,
        what: str,
        out: Path,
        level: int = 0,
        balances: list[Balance] | None = None,
        **given: Any,
    ) -> FinetuneSummary:
        """A run of `overspill finetune` or `pregate`, continued if an earlier call began it. With
        `balances` the loss that balances routers is added, and appended to them."""

        def build(spec: RunSpec) -> Session:
            session = build_session(spec)
            if balances is not None:
                balances.append(Balance(session.model))
            return session

        if self.display.left < _START_S:
            raise NotComplete(what)
        resume = any(out.glob("checkpoints/step-*"))
        if out.exists() and not resume:
            shutil.rmtree(out)  # killed before its first checkpoint
        self.display.say(f"-- {what}{', continued' if resume else ''}")
        config: type[FinetuneConfig] = PregateConfig if level else FinetuneConfig
        summary = finetune(
            config.make(
                {
                    **given,
                    **({"level": level} if level else {}),
                    "out": str(out),
                    "resume": resume,
                    "device": self.device,
                    "mode": "gpu",
                    "seq_len": self.settings.seq_len,
                    "truncate": True,
                    "gradient_checkpointing": False,
                    "eval_every": 0,
                    "save_every": 1000,
                    "log_every": 50,
                    "trace_steps": 0,
                }
            ),
            self.display,
            build,
        )
        if summary.interrupted:
            raise NotComplete(what)
        return summary


def _change_start(folder: Path, config: Any) -> None:
    """Random weights for AdamW. Those of T5 are for Adafactor, whose steps are relative to the
    size of a matrix: with AdamW attention changes too fast and embeddings too slowly. These are as
    in GPT-2; norms before attention divide its scores by sqrt(d_kv), which T5 leaves out, and the
    last one undoes the division of the logits."""
    into = {"encoder": 2 * config.num_layers, "decoder": 3 * config.num_decoder_layers}
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            stack = name.split(".")[0]
            if name.endswith("layer_norm.weight"):
                attends = ".layer.0." in name or (stack == "decoder" and ".layer.1." in name)
                if attends or name == "encoder.final_layer_norm.weight":
                    tensor.fill_(config.d_kv**-0.25)
                elif name == "decoder.final_layer_norm.weight":
                    tensor.fill_(math.sqrt(config.d_model))
            elif "relative_attention_bias" in name:
                tensor.zero_()
            else:
                output = name.endswith((".o.weight", ".wo.weight"))
                tensor.normal_(0, 0.02 / math.sqrt(into[stack] if output else 1))
        save_file(tensors, file, {"format": "pt"})


def save(found: Sequence[Measurement], bench: Bench, out: Path | None) -> None:
    """Writes the record."""
    settings, device = bench.settings, bench.device
    metrics: dict[str, Metric] = {}
    table: list[dict[str, Any]] = [{"N": str(level)} for level in LEVELS]
    for task in TASKS:
        for level, row in zip(LEVELS, table, strict=True):
            own = [one for one in found if (one.task, one.level) == (task, level)]
            for score, word in SCORES.items():
                name, values = f"{task}_n{level}_{score}", [one.scores[score] for one in own]
                metrics[name] = metric(values, "share")
                row[f"{TASKS[task]}: {word}"] = _percent(metrics[name])
            row[f"{task}: loss"] = f"{metric([one.eval_loss for one in own], 'nats').median:.3f}"
            row[f"paper, {task}: EM / F1"] = PAPER[task].get(level)
    seeds = sorted({one.seed for one in found})
    config = {
        "row": f"Switch with the shape of Base-8 ({settings.layers} + {settings.layers} layers, "
        f"{settings.experts} experts), pre-trained here: {settings.base_steps} steps of "
        f"{settings.base_batch} passages of wikitext-2 and SQuAD; then {settings.steps} steps of "
        f"{settings.batch} questions of SQuAD, or {settings.web_steps} of {settings.web_batch} of "
        f"WebQuestions; seeds: {len(seeds)}",
        "compare": "Pre-gated MoE, Table 2 and Figure 13, with Google's pre-training and all of "
        "SQuAD's training set: N = 1 matches N = 0",
        "picture": f"{RECORD}.png",
        **asdict(settings),
        "pre-training": "ours: half span corruption, half cloze questions about a passage; the "
        "first weights are drawn as in GPT-2",
        "split": "every 6th article of SQuAD's development set is the test, the others are for "
        "training; WebQuestions: trainmodel and val for training, test for the test",
        "dtype": "bf16 weights, fp32 master and moments" if device == "cuda" else "fp32",
        "commands": "overspill finetune and overspill pregate, with --metric em,f1",
        "balance": f"the loss of the Switch Transformer paper in pre-training, times {COEFFICIENT}",
        "tokens of the most used expert": [round(bench.most_used(seed), 3) for seed in seeds],
        "seeds": seeds,
    }
    write_record(RECORD, config, metrics, None, out, table)


def _percent(value: Metric) -> str:
    middle, low, high = (f"{100 * each:.1f}" for each in value[:3])
    return middle if low == high else f"{middle} ({low}–{high})"


def plot(path: Path, out: Path | None) -> None:
    """Draws the record in `out`, or that of bench/results."""
    file = (out or RESULTS) / f"{RECORD}.json"
    if not file.is_file():
        raise SystemExit(f"there is no record {file.name} in {file.parent}; measure it first")
    draw_plot(json.loads(file.read_text()), path, PANELS, LINES)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, help=f"folder with {', '.join(FILES)}")
    parser.add_argument("--work", type=Path, help="folder of models for later calls, 15 GB")
    parser.add_argument("--out", type=Path, help="folder of the record and the picture")
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call")
    parser.add_argument("--seeds", type=lambda text: [int(word) for word in text.split(",")])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parallel", type=int, default=1, help="models fine-tuned at once")
    parser.add_argument("--only", help="one of them, as squad-1")
    parser.add_argument("--smoke", action="store_true", help="a toy that learns nothing")
    parser.add_argument("--plot-only", action="store_true", help="measure nothing")
    numbers = {f.name: f.type for f in dataclasses.fields(Settings) if f.type in (int, float)}
    for name, kind in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind)
    args = parser.parse_args()
    if args.plot_only:
        return args
    if args.data is None or args.work is None:
        parser.error("--data and --work are missing; give the folders of texts and of models")
    if missing := [name for name in FILES if not (args.data / name).is_file()]:
        parser.error(f"--data {args.data} has no {', '.join(missing)}")
    if args.smoke and args.out is None:
        parser.error("--smoke needs --out: its record is no result")
    given = {name: value for name in numbers if (value := getattr(args, name)) is not None}
    args.settings = dataclasses.replace(SMOKE if args.smoke else Settings(), **given)
    args.seeds = args.seeds or [0]
    return args


def main() -> int:
    args = parse()
    if not args.plot_only:
        if args.smoke:
            torch.set_num_threads(1)  # tiny tensors gain nothing from more
        bench = Bench(args)
        try:
            found = bench.measure(args.seeds)
        except NotComplete as missing:
            print(f"not complete ({missing}): repeat this command", flush=True)
            return 1
        if args.only:
            return 0
        wanted = [one for one in found if one.seed in args.seeds]
        save(wanted, bench, args.out)
    plot(args.out / f"{RECORD}.png" if args.out else PLOT, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
