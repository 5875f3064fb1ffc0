"""Finds a checkpoint and refuses checkpoints that cannot be loaded, by config.json and the names of
files: before torch and transformers are imported, which takes seconds, and before weights are
downloaded."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overspill.core.errors import CheckpointError, ConfigError
from overspill.core.json_text import parse_json
from overspill.models.huggingface.gguf.config import check_family, make_config
from overspill.models.huggingface.gguf.header import all_files, first_file, is_gguf, read_header
from overspill.models.huggingface.gguf.tokenizer import is_known
from overspill.models.huggingface.packed.config import read_packing

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
ADAPTER_CONFIG = "adapter_config.json"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.bin")
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model", "tokenizer_config.json",
)  # fmt: skip
_SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]
_WEIGHTS = ["*.safetensors"]
_GIVE = (
    "give the folder of a checkpoint, a GGUF file, or a repository like mistralai/Mixtral-8x7B-v0.1"
)
_CONVERT = (
    'python -c "from transformers import AutoTokenizer as T, {model} as M; '
    "M.from_pretrained('{folder}').save_pretrained('{out}'); "
    "T.from_pretrained('{folder}').save_pretrained('{out}')\""
)


def find_folder(path_or_repo: str | os.PathLike[str]) -> Path:
    """Return the local folder of a checkpoint, or a GGUF file; a repository of the hub is
    downloaded, unless cached."""
    path = _local(path_or_repo)
    if path is not None:
        return path
    name = _repository(path_or_repo)
    _check_download(name)
    return _download(name, [*_SMALL_FILES, *_WEIGHTS])


def check_checkpoint(path_or_repo: str | os.PathLike[str]) -> Path:
    """Raises if Overspill cannot load the checkpoint; no-op for an adapter, which is checked with
    its base model. Returns the GGUF file, or the folder of all files but the weights, which are not
    downloaded. GGUF files are downloaded, since they contain everything."""
    path = _local(path_or_repo)
    if path is None:
        return _check_download(_repository(path_or_repo))
    if not is_adapter(path):
        check_weights(path, read_json_config(path))
    return path


def _local(path_or_repo: str | os.PathLike[str]) -> Path | None:
    """Return the folder or GGUF file at a path, or the GGUF file OWNER/REPOSITORY/FILE of the hub,
    which is downloaded unless cached."""
    path, name = Path(path_or_repo).expanduser(), str(path_or_repo)
    if path.is_dir() or is_gguf(path):
        return path
    if path.suffix.lower() == ".gguf" and path.parent.is_dir():
        files = sorted(file.name for file in path.parent.iterdir() if is_gguf(file))
        shown = ", ".join(files[:3]) + (", ..." if len(files) > 3 else "")
        fix = f"the folder {path.parent} has {shown}" if files else _GIVE
        raise ConfigError(f"{name} does not exist; {fix}")
    owner, _, rest = name.partition("/")
    repository, _, file = rest.partition("/")
    if not (owner and repository and file) or not name.lower().endswith(".gguf"):
        return None
    if name.startswith((".", "/", "~")):
        return None
    found = _download(f"{owner}/{repository}", all_files(file)) / file
    if not is_gguf(found):
        raise ConfigError(f"the repository {owner}/{repository} has no file {file}; see its page")
    return found


def is_adapter(folder: Path) -> bool:
    """Return whether a folder has an adapter of peft and no model."""
    return (folder / ADAPTER_CONFIG).is_file() and not _has_safetensors(folder)


def _has_safetensors(folder: Path) -> bool:
    return (folder / INDEX).is_file() or (folder / SINGLE).is_file()


def find_gguf(folder: Path) -> Path | None:
    """Return the first GGUF file of a checkpoint: the given file, or the only model in a folder
    without safetensors. Raises if there are several models."""
    if folder.is_file():
        return first_file(folder)
    if _has_safetensors(folder):
        return None
    ggufs = filter(is_gguf, folder.iterdir())
    files = [file for file in ggufs if not file.name.startswith("mmproj")]
    models = sorted({first_file(file) for file in files})
    if len(models) > 1:
        raise ConfigError(
            f"{folder} has {len(models)} GGUF models ({', '.join(m.name for m in models[:3])}"
            f"{', ...' if len(models) > 3 else ''}); give the file of one of them"
        )
    return models[0] if models else None


def texts_of(folder: Path) -> Path:
    """Return the folder of the config, the tokenizer and so on; for a GGUF file, its folder."""
    return folder.parent if folder.is_file() else folder


def _repository(path_or_repo: str | os.PathLike[str]) -> str:
    """Return the name of a repository of the hub."""
    path, name = Path(path_or_repo).expanduser(), str(path_or_repo)
    if path.is_file():
        raise ConfigError(f"{name} is a file; give the folder of a checkpoint, or a GGUF file")
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ConfigError(f"{name} does not exist; {_GIVE}")
    return name


def _check_download(name: str) -> Path:
    """Downloads all but the weights of a repository and checks its config."""
    if name.lower().endswith("gguf"):
        raise ConfigError(
            f"{name} has GGUF files, of which one is a whole model: give {name}/FILE.gguf, one of "
            "those on its page"
        )
    folder = _download(name, _SMALL_FILES)
    if not (folder / ADAPTER_CONFIG).is_file():
        read_json_config(folder)
    return folder


def _download(name: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # no network, no such repository, no access
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{name} is neither a folder nor a repository that can be downloaded ({reason})"
        ) from error


def read_json_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json, or the config in the metadata of a GGUF file. Raises if
    weights are packed in a way that Overspill cannot read, or there are no experts."""
    path, gguf = texts_of(folder) / CONFIG, find_gguf(folder)
    if not path.is_file():
        if gguf is not None:
            return make_config(read_header(gguf))
        raise CheckpointError(
            f"{folder} has no {CONFIG}: it is not a Hugging Face checkpoint; give the folder that "
            "holds config.json and the .safetensors files"
        )
    try:
        config = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} cannot be used: it is not a JSON object")
    if gguf is not None:
        check_family(read_header(gguf), config.get("model_type"))
    else:
        read_packing(folder, config)
    if not _names_experts(config):
        kind = config.get("model_type")
        if kind is None:
            raise CheckpointError(
                f"{path} cannot be used: it has no model_type, so it is not that of a model of "
                "Hugging Face"
            )
        raise ConfigError(
            f"{folder} is a dense model ({kind}): its {CONFIG} names no experts; give a "
            "Mixture-of-Experts checkpoint, of a family in docs/families.md"
        )
    return config


def _names_experts(config: Mapping[str, Any]) -> bool:
    """Return whether a field says that the model has experts; None, 0 and False do not."""
    parts = [config]  # the config of a language model may be a part of another one
    while parts:
        for name, value in parts.pop().items():
            if isinstance(value, dict):
                parts.append(value)
            elif name == "model_type":
                if "moe" in str(value).lower():
                    return True
            elif value and ("expert" in name.lower() or "moe" in name.lower()):
                return True
    return False


def check_weights(folder: Path, config: Mapping[str, Any]) -> None:
    """Raises if there are no weights in safetensors or GGUF."""
    if find_gguf(folder) is not None or _has_safetensors(folder):
        return
    if any((folder / name).exists() for name in _PICKLES):
        command = _CONVERT.format(
            folder=folder, out=f"{folder}-safetensors", model=_architecture(config)
        )
        raise CheckpointError(
            f"{folder} has pickled weights (.bin), which can run any code; Overspill reads "
            f"safetensors only. If you trust it, convert it with: {command}"
        )
    raise CheckpointError(
        f"{folder} has neither {SINGLE} nor {INDEX}, nor a GGUF file; download its weights"
    )


def _architecture(config: Mapping[str, Any]) -> str:
    """Return the class that the config names, which may be an encoder-decoder."""
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else None
    known = isinstance(first, str) and first.isidentifier()  # it becomes a part of a command
    return str(first) if known else "AutoModelForCausalLM"


def check_tokenizer(folder: Path, flag: str) -> None:
    """Raises if a folder has no tokenizer; the error names the argument that gave it."""
    if not has_tokenizer(folder):
        where = "its folder" if folder.is_file() else "it"
        raise ConfigError(
            f"{flag} {folder} has no tokenizer{_kind_of_tokenizer(folder)}; copy tokenizer.json "
            f"and tokenizer_config.json of the original model into {where}"
            + ("" if flag == "MODEL" else ", or give the folder of one with --tokenizer")
        )


def _kind_of_tokenizer(folder: Path) -> str:
    """Return the kind of an unknown tokenizer in the metadata of a GGUF file."""
    gguf = find_gguf(folder) if folder.exists() else None
    if gguf is None:
        return ""
    metadata = read_header(gguf).metadata
    kind, words = (metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    return f" that Overspill knows (in its metadata: {kind}, {words})"


def has_tokenizer(folder: Path) -> bool:
    """Return whether there is a tokenizer in the folder, or in the metadata of a GGUF file."""
    if has_tokenizer_files(folder):
        return True
    gguf = find_gguf(folder) if folder.exists() else None
    return gguf is not None and is_known(read_header(gguf).metadata)


def has_tokenizer_files(folder: Path) -> bool:
    return any((texts_of(folder) / name).is_file() for name in _TOKENIZER_FILES)
