"""Encoder-decoders with random weights for bench/switch.py: shapes, memory, routing, and the bytes
that a token reads."""

import dataclasses
import gc
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from packed_models import PLAIN, random_model
from torch import Tensor

import overspill
from overspill.models.checkpoint_presets import ENCODER_DECODERS, NLLB
from overspill.models.huggingface.dictionaries import HostedDictionary
from overspill.moe.placeholder import ExpertPlaceholder
from overspill.simulate import DrawnRouting, ReplayedRouting

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_DRAWN = 4096
"""Tokens of drawn routing, which then begin again."""
_TINY: dict[str, int] = {
    "d_model": 32, "d_ff": 32, "n_heads": 2, "n_layers": 4, "moe_every": 2, "vocab": 256,
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A preset, or with fewer blocks in each stack; `tiny` to see that a benchmark runs."""

    preset: str
    layers: int | None = None
    tiny: bool = False

    @property
    def _sizes(self) -> Any:
        own = ENCODER_DECODERS[self.preset]
        if self.tiny:
            return dataclasses.replace(own, **_TINY, n_experts=8)
        return own if self.layers is None else dataclasses.replace(own, n_layers=self.layers)

    @property
    def short(self) -> str:
        """For tables and pictures."""
        return self.preset.removeprefix("switch-").capitalize()

    def config(self) -> Any:
        from transformers import AutoConfig

        fields = self._sizes.fields()
        return AutoConfig.for_model(fields.pop("model_type"), **fields)

    @property
    def is_nllb(self) -> bool:
        return isinstance(self._sizes, NLLB)

    @property
    def top_k(self) -> int:
        return 2 if self.is_nllb else 1

    @property
    def blocks(self) -> int:
        """MoE blocks of the decoder."""
        return int(self._sizes.n_moe_layers) // 2

    @property
    def n_experts(self) -> int:
        """Experts of both stacks."""
        return int(self._sizes.n_moe_layers * self._sizes.n_experts)

    @property
    def expert_bytes(self) -> int:
        own = self._sizes
        biases = own.d_model + own.d_ff if self.is_nllb else 0
        return 2 * int(2 * own.d_model * own.d_ff + biases)

    @property
    def dense_bytes(self) -> int:
        own = self._sizes
        in_float32 = int(own.n_moe_layers * own.n_experts * own.d_model)  # routers
        return 2 * (int(own.total_params) + in_float32) - self.n_experts * self.expert_bytes

    def within(self, nbytes: float, blocks: int) -> "Shape":
        """The shape with as many MoE blocks in each stack as have their experts in `nbytes`, at
        most `blocks` and at least two."""
        own = self._sizes
        each = 2 * own.n_experts * self.expert_bytes  # of a block in both stacks
        count = max(2, min(self.blocks, blocks, int(nbytes // each)))
        if count == self.blocks:
            return self
        return dataclasses.replace(self, layers=count * own.moe_every)

    def __str__(self) -> str:
        own, full = self._sizes, ENCODER_DECODERS[self.preset]
        name = f"{self.preset} ({own.total_params / 1e9:.3g} B parameters)"
        return name if own == full else f"{name} with {own.n_layers} of {full.n_layers} blocks"


def build(shape: Shape, level: int = 1, **options: Any) -> Any:
    """A model with random weights and pre-gates of that level, whose experts are in host memory or
    on disk. GPU slots for prompts are as few as possible."""
    gc.collect()  # frees the model before this one, which has cycles: its memory would count
    torch.manual_seed(0)
    settings = overspill.Settings(residency=False, fix_nllb_routing=shape.is_nllb)
    given: dict[str, Any] = {"slots": 2, "device": DEVICE, "settings": settings, **options}
    model = random_model(shape.config(), PLAIN, **given)
    _vary(model)
    return overspill.pregate(model, level) if level else model


@torch.no_grad()
def _vary(model: Any) -> None:
    """Random weights would repeat one token, or send all tokens to one expert. With large
    embeddings routers tell tokens apart in all blocks; with small logits answers are almost evenly
    drawn."""
    decoder = model.get_decoder()
    last = decoder.final_layer_norm if hasattr(decoder, "final_layer_norm") else decoder.layer_norm
    model.get_input_embeddings().weight.mul_(4.0)
    last.weight.mul_(0.003)


class TokenBytes(NamedTuple):
    """Weights that a new token reads."""

    dense: int
    experts: int


_NOT_READ = re.compile(r"EncDecAttention\.[kv]\.|cross_attention\.[kv]_proj\.|embed_tokens\.")
"""Parameters of a decoder that a step does not read: keys and values of the source are cached, and
of the embedding one row is read."""


def token_bytes(model: Any, top_k: int) -> TokenBytes:
    """The decoder and the output head, with `top_k` experts in each MoE block."""
    named = model.get_decoder().named_parameters()
    dense = sum(p.nbytes for name, p in named if not _NOT_READ.search(name))
    dense += model.get_output_embeddings().weight.nbytes
    blocks = decoder_blocks(model)
    return TokenBytes(dense, blocks * top_k * model.overspill.layout.weight_bytes)


def decoder_blocks(model: Any) -> int:
    """MoE blocks of the decoder."""
    return sum(isinstance(p, ExpertPlaceholder) for p in model.get_decoder().parameters())


def dense_bytes(model: Any) -> int:
    """All weights that are not experts, of both stacks."""
    return sum(p.nbytes for p in model.parameters())


def equation_1(model: Any, top_k: int) -> int:
    """The paper's equation 1: peak memory of the parameters, with the active experts of two MoE
    blocks."""
    return dense_bytes(model) + 2 * top_k * int(model.overspill.layout.weight_bytes)


class StepRouting:
    """Routing of the decoder's MoE blocks, token by token, used for those of the encoder too. Steps
    and prompts have positions of their own: a step takes all layers at once."""

    def __init__(self, ids_TLK: Tensor, model: Any) -> None:
        engine = model.overspill
        self.n_layers, self.n_experts = engine.n_layers, engine.n_experts
        self.top_k = ids_TLK.shape[2]
        repeats = math.ceil(self.n_layers / ids_TLK.shape[1])
        ids = ids_TLK.to(torch.uint8).repeat(1, repeats, 1)[:, -self.n_layers :]
        self._steps = ReplayedRouting(ids, self.n_experts)
        self._prompts = ReplayedRouting(ids, self.n_experts)

    def all_layers(self, n_tokens: int, device: torch.device) -> Tensor:
        return self._steps.all_layers(n_tokens, device)

    def __call__(self, layer: int, n_tokens: int, device: torch.device) -> Tensor:
        return self._prompts(layer, n_tokens, device)


def in_turn(model: Any) -> StepRouting:
    """Every token has the next expert: requests that run at once use different ones."""
    count = model.overspill.n_experts
    ids = torch.arange(count)[:, None, None].expand(count, decoder_blocks(model), 1)
    return StepRouting(ids, model)


def drawn(model: Any, top_k: int, exponent: float, seed: int = 0) -> StepRouting:
    """Routing drawn by Zipf's law: the n-th most used expert of a block, another one in each, has a
    share of n^-exponent. With 0 every expert is as likely as any other."""
    blocks, count = decoder_blocks(model), model.overspill.n_experts
    generator = torch.Generator().manual_seed(seed)
    ranks = [torch.randperm(count, generator=generator) for _ in range(blocks)]
    shares = [((1.0 + each.double()) ** -exponent).tolist() for each in ranks]
    source = DrawnRouting(shares, top_k, seed)
    ids = [source(layer, _DRAWN, torch.device("cpu")) for layer in range(blocks)]
    return StepRouting(torch.stack(ids, dim=1), model)


def recorded(path: Path, model: Any, top_k: int) -> StepRouting:
    """Recorded routing of a model with fewer experts and more layers: an expert here is a pair of
    experts in two layers there."""
    with np.load(path, allow_pickle=False) as file:
        found_TLK = torch.from_numpy(file["experts"].astype(np.int64))
    blocks, count = decoder_blocks(model), model.overspill.n_experts
    known = int(found_TLK.max()) + 1
    _, n_layers, most = found_TLK.shape
    if n_layers < 2 * blocks or count % known or count > known**2 or top_k > most:
        raise SystemExit(
            f"--routing {path}: {n_layers} layers of {known} experts, {most} for a token, do not "
            f"make {blocks} blocks of {count} experts, {top_k} for a token"
        )
    first, second = (found_TLK[:, part : 2 * blocks : 2, :top_k] for part in range(2))
    return StepRouting(first + known * (second % (count // known)), model)


def repeats(model: Any, tokens: int = 64) -> float:
    """How often the decoder's own routers choose the experts of the token before, for tokens drawn
    at random: 1 if they send all tokens to the same ones."""
    same: list[float] = []

    def look(module: HostedDictionary, args: tuple[Tensor, ...]) -> None:
        ids_TK, _ = module.read(args[1], args[2])
        ids_TK = ids_TK.sort(dim=1).values
        same.append(float((ids_TK[1:] == ids_TK[:-1]).all(dim=1).float().mean()))

    modules = (m for m in model.get_decoder().modules() if isinstance(m, HostedDictionary))
    hooks = [module.register_forward_pre_hook(look) for module in modules]
    try:
        generator = torch.Generator().manual_seed(0)
        vocab = model.config.vocab_size
        source, answer = torch.randint(vocab, (2, 1, tokens), generator=generator).to(DEVICE)
        with torch.inference_mode():
            model(input_ids=source, decoder_input_ids=answer)
    finally:
        for hook in hooks:
            hook.remove()
    return sum(same) / len(same)
