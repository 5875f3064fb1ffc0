"""Packing of weights according to config.json, read without torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overspill.core.errors import CheckpointError, ConfigError
from overspill.core.json_text import parse_json
from overspill.core.packing import Kind, Scheme

FIELDS = ("quantization_config", "compression_config")
MODELOPT = "hf_quant_config.json"
_BF16 = "give the checkpoint in bf16, which its page on the hub usually names as the base model"
_READS = "MXFP4, MXFP8, NVFP4, FP8, compressed-tensors, AWQ and GPTQ"


@dataclass(frozen=True)
class Packing:
    """Packing of the weights of a checkpoint, as its config describes it."""

    method: str
    schemes: tuple[Scheme, ...]
    activations: bool
    """Whether activations are to be quantized as well."""


def read_packing(folder: Path, config: Mapping[str, Any]) -> Packing | None:
    """Return the packing of the weights of a checkpoint, or None if they are plain. Raises if
    Overspill cannot unpack them."""
    text = config.get("text_config")
    places = [config, text] if isinstance(text, dict) else [config]
    given = next((place[name] for place in places for name in FIELDS if place.get(name)), None)
    if given is None:
        given = _read_modelopt(folder)
    if given is None:
        return None
    if not isinstance(given, dict):
        raise CheckpointError(f"{folder}: {FIELDS[0]} in config.json is not a JSON object")
    method = given.get("quant_method")
    if method is None and ("config_groups" in given):
        method = "compressed-tensors"
    if not isinstance(method, str) or method not in METHODS:
        raise ConfigError(
            f"{folder} is quantized ({'unknown' if method is None else str(method)[:60]}); "
            f"Overspill reads weights packed as {_READS}; {_BF16}"
        )
    return _Reader(folder, method, given).read()


def without_packing(config: Any) -> Any:
    """Return the config of a transformers model without its quantization."""
    for part in (config, getattr(config, "text_config", None)):
        for name in FIELDS if part is not None else ():
            vars(part).pop(name, None)
    return config


def _read_modelopt(folder: Path) -> dict[str, Any] | None:
    """Return the quantization config of a checkpoint of ModelOpt, which may have a file of its
    own."""
    path = folder / MODELOPT
    if not path.is_file():
        return None
    try:
        found = parse_json(path.read_bytes())["quantization"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}; download it again") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} cannot be used: quantization is not a JSON object")
    return {**found, "quant_method": "modelopt"}


class _Reader:
    """Reader of one quantization_config, which refuses packings that Overspill cannot unpack."""

    def __init__(self, folder: Path, method: str, given: Mapping[str, Any]) -> None:
        self._folder, self._method, self._given = folder, method, given

    def read(self) -> Packing:
        if self._given.get("transform_config"):
            raise self._refused("transform_config (rotated weights)")
        schemes, activations = METHODS[self._method](self)
        return Packing(self._method, tuple(dict.fromkeys(schemes)), activations)

    def mxfp4(self) -> tuple[list[Scheme], bool]:
        return [Scheme(Kind.MXFP4_STACK, (1, 32))], False

    def fp8(self) -> tuple[list[Scheme], bool]:
        given = self._given
        if given.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise self._refused(f"fmt={given['fmt']!r}; only e4m3 is supported")
        size = given.get("weight_block_size", [1, 32] if self._method == "mxfp8" else [128, 128])
        if size is None:
            schemes = [Scheme(Kind.E4M3, (None, None), 8), Scheme(Kind.E4M3, (1, None), 8)]
        else:
            schemes = [Scheme(Kind.E4M3, self._block(size), 8)]
        # the experts of DeepSeek-V4
        schemes.append(Scheme(Kind.E2M1, (1, 32)))
        return schemes, True

    def compressed_tensors(self) -> tuple[list[Scheme], bool]:
        sparsity = self._given.get("sparsity_config")
        if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
            raise self._refused(f"sparsity_config with format={sparsity['format']!r}")
        groups = self._given.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise self._refused(f"config_groups={groups!r}")
        schemes, activations = [], False
        for group in groups.values():
            if not isinstance(group, dict):
                raise self._refused(f"config_groups with {group!r}")
            weights = group.get("weights")
            activations |= bool(group.get("input_activations"))
            if weights:
                layout = group.get("format") or self._given.get("format")
                schemes.append(self._compressed(weights, layout))
        return schemes, activations

    def _compressed(self, weights: Any, layout: Any) -> Scheme:
        """Return the scheme of one group of compressed-tensors."""
        if not isinstance(weights, dict):
            raise self._refused(f"weights={weights!r}")
        kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
        if weights.get("actorder") in ("group", True):
            raise self._refused("actorder='group' (weight_g_idx)")
        if weights.get("dynamic"):
            raise self._refused("dynamic scales of weights")
        block = self._strategy(weights)
        match kind, bits:
            case "float", 4:
                return Scheme(Kind.E2M1, block)
            case "float", 8:
                return Scheme(Kind.E4M3, block, 8)
            case "int", 4 | 8 if layout == "pack-quantized":
                return Scheme(Kind.INTEGERS, block, bits)
            case "int", 8:
                return Scheme(Kind.INT8, block, 8)
        raise self._refused(f"weights of type {kind!r} with num_bits={bits!r} ({layout})")

    def _strategy(self, weights: Mapping[str, Any]) -> tuple[int | None, int | None]:
        strategy, size = weights.get("strategy"), weights.get("group_size")
        if strategy is None:
            strategy = "channel" if size == -1 else "tensor" if size is None else "group"
        match strategy:
            case "tensor":
                return None, None
            case "channel":
                return 1, None
            case "group" | "tensor_group":
                return 1, self._size("group_size", size)
            case "block":
                structure = weights.get("block_structure")
                if isinstance(structure, str):  # 128x128
                    structure = [int(n) for n in structure.split("x") if n.isdigit()]
                return self._block(structure)
        raise self._refused(f"strategy={strategy!r}")

    def modelopt(self) -> tuple[list[Scheme], bool]:
        algorithm = self._given.get("quant_algo")
        if algorithm == "MIXED_PRECISION":
            layers = self._given.get("quantized_layers")
            each = list(layers.values()) if isinstance(layers, dict) else [layers]
        else:
            each = [self._given]
        return [self._modelopt(layer) for layer in each], True

    def _modelopt(self, layer: Any) -> Scheme:
        algorithm = layer.get("quant_algo") if isinstance(layer, dict) else layer
        match str(algorithm).upper():
            case "NVFP4":
                return Scheme(Kind.E2M1, (1, 16))
            case "MXFP8":
                return Scheme(Kind.E4M3, (1, 32), 8)
            case "FP8":
                return Scheme(Kind.E4M3, (None, None), 8)
            case "FP8_PER_CHANNEL_PER_TOKEN":
                return Scheme(Kind.E4M3, (1, None), 8)
            case "FP8_PB_WO":
                return Scheme(Kind.E4M3, (128, 128), 8)
        raise self._refused(f"quant_algo={algorithm!r}")

    def awq(self) -> tuple[list[Scheme], bool]:
        given = self._given
        version = str(given.get("version", "gemm")).lower()
        if version != "gemm":
            raise self._refused(f"version={version!r}; only gemm is supported")
        if given.get("bits", 4) != 4:
            raise self._refused(f"bits={given['bits']!r}; only 4 is supported")
        return [Scheme(Kind.AWQ, (1, self._group()))], False

    def gptq(self) -> tuple[list[Scheme], bool]:
        given = self._given
        if given.get("bits") not in (4, 8):
            raise self._refused(f"bits={given.get('bits')!r}; only 4 and 8 are supported")
        if given.get("desc_act"):
            raise self._refused("desc_act=true (columns in the order of activations, g_idx)")
        layout = given.get("checkpoint_format") or "gptq"
        if layout not in ("gptq", "gptq_v2"):
            raise self._refused(f"checkpoint_format={layout!r}; only gptq and gptq_v2 are known")
        offset = int(layout == "gptq")
        return [Scheme(Kind.GPTQ, (1, self._group()), given["bits"], offset)], False

    def _group(self) -> int | None:
        size = self._given.get("group_size", 128)
        return None if size == -1 else self._size("group_size", size)

    def _block(self, size: Any) -> tuple[int, int]:
        if not isinstance(size, Sequence) or isinstance(size, str) or len(size) != 2:
            raise self._refused(f"blocks of weights of the size {size!r}")
        return self._size("a block size", size[0]), self._size("a block size", size[1])

    def _size(self, name: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._refused(f"{name} {value!r}")
        return value

    def _refused(self, what: str) -> ConfigError:
        return ConfigError(
            f"{self._folder} is quantized ({self._method}) with {what}, which Overspill cannot "
            f"unpack; {_BF16}"
        )


METHODS = {
    "mxfp4": _Reader.mxfp4,
    "fp8": _Reader.fp8,
    "mxfp8": _Reader.fp8,
    "compressed-tensors": _Reader.compressed_tensors,
    "modelopt": _Reader.modelopt,
    "modelopt_fp4": _Reader.modelopt,
    "awq": _Reader.awq,
    "gptq": _Reader.gptq,
}
