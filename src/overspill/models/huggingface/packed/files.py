"""Plain files of a packed checkpoint, written one tensor at a time."""

import json
from pathlib import Path

import torch

from overspill.core.json_text import parse_json
from overspill.models.huggingface.checks import CONFIG, INDEX
from overspill.models.huggingface.folder import CheckpointFolder
from overspill.models.huggingface.packed.config import FIELDS, MODELOPT
from overspill.tiers.safetensors_stream import StreamWriter, TensorSpec


def plain_specs(
    checkpoint: CheckpointFolder, file: Path, dtype: torch.dtype
) -> dict[str, TensorSpec]:
    """Return the specs of the plain tensors of one file of a checkpoint; packed tensors get
    `dtype`."""
    specs = checkpoint.specs
    return {
        name: TensorSpec(dtype, spec.shape) if name in checkpoint.packed else spec
        for name, spec in specs.items()
        if checkpoint.file_of(name) == file
    }


def write_plain(checkpoint: CheckpointFolder, specs: dict[str, TensorSpec], out: Path) -> None:
    """Write a file with these tensors, packed tensors matrix by matrix."""
    with StreamWriter(out, specs, {"format": "pt"}) as writer:
        for name, spec in specs.items():
            if name not in checkpoint.packed:
                writer.write(name, checkpoint.read_whole(name))
                continue
            matrix = torch.empty(checkpoint.packed[name].matrix_shape, dtype=spec.dtype)
            for offset in range(0, spec.numel, matrix.numel()):
                checkpoint.read(name, offset, matrix)
                writer.write_piece(name, offset, matrix)


def write_plain_texts(out: Path, files: dict[str, str], size: int) -> None:
    """Change the config and the index in the folder `out`, copied from a packed checkpoint, to
    those of the plain checkpoint. `files` are the files of its tensors, `size` is the size of
    all."""
    (out / MODELOPT).unlink(missing_ok=True)
    config = parse_json((out / CONFIG).read_bytes())
    for part in (config, config.get("text_config")):
        for field in FIELDS if isinstance(part, dict) else ():
            part.pop(field, None)
    (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    if len(set(files.values())) > 1 or (out / INDEX).is_file():
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n")
