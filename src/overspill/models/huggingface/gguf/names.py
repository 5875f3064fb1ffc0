"""Tensors of a checkpoint of Hugging Face from the tensors of a GGUF file, by their names."""

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from overspill.core.errors import CheckpointError
from overspill.models.huggingface.gguf.config import is_known
from overspill.models.huggingface.gguf.header import FLOATS, GgufHeader, StoredTensor
from overspill.models.huggingface.gguf.weights import GgufTensor, Rows

_log = logging.getLogger("overspill")
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_EXPERTS = re.compile(r"ffn_(gate|up|down|gate_up)_exps")
_ONE_EXPERT = re.compile(r"ffn_(gate|up|down)\.(\d+)")  # files of Mixtral from before April 2024
_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_STANDARD = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sinks": "self_attn.sinks",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.gate.e_score_correction",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_OWN: dict[str, dict[str, str]] = {
    "qwen2moe": {
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    },
    "llama": {"ffn_gate_inp": "block_sparse_moe.gate"},
    "minimax-m2": {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "exp_probs_b": "block_sparse_moe.e_score_correction",
    },
    "gpt-oss": {"ffn_gate_inp": "mlp.router"},
}
_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}
_WITHOUT_SUFFIX = ("self_attn.sinks.weight",)


@dataclass(frozen=True)
class Translation:
    """Tensors of a GGUF file under the names of a checkpoint of Hugging Face."""

    plain: Mapping[str, tuple[str, tuple[int, ...]]]
    """Names and shapes of tensors that need no change, by their names in the file."""
    others: Mapping[str, GgufTensor]
    """Tensors that are packed, or parts of stored tensors, or stored in another order."""


def translate(header: GgufHeader) -> Translation:
    """Translate all tensors of a file. Raises for tensors that the architecture does not have."""
    if not is_known(header.architecture):
        _log.warning(
            "%s is a model of %s, which Overspill does not know: its tensors are read by their "
            "usual names, as they are stored; compare some answers with those of another program",
            header.path, header.architecture,
        )  # fmt: skip
    plain: dict[str, tuple[str, tuple[int, ...]]] = {}
    others: dict[str, GgufTensor] = {}
    translator = _Translator(header)
    for stored in header.tensors.values():
        for found in translator.translate(stored):
            if isinstance(found, GgufTensor):
                others[found.name] = found
            else:
                plain[stored.name] = found
    return Translation(plain, others)


class _Translator:
    def __init__(self, header: GgufHeader) -> None:
        self._header, self._tensors = header, header.tensors
        self._architecture = header.architecture
        self._names = _STANDARD | _OWN.get(self._architecture, {})

    def translate(self, stored: StoredTensor) -> Iterator[tuple[str, tuple[int, ...]] | GgufTensor]:
        """Translate a stored tensor, or the first of several."""
        if stored.name in _WHOLE:
            yield self._same(_WHOLE[stored.name], stored)
            return
        match = _BLOCK.fullmatch(stored.name)
        if match is None:
            raise self._unknown(stored)
        layer, base, end = int(match[1]), match[2], match[3]
        prefix = f"model.layers.{layer}."
        if layer >= self._header.n_layers:  # predicts further tokens
            return
        if experts := _EXPERTS.fullmatch(base):
            yield from self._experts(prefix, experts[1], end, stored)
        elif one := _ONE_EXPERT.fullmatch(base):
            yield self._same(self._expert_name(prefix, one[1], int(one[2])), stored)
        elif base in ("attn_k_b", "attn_v_b"):
            if base == "attn_k_b":
                yield self._keys_and_values(f"{prefix}self_attn.kv_b_proj.weight", stored)
        elif base in self._names:
            name = f"{prefix}{self._names[base]}"
            joint = "_" if name.endswith("e_score_correction") else "."
            name = f"{name}{joint}{end}"
            if self._architecture == "llama" and base in ("attn_q", "attn_k"):
                yield self._permuted(name, base, stored)
            else:
                yield self._same(name.removesuffix(".weight") if "sinks" in name else name, stored)
        else:
            raise self._unknown(stored)

    def _same(self, name: str, stored: StoredTensor) -> tuple[str, tuple[int, ...]] | GgufTensor:
        """Return a tensor with all values of a stored tensor."""
        shape = stored.shape
        if name.endswith("shared_expert_gate.weight") and len(shape) == 1:
            shape = (1, *shape)
        if stored.type in FLOATS:
            return name, shape
        return GgufTensor.of(name, (Rows.all_of(stored),), shape)

    def _permuted(self, name: str, base: str, stored: StoredTensor) -> GgufTensor:
        """Return queries or keys in the order of transformers, which rotates rows that are half a
        head apart; llama.cpp rotates neighbouring rows."""
        heads = int(self._header.get("attention.head_count", 0))
        if base == "attn_k":
            heads = int(self._header.get("attention.head_count_kv", heads))
        if heads < 1 or stored.shape[0] % (2 * heads):
            raise CheckpointError(
                f"{self._header.path}: {stored.name} has {stored.shape[0]} rows, which "
                f"{heads} heads do not divide; download it again"
            )

        def views(out: Tensor) -> list[Tensor]:
            return [out.unflatten(0, (heads, 2, -1)).transpose(1, 2)]

        return GgufTensor.of(name, (Rows.all_of(stored),), stored.shape, views)

    def _keys_and_values(self, name: str, keys: StoredTensor) -> GgufTensor:
        """Return `kv_b_proj` of DeepSeek: for each head the rows of keys, stored transposed, and of
        values."""
        values = self._other(keys, keys.name.replace("attn_k_b", "attn_v_b"))
        if len(keys.shape) != 3 or len(values.shape) != 3:
            raise self._unknown(keys)
        heads, rank, n_keys = keys.shape

        def views(out: Tensor) -> list[Tensor]:
            each = out.unflatten(0, (heads, -1))
            return [each[:, :n_keys].transpose(1, 2), each[:, n_keys:]]

        sources = Rows.all_of(keys), Rows.all_of(values)
        shape = (heads * (n_keys + values.shape[1]), rank)
        return GgufTensor.of(name, sources, shape, views)

    def _experts(
        self, prefix: str, projection: str, end: str, stored: StoredTensor
    ) -> Iterator[GgufTensor]:
        """Return the tensors of all experts of a layer."""
        if self._architecture == "gpt-oss":
            yield from self._stacks(prefix, projection, end, stored)
            return
        if end != "weight" or len(stored.shape) != 3:
            raise self._unknown(stored)
        n_experts, rows, columns = stored.shape
        parts = ("gate", "up") if projection == "gate_up" else (projection,)
        each = rows // len(parts)
        for expert in range(n_experts):
            for number, part in enumerate(parts):
                name = self._expert_name(prefix, part, expert)
                source = Rows(stored, expert * rows + number * each, each)
                yield GgufTensor.of(name, (source,), (each, columns))

    def _stacks(
        self, prefix: str, projection: str, end: str, stored: StoredTensor
    ) -> Iterator[GgufTensor]:
        """Return the experts of gpt-oss: stacks of transposed matrices, with gate and up in
        turn."""
        if projection == "up":  # comes with gate
            return
        name = f"{prefix}mlp.experts.{'down' if projection == 'down' else 'gate_up'}_proj"
        name += "_bias" if end == "bias" else ""
        stacked = [stored]
        if projection == "gate":
            stacked.append(self._other(stored, stored.name.replace("gate", "up")))
        if len({tensor.shape for tensor in stacked}) != 1 or len(stored.shape) != 3 - (
            end == "bias"
        ):
            raise self._unknown(stored)
        n_experts, rows = stored.shape[:2]
        each = rows // 2 if projection == "gate_up" else rows
        if end == "bias":  # rows of one column
            sources = tuple(Rows(t, 0, rows, columns=1) for t in stacked)
            shape: tuple[int, ...] = (len(stacked) * rows,)
        else:
            sources = tuple(Rows(tensor, 0, rows) for tensor in stacked)
            shape = (stored.shape[2], len(stacked) * rows)

        def views(out: Tensor) -> list[Tensor]:
            by_row = out if out.dim() == 1 else out.T
            if projection == "gate_up":  # all gates, then all ups
                return [by_row.unflatten(0, (each, 2)).transpose(0, 1)]
            return [by_row[at :: len(stacked)] for at in range(len(stacked))]

        yield GgufTensor.of(name, sources, shape, views, n_experts, transposed=end == "weight")

    def _expert_name(self, prefix: str, projection: str, expert: int) -> str:
        if self._architecture in ("llama", "minimax-m2"):
            return f"{prefix}block_sparse_moe.experts.{expert}.{_MIXTRAL[projection]}.weight"
        return f"{prefix}mlp.experts.{expert}.{projection}_proj.weight"

    def _other(self, stored: StoredTensor, name: str) -> StoredTensor:
        if name not in self._tensors:
            raise CheckpointError(
                f"{self._header.path} has {stored.name}, but no {name}; download it again"
            )
        return self._tensors[name]

    def _unknown(self, stored: StoredTensor) -> CheckpointError:
        return CheckpointError(
            f"{self._header.path}: {stored.name} with the shape {list(stored.shape)} is not a "
            f"tensor of {self._architecture} that Overspill knows; give the checkpoint in "
            "safetensors"
        )
