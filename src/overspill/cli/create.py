"""`overspill create`: writes a preset with random weights."""

import dataclasses
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from overspill.cli.arguments import complete_checkpoint_preset
from overspill.cli.output import report
from overspill.core.errors import ConfigError

_HELP = """Write a checkpoint of a preset, with random weights.

The presets are the models of the papers: Switch Transformers, NLLB-MoE and GPT-MoE models. \
Experts are drawn and written one by one, so the model may be larger than the memory. The folder \
is a MODEL for overspill finetune, pregate, generate and serve.

[bold]Examples[/bold]

  overspill create --list

  overspill create switch-base-8 models/switch-base-8 --tokenizer bytes

A smaller one of the same family:

  overspill create nllb-moe-54b models/small --layers 4 --experts 8 --set d_model=512
"""


_DTYPES = ("bf16", "fp32")


def add_to(app: typer.Typer) -> None:
    app.command("create", help=_HELP)(_create)


def _create(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="The name of a preset.", autocompletion=complete_checkpoint_preset
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Argument(metavar="OUT", help="The new folder to write.")
    ] = None,
    show_list: Annotated[
        bool, typer.Option("--list", help="Show all presets and their sizes, and write nothing.")
    ] = False,
    dtype: Annotated[
        str,
        typer.Option(
            help="Data type of the weights: bf16 or fp32.", autocompletion=lambda: [*_DTYPES]
        ),
    ] = "bf16",
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
    layers: Annotated[
        int | None,
        typer.Option(
            help="Blocks, of an encoder-decoder those of each side; default: those of the preset.",
            show_default=False,
        ),
    ] = None,
    experts: Annotated[
        int | None,
        typer.Option(
            help="Experts in each MoE block; default: those of the preset.", show_default=False
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="FIELD=VALUE",
            help="Another field of the config, such as d_model=512; may be repeated.",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER|bytes",
            help="The folder of a tokenizer to copy; or `bytes`, with which vocab_size is 264 "
            "unless it is --set; default: none is written.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result only, as JSON.")
    ] = False,
) -> None:
    if show_list:
        _show_list(as_json)
        return
    if name is None or out is None:
        raise ConfigError("create needs NAME and OUT; overspill create --list shows the names")
    if dtype not in _DTYPES:
        raise ConfigError(f"--dtype {dtype} is unknown; give {' or '.join(_DTYPES)}")
    from overspill.models.checkpoint_presets import check_preset

    check_preset(name, layers, experts)
    given = _fields(changes or [])
    # Importing torch takes seconds: only after the flags are checked.
    import torch

    from overspill.core.sizes import format_size, round_up
    from overspill.models.checkpoint_presets import preset_config
    from overspill.models.huggingface.create import Created, create
    from overspill.train.export_tokenizer import byte_token_ids, write_byte_tokenizer
    from overspill.train.tokenizer import ByteTokenizer

    if tokenizer == "bytes":  # further tokens would have no text; 8: rows of logits are aligned
        given.setdefault("vocab_size", round_up(ByteTokenizer().ids, 8))
    config = preset_config(name, layers=layers, experts=experts, **given)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32

    def describe(done: Created) -> str:
        return (
            f"wrote {name} to {done.out}: {done.parameters:,} parameters "
            f"({format_size(done.bytes)}), {done.moe_blocks} MoE blocks × {done.experts} experts"
            + ("" if tokenizer else "; it has no tokenizer (--tokenizer copies one)")
        )

    with TemporaryDirectory() as temporary:
        folder = tokenizer
        if tokenizer == "bytes":
            folder = temporary
            write_byte_tokenizer(Path(temporary), config.vocab_size)
            for field, value in byte_token_ids(config.is_encoder_decoder).items():
                setattr(config, field, value)
        report(lambda bar: create(config, out, kind, seed, folder, progress=bar), as_json, describe)


def _fields(changes: list[str]) -> dict[str, Any]:
    fields = {}
    for change in changes:
        name, equals, value = change.partition("=")
        if not (name and equals):
            raise ConfigError(f"--set {change} is not FIELD=VALUE; write it like d_model=512")
        try:
            fields[name] = json.loads(value)
        except ValueError:
            fields[name] = value
    return fields


def _show_list(as_json: bool) -> None:
    from overspill.models.checkpoint_presets import summaries

    if as_json:
        print(json.dumps([dataclasses.asdict(row) for row in summaries()]))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("preset", "parameters", "bytes in bf16", "MoE blocks × experts")
    for row in summaries():
        table.add_row(
            row.name,
            f"{row.parameters / 1e9:.3g} B",
            f"{row.bytes / 1e9:.3g} GB",
            f"{row.moe_blocks} × {row.experts}",
        )
    Console().print(table)
