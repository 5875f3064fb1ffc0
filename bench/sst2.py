"""Fine-tuning on SST-2 with experts on the compute device, in host memory and on disk.

A small MoE is trained on the sentences, exported, and fine-tuned on the labels once per placement,
with the command-line interface. Only the run time may differ.

PYTHONPATH=src python3 bench/sst2.py FOLDER    # with train.tsv.gz and test.tsv.gz
"""

import argparse
import csv
import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from record import metric, write_record
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

MODEL = "--gated --layers 2 --experts 8 --d-model 64 --d-hidden 128 --heads 4"
# 4 of the 16 experts fit on the compute device, and 6 in host memory before the disk.
PLACES = {
    "compute device": "--mode gpu",
    "host memory, 4 slots of 16": "--mode host --slots 4",
    "disk, 4 slots and 6 host slots of 16": "--mode disk --slots 4 --host-slots 6",
}
VOCAB = 2048
TASK = ["--labels", "bad,good", "--label-prompt", "{sentence} it was"]
QUIET = ["--eval-every", "0", "--log-every", "100", "--trace-steps", "0"]
# threads do not help with tiny tensors
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


class Outcome(NamedTuple):
    """The printed summary of a fine-tuning run, and the loss of each step."""

    summary: dict[str, Any]
    losses: list[float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="folder with train.tsv.gz and test.tsv.gz")
    parser.add_argument("--pretrain-steps", type=int, default=300)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--folder", type=Path, default=None, help="folder for temporary files")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    train, test = (args.data / f"{name}.tsv.gz" for name in ("train", "test"))
    for file in (train, test):
        if not file.is_file():
            parser.error(f"{args.data} has no {file.name}; give the folder of SST-2")
    with tempfile.TemporaryDirectory(dir=args.folder) as own:
        folder = Path(own)
        checkpoint = pretrain(train, folder, args.pretrain_steps)
        outcomes = {
            name: finetune(checkpoint, [str(train), "--eval-data", str(test)], place, args.steps)
            for name, place in PLACES.items()
        }
    write(outcomes, majority(test), args)


def pretrain(train: Path, folder: Path, steps: int) -> Path:
    """A checkpoint trained on the sentences without labels."""
    sentences = [sentence for sentence, _ in read(train)]
    text = folder / "sentences.txt"
    text.write_text("\n".join(sentences) + "\n")
    tokenizer = folder / "tokenizer.json"
    make_tokenizer(sentences).save(str(tokenizer))
    source = ["--data", str(text), "--tokenizer", str(tokenizer), "--cache", str(folder / "cache")]
    pace = ["--seq-len", "64", "--batch", "32", "--lr", "3e-3", "--steps", str(steps), *QUIET]
    run, checkpoint = str(folder / "run"), str(folder / "checkpoint")
    overspill(["train", "nano", *MODEL.split(), *source, *pace, "--device", "cpu", "--out", run])
    overspill(["export", run, checkpoint])
    return Path(checkpoint)


def make_tokenizer(sentences: list[str], vocab: int = VOCAB) -> Tokenizer:
    """A BPE tokenizer of these sentences with a small vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    return tokenizer


def finetune(checkpoint: Path, data: list[str], place: str, steps: int) -> Outcome:
    """Fine-tunes all parameters of `checkpoint` with the flags `place`."""
    flags = place.split()
    mode = flags[1]
    out = checkpoint.parent / f"finetuned-{mode}"
    if mode == "disk":
        flags += ["--disk", str(checkpoint.parent / "spill")]
    pace = ["--batch", "16", "--lr", "2e-3", "--steps", str(steps), *QUIET]
    command = ["finetune", str(checkpoint), *data, *TASK, *pace, *flags, "--device", "cpu"]
    printed = overspill([*command, "--out", str(out), "--json"])
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return Outcome(json.loads(printed), [line["loss"] for line in lines if "loss" in line])


def overspill(arguments: list[str]) -> str:
    command = [sys.executable, "-m", "overspill", *arguments]
    done = subprocess.run(
        command,
        env=ENVIRONMENT,
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout


def read(file: Path) -> list[tuple[str, str]]:
    """Sentences and labels."""
    with gzip.open(file, "rt", encoding="utf-8", newline="") as lines:
        rows = list(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [(sentence.strip(), label) for sentence, label in rows[1:]]


def majority(file: Path) -> float:
    """The accuracy of always predicting the most frequent label."""
    counts = Counter(label for _, label in read(file))
    return max(counts.values()) / counts.total()


def write(outcomes: dict[str, Outcome], majority: float, args: argparse.Namespace) -> None:
    resident, *offloaded = outcomes.values()
    differences = [
        max(abs(a - b) for a, b in zip(resident.losses, other.losses, strict=True))
        for other in offloaded
    ]
    table = [
        {
            "experts in": name,
            "accuracy before": f"{outcome.summary['accuracy_before']:.1%}",
            "after": f"{outcome.summary['accuracy']:.1%}",
            "eval loss": f"{outcome.summary['eval_loss']:.6f}",
            "largest difference of a step's loss": difference,
            "seconds": round(outcome.summary["seconds"]),
        }
        for (name, outcome), difference in zip(outcomes.items(), [None, *differences], strict=True)
    ]
    eval_losses = [outcome.summary["eval_loss"] for outcome in outcomes.values()]
    write_record(
        "finetune-sst2",
        {
            "row": f"SST-2, {args.steps} steps of 16 sentences, fp32; always the "
            f"more frequent label: {majority:.1%}",
            "pretrain_steps": args.pretrain_steps,
            "steps": args.steps,
            "majority": majority,
        },
        {
            "accuracy_offloaded": metric([one.summary["accuracy"] for one in offloaded], "share"),
            "accuracy_resident": metric([resident.summary["accuracy"]], "share"),
            "eval_loss": metric(eval_losses, "nats"),
            "losses_apart": metric(differences, "nats"),
        },
        None,
        args.out,
        table,
    )


if __name__ == "__main__":
    main()
