"""`overspill probe`: measures the machine and the cost of an expert on CPU and GPU."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from overspill.core.errors import ConfigError

if TYPE_CHECKING:
    from overspill.core.experts import ExpertShape
    from overspill.hardware.profile import ExpertCosts, MachineProfile
    from overspill.probe.known import Known

_HELP = """Measure this machine: links, memory, matrix products, and the cost of an expert.

The results are cached per machine and version; planners read them. A plot shows the time to \
upload an expert and to compute it on CPU and GPU, by number of tokens.

[bold]Example[/bold]

  overspill probe

  overspill probe --preset w1 --disk /nvme/spill --picture w1.png
"""

_DEFAULT_SHAPE = (1024, 4096)


def add_to(app: typer.Typer) -> None:
    app.command("probe", help=_HELP)(_probe)


def _probe(
    preset: Annotated[
        str | None, typer.Option(help="Measure the experts of this preset.", show_default=False)
    ] = None,
    d_model: Annotated[
        int | None, typer.Option(help="Input width of the expert. [dim]\\[1024][/dim]")
    ] = None,
    d_hidden: Annotated[
        int | None, typer.Option(help="Hidden width of the expert. [dim]\\[4096][/dim]")
    ] = None,
    gated: Annotated[
        bool | None,
        typer.Option(
            "--gated/--no-gated",
            help="Gated SiLU (3 matrices) or GELU (2). [dim]\\[no-gated][/dim]",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="bf16 or fp32.")] = "bf16",
    disk: Annotated[
        Path | None,
        typer.Option(help="Also measure the disk of this folder.", show_default=False),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(help="CPU threads; default: all cores but four, at least three quarters."),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Measure again instead of using cached results.")
    ] = False,
    picture: Annotated[
        Path | None,
        typer.Option(help="File of the plot; default: next to the profile."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
) -> None:
    shape = _shape(preset, d_model, d_hidden, gated)
    if threads is not None and threads < 1:
        raise ConfigError(f"--threads {threads} must be at least 1")
    # Importing torch takes seconds: only after the flags are checked.
    from overspill.hardware.machine import choose_device, cpu_threads, usable_cores
    from overspill.models.progress_bar import TerminalProgress
    from overspill.probe.known import Known
    from overspill.probe.table import lacking
    from overspill.tiers.ssd import check_folder
    from overspill.train.session import DTYPES

    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype} is unknown; give {' or '.join(DTYPES)}")
    if disk is not None:
        check_folder(disk.expanduser(), 0)  # fail before measuring
    if picture is not None:
        _check_picture(picture.expanduser())
    device = choose_device()
    known = Known(device, cpu_threads(threads), again)
    bar = TerminalProgress(counted=True)
    try:
        limits = known.limits(None if disk is None else disk.expanduser(), bar)
        costs = known.costs(shape, DTYPES[dtype], bar)
    finally:
        bar.stop()
    on_gpu = device.type == "cuda"
    drawn = _draw(costs, known, picture, dtype, on_gpu)
    missing = lacking(usable_cores(), limits.kernel, on_gpu)
    measured = _Measured(limits, costs, known, drawn, missing, on_gpu)
    (_print_json if as_json else _print_tables)(measured)


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
    costs: "ExpertCosts", known: "Known", picture: Path | None, dtype: str, on_gpu: bool
) -> Path:
    from overspill.probe.picture import draw_costs

    path = known.file.with_suffix(".png") if picture is None else picture.expanduser()
    shape = f"{costs.shape.d_model}×{costs.shape.d_hidden}{' gated' * costs.shape.gated}"
    cores = f"{costs.threads} core{'s' * (costs.threads > 1)}"
    title = f"One expert of {shape}, {dtype}, {cores} · {known.profile.machine}"
    name = "GPU" if on_gpu else "CPU in place of a GPU"
    draw_costs(costs, path, title, name)
    return path


def _check_picture(path: Path) -> None:
    import tempfile

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass  # permissions alone do not tell
        problem = "it is a folder" if path.is_dir() else None
    except OSError as error:
        problem = error.strerror
    if problem is not None:
        raise ConfigError(f"--picture {path} cannot be written ({problem}); name another file")


@dataclasses.dataclass(frozen=True)
class _Measured:
    limits: "MachineProfile"
    costs: "ExpertCosts"
    known: "Known"
    picture: Path
    missing: list[str]
    on_gpu: bool


def _print_json(measured: _Measured) -> None:
    known = measured.known
    report = {
        "machine": known.profile.machine,
        "version": known.profile.version,
        "profile": str(known.file),
        "measured": known.measured,
        "picture": str(measured.picture),
        "lacking": measured.missing,
        "limits": dataclasses.asdict(measured.limits),
        "expert": dataclasses.asdict(measured.costs),
    }
    print(json.dumps(report))


def _print_tables(measured: _Measured) -> None:
    from rich.console import Console

    from overspill.probe.known import is_temporary
    from overspill.probe.table import costs_lines, costs_table, limits_table, transfers_table

    limits, costs, known = measured.limits, measured.costs, measured.known
    console = Console(highlight=False, soft_wrap=True)
    for line in (known.profile.machine, *(f"  {line}" for line in measured.missing), ""):
        console.print(line, markup=False)
    console.print(
        transfers_table(limits, measured.on_gpu), limits_table(limits), costs_table(costs)
    )
    where = "for this process only" if is_temporary(known.file) else str(known.file)
    cached = "" if known.measured else " (cached; --again measures again)"
    for line in (
        *costs_lines(costs), "", f"profile: {where}{cached}", f"picture: {measured.picture}"
    ):  # fmt: skip
        console.print(line, markup=False)
