"""All settings of a training run: one tree of dataclasses, from flags or a file.

The text under a field is its help on the command line. Field names are unique over the whole
tree, so each is also a flag (`--seq-len`), and a file may write them under their section or not.
This file imports no torch: `overspill train --help` reads it.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import json
import math
import textwrap
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overspill.core.errors import ConfigError
from overspill.core.sizes import parse_size


@dataclass(frozen=True)
class ModelSection:
    """The model"""

    preset: str = "nano"
    """The preset that the other model settings change: nano, moe-s, moe-m, moe-l, moe-xl, w1."""
    experts: int | None = None
    """Experts in every MoE layer."""
    layers: int | None = None
    """Number of layers."""
    d_model: int | None = None
    """Width of the residual stream."""
    d_hidden: int | None = None
    """Hidden width of a feed-forward block, of each expert too."""
    heads: int | None = None
    """Attention heads."""
    top_k: int | None = None
    """Experts that each token goes to."""
    moe_every: int | None = None
    """Every n-th layer is an MoE layer."""
    gated: bool | None = None
    """Gated SiLU experts (3 matrices) or GELU experts (2)."""
    vocab: int | None = None
    """Vocabulary of the model; the tokenizer's, rounded up to 64, when left out."""
    checkpoint_layers: bool = True
    """Recompute a layer's activations in backward instead of keeping them."""


@dataclass(frozen=True)
class DataSection:
    """The data and the batch"""

    data: str = "stdlib"
    """A text file (also .gz), a folder of them, or `stdlib`: the sources of Python's standard
    library on this machine."""
    tokenizer: str = "bytes"
    """`bytes`, or the path of a tokenizer.json."""
    cache: str = "~/.cache/overspill/tokens"
    """Folder that keeps tokenized data."""
    seq_len: int | None = None
    """Tokens in a sequence; the model's context when left out."""
    batch: int = 8
    """Sequences in a micro-batch."""
    accumulate: int = 1
    """Micro-batches in a step."""
    group: bool = True
    """All micro-batches of a step pass an expert in one stay on the GPU; else one after another."""


@dataclass(frozen=True)
class OptimSection:
    """The optimizer"""

    lr: float | None = None
    """Highest learning rate; when left out 0.46 / d_model and at most 1e-3, close to what GPT-3's
    sizes were trained with."""
    warmup: int = 20
    """Steps over which the learning rate rises from zero."""
    min_lr: float = 0.1
    """Where the cosine ends, as a share of the highest learning rate."""
    beta1: float = 0.9
    """Decay of Adam's first moment."""
    beta2: float = 0.95
    """Decay of Adam's second moment."""
    eps: float = 1e-8
    """Adam's epsilon."""
    weight_decay: float = 0.1
    """Decoupled weight decay."""
    clip: float = 1.0
    """Largest norm of the gradient over all parameters; 0 switches clipping off, and every
    expert's update then starts while backward still runs."""
    state_dtype: str = "fp32"
    """Adam's moments: fp32 or bf16."""


@dataclass(frozen=True)
class MemorySection:
    """Memory and offload"""

    gpu_memory: str | None = None
    """GPU memory the run may take, such as 12GiB; all there is when left out."""
    host_memory: str | None = None
    """Host memory the run may take, such as 96GiB; what is free when left out."""
    disk: str | None = None
    """Folder on an SSD for experts that do not fit in host memory."""
    device: str | None = None
    """cuda or cpu; the GPU if there is one when left out."""
    dtype: str | None = None
    """Weights: bf16 or fp32; bf16 on a GPU and fp32 on a CPU when left out."""
    mode: str = "auto"
    """Where experts live: auto (from the budgets), gpu, host or disk."""
    slots: int | None = None
    """Experts that fit on the compute device, instead of what --gpu-memory gives."""
    host_slots: int | None = None
    """Experts kept in host memory in front of the disk, instead of what --host-memory gives."""
    pin: float = 0.25
    """Share of the slots that keeps the busiest experts of the last step; 0 switches it off."""
    overlap_updates: bool = True
    """Optimizer steps of experts run beside backward and the next forward."""
    overlap_uploads: bool = True
    """Uploads run ahead of compute."""
    waves: bool = True
    """Experts that are resident together compute together; else one by one."""
    activations: str = "recompute"
    """Activations inside experts: recompute them in backward, or keep them."""
    threads: int | None = None
    """Threads of the CPU optimizer; all cores but four, at least three quarters, when left out."""


@dataclass(frozen=True)
class RunSection:
    """The run"""

    steps: int = 200
    """Optimizer steps of the whole run."""
    seed: int = 0
    """Seed of the weights and of the order of the data."""
    out: str | None = None
    """The run's folder; runs/<preset>, or the next free number after it, when left out."""
    resume: bool = False
    """Go on from the newest checkpoint in --out (when left out: of the latest run of this
    preset)."""
    eval_every: int = 50
    """Steps between evaluations; 0 switches them off."""
    eval_batches: int = 4
    """Batches in an evaluation."""
    save_every: int = 100
    """Steps between checkpoints; 0 leaves only the last. Ctrl-C saves one too."""
    keep: int = 2
    """Checkpoints that are kept."""
    log_every: int = 10
    """Steps between lines of output and traced steps."""
    trace_steps: int = 2
    """Steps traced at each of these, for the shares in the output and the timeline; 0: none."""


@dataclass(frozen=True)
class TrainConfig:
    """Everything that `overspill train` needs to know."""

    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    optim: OptimSection = field(default_factory=OptimSection)
    memory: MemorySection = field(default_factory=MemorySection)
    run: RunSection = field(default_factory=RunSection)

    def __post_init__(self) -> None:
        _check(self)

    @property
    def sequences_per_step(self) -> int:
        return self.data.batch * self.data.accumulate


@dataclass(frozen=True)
class Setting:
    """One field of the tree, as a flag needs it."""

    name: str
    section: str
    title: str
    """The section's own docstring, the heading of its flags."""
    kind: type[Any]
    """bool, int, float or str."""
    optional: bool
    default: Any
    help: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


@functools.cache
def settings() -> tuple[Setting, ...]:
    """Every setting of the tree, in its order."""
    found = []
    for section in dataclasses.fields(TrainConfig):
        section_type = typing.get_type_hints(TrainConfig)[section.name]
        helps, hints = _field_docs(section_type), typing.get_type_hints(section_type)
        for item in dataclasses.fields(section_type):
            hint = hints[item.name]
            optional = isinstance(hint, types.UnionType)
            kind = typing.get_args(hint)[0] if optional else hint
            title = (section_type.__doc__ or section.name).strip()
            found.append(
                Setting(
                    item.name, section.name, title, kind, optional, item.default, helps[item.name]
                )
            )
    return tuple(found)


def _field_docs(cls: type[Any]) -> dict[str, str]:
    """The string under each field of a dataclass, which Python itself throws away."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for item, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            assert isinstance(after, ast.Expr), f"{item.target.id} has no help"
            assert isinstance(after.value, ast.Constant)
            docs[item.target.id] = " ".join(str(after.value.value).split())
    return docs


def make_config(*layers: Mapping[str, Any]) -> TrainConfig:
    """The config from flat settings; a later layer wins over an earlier one."""
    merged = {name: value for layer in layers for name, value in layer.items()}
    sections: dict[str, dict[str, Any]] = {}
    known = {setting.name: setting for setting in settings()}
    for name, value in merged.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "see overspill train --help"
            raise ConfigError(f"there is no setting {name!r}; {hint}")
        setting = known[name]
        sections.setdefault(setting.section, {})[name] = _cast(setting, value)
    hints = typing.get_type_hints(TrainConfig)
    return TrainConfig(**{name: hints[name](**values) for name, values in sections.items()})


def _cast(setting: Setting, value: Any) -> Any:
    if value is None and setting.optional:
        return None
    if setting.kind is float and type(value) is int:
        return float(value)
    if setting.kind is str and type(value) is int and setting.name.endswith("_memory"):
        return str(value)  # a plain number of bytes
    if type(value) is not setting.kind:
        raise ConfigError(
            f"{setting.name} = {value!r} is not of the right kind; give a {setting.kind.__name__}"
        )
    return value


def read_config_file(path: Path) -> dict[str, Any]:
    """The flat settings of a .toml or .json file."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise ConfigError(
            f"config file {path} cannot be read ({error.strerror}); check the path"
        ) from error
    except ValueError as error:
        raise ConfigError(f"config file {path} cannot be parsed: {error}; correct it") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"config file {path} is a list or a value; write `name = value` lines")
    return dict(_flatten(tree, path))


def _flatten(tree: Mapping[str, Any], path: Path) -> Iterator[tuple[str, Any]]:
    # `data` is both a section and a setting: a table is the section.
    sections = {section.name for section in dataclasses.fields(TrainConfig)}
    section_of = {setting.name: setting.section for setting in settings()}
    for name, value in tree.items():
        if not isinstance(value, dict):
            yield name, value
            continue
        if name not in sections:
            raise ConfigError(f"{path}: there is no section [{name}]; there are {sorted(sections)}")
        for key, inner in value.items():
            if section_of.get(key, name) != name:
                raise ConfigError(f"{path}: {key} is in [{name}]; move it to [{section_of[key]}]")
            yield key, inner


def to_flat(config: TrainConfig) -> dict[str, Any]:
    return {item.name: getattr(getattr(config, item.section), item.name) for item in settings()}


def to_json(config: TrainConfig) -> str:
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def _check(config: TrainConfig) -> None:
    """Values that cannot be right, each named as the flag it is."""
    flat = to_flat(config)
    for name, value in flat.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be a finite number")
    rules: list[tuple[str, Callable[[float], bool], list[str]]] = [
        ("at least 1", lambda value: value >= 1, [
            "experts", "layers", "d_model", "d_hidden", "heads", "top_k", "moe_every", "vocab",
            "seq_len", "batch", "accumulate", "steps", "keep", "log_every", "eval_batches",
            "slots", "host_slots", "threads",
        ]),
        ("0 or more", lambda value: value >= 0, [
            "warmup", "eval_every", "save_every", "trace_steps", "seed", "clip", "lr",
            "weight_decay", "eps",
        ]),
        ("between 0 and 1", lambda value: 0 <= value <= 1, ["min_lr", "pin", "beta1", "beta2"]),
    ]  # fmt: skip
    for rule, holds, names in rules:
        for name in names:
            if flat[name] is not None and not holds(flat[name]):
                raise ConfigError(f"--{name.replace('_', '-')} {flat[name]} must be {rule}")
    choices = {
        "mode": ("auto", "gpu", "host", "disk"),
        "dtype": ("bf16", "fp32"),
        "state_dtype": ("fp32", "bf16"),
        "activations": ("recompute", "keep"),
    }
    for name, values in choices.items():
        if flat[name] is not None and flat[name] not in values:
            raise ConfigError(
                f"--{name.replace('_', '-')} {flat[name]} is not known; give {' or '.join(values)}"
            )
    for name in ("gpu_memory", "host_memory"):
        if flat[name] is not None:
            parse_size(flat[name], "--" + name.replace("_", "-"))
