"""`overspill pregate`: fine-tuning with pre-gates; every setting of `PregateConfig` is a flag."""

import typer

from overspill.cli import finetune
from overspill.train.finetune.config import PregateConfig

_HELP = """Give a Mixture-of-Experts model pre-gates, and fine-tune it with them.

A pre-gate chooses the experts of an MoE block --level blocks earlier, so that they can be moved \
to the GPU before they are needed. DATA and flags are those of overspill finetune. Saved models \
are plain Hugging Face checkpoints of the conventional model, with the pre-gates in a file beside \
it, with which Overspill loads and serves them. With --lora they are adapters with that file.

[bold]Examples[/bold]

A model from overspill train, with the data that it was trained on:

  overspill pregate runs/nano stdlib --steps 100 --out runs/pregated

Two blocks ahead; all parameters of a large checkpoint, on one 24 GB GPU:

  overspill pregate Mixtral-8x7B-v0.1 chats.jsonl --level 2 --gpu-memory 22GiB --disk /nvme/spill \
--state-dtype bf16

The pre-gates alone:

  overspill pregate OLMoE-1B-7B texts.jsonl --freeze-experts --freeze-dense

The pre-gates, and adapters of attention and experts:

  overspill pregate Qwen3-30B-A3B texts.jsonl --lora 16 --lora-experts --lora-experts-rank 4

Served afterwards:

  overspill generate runs/pregated/final "def main("
"""


def add_to(app: typer.Typer) -> None:
    finetune.add_command(app, PregateConfig, _HELP)
