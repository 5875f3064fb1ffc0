"""`overspill probe`: what this machine can do, and who is faster with an expert."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from overspill.core.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from overspill.core.experts import ExpertShape
    from overspill.hardware.profile import ExpertCosts, MachineProfile
    from overspill.probe.known import Known

_HELP = """Measure this machine: links, memory, matrix products, and what an expert costs where.

The figures are kept for this machine and version; planners read them. What an expert takes to \
load, on the CPU and on the GPU, is drawn over the number of its tokens.

[bold]Example[/bold]

  overspill probe

  overspill probe --preset w1 --disk /nvme/spill --picture w1.png
"""

_DEFAULT_SHAPE = (1024, 4096)


def add_to(app: typer.Typer) -> None:
    app.command("probe", help=_HELP)(_probe)


def _probe(
    preset: Annotated[
        str | None, typer.Option(help="The expert of this preset.", show_default=False)
    ] = None,
    d_model: Annotated[
        int | None, typer.Option(help="Width of the expert's input. [dim]\\[1024][/dim]")
    ] = None,
    d_hidden: Annotated[
        int | None, typer.Option(help="Its hidden width. [dim]\\[4096][/dim]")
    ] = None,
    gated: Annotated[
        bool | None,
        typer.Option(
            "--gated/--no-gated",
            help="Gated SiLU with three matrices, or GELU with two. [dim]\\[no-gated][/dim]",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="bf16 or fp32.")] = "bf16",
    disk: Annotated[
        Path | None,
        typer.Option(help="Measure the disk of this folder too.", show_default=False),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(help="Cores at work; all but four, at least three quarters, when left out."),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Measure anew what is known already.")
    ] = False,
    picture: Annotated[
        Path | None,
        typer.Option(help="Where to draw the picture; beside the profile when left out."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything as JSON, and only that.")
    ] = False,
) -> None:
    shape = _shape(preset, d_model, d_hidden, gated)
    if threads is not None and threads < 1:
        raise ConfigError(f"--threads {threads} must be at least 1; leave it out for all but a few")
    # Torch takes seconds to import: only now, when the flags are known to be right.
    import torch

    from overspill.hardware.machine import cpu_threads
    from overspill.models.progress_bar import TerminalProgress
    from overspill.probe.known import Known
    from overspill.tiers.ssd import check_folder
    from overspill.train.session import DTYPES

    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype} is not known; give {' or '.join(DTYPES)}")
    if disk is not None:
        check_folder(disk.expanduser(), 0)  # now, not after half a minute
    if picture is not None:
        _check_picture(picture.expanduser())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    known = Known(device, cpu_threads(threads), again)
    bar = TerminalProgress(counted=True)
    try:
        limits = known.limits(None if disk is None else disk.expanduser(), bar)
        costs = known.costs(shape, DTYPES[dtype], bar)
    finally:
        bar.stop()
    drawn = _draw(costs, known, picture, dtype, device)
    (_print_json if as_json else _print_tables)(limits, costs, known, drawn, device)


def _shape(
    preset: str | None, d_model: int | None, d_hidden: int | None, gated: bool | None
) -> "ExpertShape":
    from overspill.core.experts import ExpertShape

    for flag, value in (("--d-model", d_model), ("--d-hidden", d_hidden)):
        if value is not None and value < 1:
            raise ConfigError(f"{flag} {value} must be at least 1")
    if preset is None:
        own = ExpertShape(*_DEFAULT_SHAPE, gated=False)
    else:
        from overspill.models.presets import get_preset

        own = get_preset(preset).expert_shape
    chosen = {"d_model": d_model, "d_hidden": d_hidden, "gated": gated}
    given = {name: value for name, value in chosen.items() if value is not None}
    return dataclasses.replace(own, **given)  # type: ignore[arg-type]


def _draw(
    costs: "ExpertCosts", known: "Known", picture: Path | None, dtype: str, device: "torch.device"
) -> Path:
    from overspill.probe.picture import draw_costs

    path = known.file.with_suffix(".png") if picture is None else picture.expanduser()
    shape = f"{costs.shape.d_model}×{costs.shape.d_hidden}{' gated' * costs.shape.gated}"
    cores = f"{costs.threads} core{'s' * (costs.threads > 1)}"
    title = f"One expert of {shape}, {dtype}, {cores} · {known.profile.machine}"
    name = "GPU" if device.type == "cuda" else "CPU in place of a GPU"
    draw_costs(costs, path, title, name)
    return path


def _check_picture(path: Path) -> None:
    import tempfile

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass  # only an attempt tells
        problem = "it is a folder" if path.is_dir() else None
    except OSError as error:
        problem = error.strerror
    if problem is not None:
        raise ConfigError(f"--picture {path} cannot be written ({problem}); name another file")


def _print_json(
    limits: "MachineProfile",
    costs: "ExpertCosts",
    known: "Known",
    drawn: Path,
    device: "torch.device",
) -> None:
    said = {
        "machine": known.profile.machine,
        "version": known.profile.version,
        "profile": str(known.file),
        "measured": known.measured,
        "picture": str(drawn),
        "lacking": _lacking(limits, device),
        "limits": dataclasses.asdict(limits),
        "expert": dataclasses.asdict(costs),
    }
    print(json.dumps(said))


def _print_tables(
    limits: "MachineProfile",
    costs: "ExpertCosts",
    known: "Known",
    drawn: Path,
    device: "torch.device",
) -> None:
    from rich.console import Console

    from overspill.probe.known import is_temporary
    from overspill.probe.table import costs_lines, costs_table, limits_table, transfers_table

    console = Console(highlight=False, soft_wrap=True)
    console.print(known.profile.machine, markup=False)
    for line in _lacking(limits, device):
        console.print(f"  {line}", markup=False)
    console.print()
    console.print(transfers_table(limits, device.type == "cuda"))
    console.print(limits_table(limits))
    console.print(costs_table(costs))
    for line in costs_lines(costs):
        console.print(line, markup=False)
    where = "for this process only" if is_temporary(known.file) else str(known.file)
    console.print()
    if known.measured:
        console.print(f"profile: {where}", markup=False)
    else:
        console.print(f"profile: {where}, measured before; --again measures anew", markup=False)
    console.print(f"picture: {drawn}", markup=False)


def _lacking(limits: "MachineProfile", device: "torch.device") -> list[str]:
    from overspill.hardware.machine import usable_cores
    from overspill.probe.table import lacking

    return lacking(usable_cores(), limits.kernel, device.type == "cuda")
