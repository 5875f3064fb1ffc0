"""Perplexity of a model on wikitext-2 with its experts in bf16, FP8, int4 and MXFP4.

PYTHONPATH=src python3 bench/quantize_quality.py --data FOLDER           # minutes
PYTHONPATH=src python3 bench/quantize_quality.py --data FOLDER --small   # for a CPU

FOLDER/wikitext-2 has train.txt.gz and valid.txt.gz. For each seed `overspill train` trains a
GPT-MoE on the training text, and `overspill export` writes it as a Mixtral in bf16. This is loaded
with `quantize=`, once for each format, and computes the validation text.
"""

import argparse
import gzip
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import metric, write_record
from safetensors.torch import load_file, save_file
from sst2 import make_tokenizer

import overspill
from overspill.cli.main import app
from overspill.train.data import Windows
from overspill.train.export import export

RECORD = "quantize-quality"
TEXTS = ("wikitext-2/train.txt.gz", "wikitext-2/valid.txt.gz")
BF16 = "bf16"
FORMATS = (BF16, "fp8", "int4", "mxfp4")


@dataclass(frozen=True)
class Model:
    """The model and its training."""

    vocab: int = 8192
    layers: int = 8
    d_model: int = 384
    d_hidden: int = 1024
    heads: int = 6
    experts: int = 8
    seq_len: int = 256
    batch: int = 32
    steps: int = 1500
    lr: float = 1e-3
    characters: int | None = None
    """How much of each text is used; None: everything."""
    windows: int | None = None
    """How many windows of the validation text are computed; None: all."""


SMALL = Model(
    2048,
    4,
    128,
    256,
    4,
    seq_len=128,
    batch=16,
    steps=250,
    lr=2e-3,
    characters=4_000_000,
    windows=512,
)
TINY = Model(512, 2, 32, 64, 2, 4, 32, batch=4, steps=2, characters=4000)


def read(folder: Path, name: str, characters: int | None) -> str:
    with gzip.open(folder / name, "rt", encoding="utf-8") as file:
        return file.read()[:characters]


def train(model: Model, text: Path, tokenizer: Path, work: Path, seed: int, device: str) -> Path:
    """Trains a model and writes it as a checkpoint in bf16."""
    flags: dict[str, Any] = {
        "experts": model.experts, "layers": model.layers, "d-model": model.d_model,
        "d-hidden": model.d_hidden, "heads": model.heads, "top-k": 2, "moe-every": 1,
        "seq-len": model.seq_len, "batch": model.batch, "steps": model.steps, "lr": model.lr,
        "data": text, "tokenizer": tokenizer, "cache": work / "tokens", "device": device,
        "mode": "gpu", "seed": seed, "out": work / f"run-{seed}", "eval-every": 0, "trace-steps": 0,
        "save-every": 0, "log-every": max(1, model.steps // 10),
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    if app(["train", "nano", "--gated", *words]) != 0:
        raise SystemExit("overspill train has failed")
    out = work / f"checkpoint-{seed}"
    export(work / f"run-{seed}", out)
    file, config = out / "model.safetensors", out / "config.json"
    save_file({k: v.bfloat16() for k, v in load_file(file).items()}, file, {"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "bfloat16"}))
    return out


@dataclass(frozen=True)
class Figure:
    """The perplexity of a checkpoint per token, in windows without earlier context."""

    perplexity: float
    bits: float
    """Per weight of an expert, with scales."""


@torch.no_grad()
def evaluate(checkpoint: Path, windows: Windows, quantize: str, device: str) -> Figure:
    """On a CPU activations are float32 for all formats."""
    model = overspill.load(
        checkpoint, dtype=torch.bfloat16 if device == "cuda" else torch.float32, device=device,
        train=False, quantize=None if quantize == BF16 else quantize, quiet=True, progress=False,
    )  # fmt: skip
    engine, total = model.overspill, 0.0
    stored = engine.layout.format.nbytes if quantize != BF16 else 2 * engine.shape.numel
    for first in range(0, len(windows), 16):
        tokens, targets = windows.batch(range(first, min(first + 16, len(windows))))
        logits = model(tokens.to(device)).logits.float().flatten(0, 1)
        targets = targets.to(device).flatten()
        total += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
    engine.close()
    perplexity = math.exp(total / (len(windows) * windows.seq_len))
    return Figure(perplexity, 8 * stored / engine.shape.numel)


def measure(model: Model, args: argparse.Namespace, work: Path) -> dict[str, list[Figure]]:
    """The figures of each format, one of each seed."""
    train_text, valid_text = (read(args.data, name, model.characters) for name in TEXTS)
    tokenizer, text = work / "tokenizer.json", work / "train.txt"
    made = make_tokenizer([train_text], model.vocab)
    made.save(str(tokenizer))
    text.write_text(train_text, encoding="utf-8")
    tokens = np.array(made.encode(valid_text).ids, dtype=np.int32)
    if model.windows is not None:
        tokens = tokens[: model.windows * model.seq_len + 1]
    windows = Windows(tokens, model.seq_len)
    found: dict[str, list[Figure]] = {name: [] for name in FORMATS}
    for seed in range(args.seeds):
        begin = time.monotonic()
        checkpoint = train(model, text, tokenizer, work, seed, args.device)
        print(f"seed {seed}: trained in {time.monotonic() - begin:.0f} s", flush=True)
        for name, figures in found.items():
            figures.append(evaluate(checkpoint, windows, name, args.device))
            print(f"  {name}: perplexity {figures[-1].perplexity:.4f}", flush=True)
    return found


def save(found: dict[str, list[Figure]], model: Model, args: argparse.Namespace) -> None:
    plain = [figure.perplexity for figure in found[BF16]]
    increases = {
        name: [100 * (one.perplexity / p - 1) for one, p in zip(figures, plain, strict=True)]
        for name, figures in found.items()
    }
    metrics = {f"{name}_increase": metric(increases[name], "%") for name in FORMATS[:0:-1]}
    metrics |= {
        name: metric([figure.perplexity for figure in figures], "perplexity")
        for name, figures in found.items()
    }
    table = [
        {
            "experts": name,
            "bits a weight": f"{figures[0].bits:.2f}",
            "perplexity": _range([figure.perplexity for figure in figures], ".3f"),
            "against bf16": None if name == BF16 else _range(increases[name], "+.2f") + " %",
        }
        for name, figures in found.items()
    ]
    details = {
        "row": f"GPT-MoE of {model.layers} layers of {model.experts} experts ({model.d_model} to "
        f"{model.d_hidden}), top 2, trained for {model.steps} steps of "
        f"{model.batch}×{model.seq_len} tokens of wikitext-2; seeds: {args.seeds}",
        **asdict(model),
        "perplexity": "per token of the validation text, in windows without earlier context",
        "activations": "bfloat16" if args.device == "cuda" else "float32",
        "dense weights": "bf16",
    }
    write_record(RECORD, details, metrics, None, args.out, table)


def _range(values: Sequence[float], form: str) -> str:
    low, high = (format(each(values), form) for each in (min, max))
    middle = format(statistics.median(values), form)
    return middle if low == high else f"{middle} ({low} to {high})"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help=f"folder with {', '.join(TEXTS)}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, default=1, help="number of models")
    parser.add_argument("--steps", type=int, help="of training")
    parser.add_argument("--small", action="store_true", help="a model for a CPU")
    parser.add_argument("--tiny", action="store_true", help="a toy that learns nothing")
    parser.add_argument("--out", type=Path, default=None, help="folder of the record")
    args = parser.parse_args()
    if missing := [name for name in TEXTS if not (args.data / name).is_file()]:
        parser.error(f"--data {args.data} has no {', '.join(missing)}")
    if args.tiny and args.out is None:
        parser.error("--tiny needs --out: its record is no result")
    return args


def main() -> int:
    args = parse()
    model = TINY if args.tiny else SMALL if args.small else Model()
    model = replace(model, steps=args.steps or model.steps)
    with tempfile.TemporaryDirectory() as work:
        save(measure(model, args, Path(work)), model, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
