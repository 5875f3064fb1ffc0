"""`overspill probe`: measures the machine and the cost of an expert on CPU and GPU."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import typer

from overspill.cli.flags import with_flags
from overspill.core.errors import ConfigError
from overspill.core.options import Count
from overspill.train.settings import Config

if TYPE_CHECKING:
    from overspill.core.experts import ExpertShape
    from overspill.hardware.profile import ExpertCosts, MachineProfile
    from overspill.probe.known import Known

_HELP = """Measure this machine: link, host memory, and the cost of an expert.

The results are cached per machine and version; planners read them. A plot shows the time to \
upload an expert and to compute it on CPU and GPU, by number of tokens.

[bold]Example[/bold]

  overspill probe

  overspill probe --preset w1 --picture w1.png
"""


@dataclass(frozen=True)
class ProbeSection:
    """What to measure"""

    preset: str | None = None
    """Measure the experts of this preset."""
    d_model: Count | None = None
    """Input width of the expert; default: 1024."""
    d_hidden: Count | None = None
    """Hidden width of the expert; default: 4096."""
    gated: bool | None = None
    """Gated SiLU (3 matrices) or GELU (2); default: GELU."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Data type of the weights: bf16 or fp32."""
    threads: Count | None = None
    """CPU threads; default: all cores but four, at least three quarters."""
    again: bool = False
    """Measure again instead of using cached results."""
    picture: str | None = None
    """File of the plot; default: next to the profile."""


@dataclass(frozen=True)
class ProbeConfig(Config):
    """All settings of `overspill probe`."""

    command: ClassVar[str] = "probe"
    probe: ProbeSection = field(default_factory=ProbeSection)


def add_to(app: typer.Typer) -> None:
    app.command("probe", help=_HELP)(with_flags(_probe, {}, ProbeConfig.settings()))


def _probe(as_json: bool, **flags: Any) -> None:
    given = {name: value for name, value in flags.items() if value is not None}
    asked = ProbeConfig.make(given).probe
    shape = _shape(asked)
    # Importing torch takes seconds: only after the flags are checked.
    from overspill.hardware.machine import choose_device, cpu_threads, usable_cores
    from overspill.models.progress_bar import TerminalProgress
    from overspill.probe.known import Known
    from overspill.probe.table import lacking
    from overspill.train.run_spec import DTYPES

    picture = None if asked.picture is None else Path(asked.picture).expanduser()
    if picture is not None:
        _check_picture(picture)
    device = choose_device()
    known = Known(device, cpu_threads(asked.threads), asked.again)
    bar = TerminalProgress(counted=True)
    try:
        limits = known.limits(bar)
        costs = known.costs(shape, DTYPES[asked.dtype], bar)
    finally:
        bar.stop()
    on_gpu = device.type == "cuda"
    drawn = _draw(costs, known, picture, asked.dtype, on_gpu)
    missing = lacking(usable_cores(), limits.kernel, on_gpu)
    measured = _Measured(limits, costs, known, drawn, missing, on_gpu)
    (_print_json if as_json else _print_tables)(measured)


def _shape(asked: ProbeSection) -> "ExpertShape":
    from overspill.core.experts import ExpertShape
    from overspill.models.presets import get_preset

    shape = ExpertShape(1024, 4096, gated=False)
    if asked.preset is not None:
        shape = get_preset(asked.preset).expert_shape
    return dataclasses.replace(
        shape,
        d_model=asked.d_model or shape.d_model,
        d_hidden=asked.d_hidden or shape.d_hidden,
        gated=shape.gated if asked.gated is None else asked.gated,
    )


def _draw(
    costs: "ExpertCosts", known: "Known", picture: Path | None, dtype: str, on_gpu: bool
) -> Path:
    from overspill.probe.picture import draw_costs

    path = known.file.with_suffix(".png") if picture is None else picture
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


@dataclass(frozen=True)
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
    from overspill.probe.table import costs_lines, costs_table, limits_table

    limits, costs, known = measured.limits, measured.costs, measured.known
    console = Console(highlight=False, soft_wrap=True)
    for line in (known.profile.machine, *(f"  {line}" for line in measured.missing), ""):
        console.print(line, markup=False)
    console.print(limits_table(limits, measured.on_gpu), costs_table(costs))
    where = "for this process only" if is_temporary(known.file) else str(known.file)
    cached = "" if known.measured else " (cached; --again measures again)"
    for line in (
        *costs_lines(costs), "", f"profile: {where}{cached}", f"picture: {measured.picture}"
    ):  # fmt: skip
        console.print(line, markup=False)
