"""GPT-MoE: a decoder-only transformer with experts, in plain `torch.nn`.

Shapes: B sequences of S tokens, T = B*S, D model, h heads, V vocabulary.
"""

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as run_checkpointed

from overspill.core.errors import ConfigError
from overspill.models.attention_cache import AttentionOptions, current_cache
from overspill.models.config import GPTConfig
from overspill.models.loss import fused_linear_cross_entropy
from overspill.models.rotary import rotate_packed
from overspill.moe.init import STD, out_std
from overspill.moe.layer import MoE


class GPTOutput(NamedTuple):
    loss: Tensor | None
    """Cross-entropy plus the weighted balance losses."""
    logits: Tensor | None
    """Logits [B, S, V]; only without targets."""
    ce: Tensor | None
    """Cross-entropy alone, detached."""
    balance: Tensor
    """Mean balance loss of the MoE layers, detached; 1.0 for an even load."""


class GPTMoE(nn.Module):
    """Decoder-only language model with Mixture-of-Experts layers. `checkpoint` recomputes blocks in
    backward from their inputs. With `meta_experts` the expert parameters are on the meta device,
    and `MoE.init_expert` gives their initial weights one record at a time. `seed` determines all
    initial weights on a device."""

    def __init__(
        self,
        config: GPTConfig,
        checkpoint: bool = True,
        seed: int = 0,
        meta_experts: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.checkpoint = checkpoint
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embedding = nn.Embedding(config.vocab, config.d_model, **where)
        self.blocks = nn.ModuleList(
            Block(config, layer, seed, meta_experts, **where) for layer in range(config.n_layers)
        )
        self.norm = nn.RMSNorm(config.d_model, eps=1e-6, **where)
        self.head: nn.Linear | None = None
        if not config.tie_embeddings:
            self.head = nn.Linear(config.d_model, config.vocab, bias=False, **where)
        self.rope = Rope(config, device=device)
        self._init_dense(seed)

    @torch.no_grad()
    def _init_dense(self, seed: int) -> None:
        """Initializes all parameters but the experts from one generator."""
        device = self.embedding.weight.device
        if device.type == "meta":
            return
        generator = torch.Generator(device).manual_seed(seed)
        experts = {id(p) for moe in self.moe_layers() for p in (moe.w_in, moe.w_out)}
        for name, parameter in self.named_parameters():
            if id(parameter) in experts or parameter.dim() < 2:
                continue
            std = out_std(self.config.n_layers) if name.endswith("out.weight") else STD
            parameter.normal_(0.0, std, generator=generator)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        pieces: int = 1,
        positions: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> GPTOutput:
        """Return the loss with targets [B, S] (-100 is ignored), or without targets the logits of
        `rows` of the sequences, by default of all.

        With `pieces` > 1 the batch consists of that many micro-batches that are routed together:
        loss and gradients are those of accumulating them, and attention runs on one at a time.
        `positions` [S] are the positions of the tokens in their sequences (`attention_cache`).
        """
        n_sequences, length = tokens.shape
        if positions is None and length > self.config.max_seq:
            raise ConfigError(
                f"{length} tokens are more than max_seq={self.config.max_seq}; "
                "cut the sequence or raise max_seq"
            )
        if n_sequences % pieces:
            raise ConfigError(
                f"pieces={pieces} does not divide the batch of {n_sequences} sequences; "
                "give a batch that is a multiple of it"
            )
        x_BSD = self.embedding(tokens)
        cos, sin = self.rope(length, positions)
        balances: list[Tensor] = []
        recompute = self.checkpoint and self.training and torch.is_grad_enabled()
        for block in self.blocks:
            x_BSD, balance = block(x_BSD, cos, sin, pieces, recompute)
            if balance is not None:
                balances.append(balance)
        x_BSD = self.norm(x_BSD if rows is None else x_BSD[:, rows])
        head = self.embedding.weight if self.head is None else self.head.weight
        balance_sum = torch.stack(balances).sum()
        balance_mean = balance_sum.detach() / len(balances)
        if targets is None:
            return GPTOutput(None, F.linear(x_BSD, head), None, balance_mean)
        ce = fused_linear_cross_entropy(
            x_BSD.reshape(-1, x_BSD.shape[-1]), head, targets.reshape(-1), pieces=pieces
        )
        loss = ce + self.config.balance_coef * balance_sum
        return GPTOutput(loss, None, ce.detach(), balance_mean)

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embeddings. transformers defines the name of this method."""
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        """Return the module whose weight is the output head. transformers defines the name of this
        method."""
        return self.embedding if self.head is None else self.head

    def moe_layers(self) -> list[MoE]:
        """MoE layers, lowest first, in the order of `ExpertId.layer`."""
        return [module for module in self.modules() if isinstance(module, MoE)]

    def num_parameters(self) -> int:
        """Return the number of parameters, with offloaded experts."""
        return self.config.total_params

    @torch.no_grad()
    def generate(self, tokens: Tensor, n: int, temperature: float = 1.0, seed: int = 0) -> Tensor:
        """Return `tokens` [B, S] followed by `n` sampled tokens; temperature 0 takes the likeliest.

        Every step runs the whole context (its last max_seq tokens), without a cache.
        """
        was_training = self.training
        self.eval()
        generator = torch.Generator(tokens.device).manual_seed(seed)
        try:
            for _ in range(n):
                logits = self(tokens[:, -self.config.max_seq :]).logits[:, -1].float()
                if temperature == 0:
                    chosen = logits.argmax(-1, keepdim=True)
                else:
                    probs = (logits / temperature).softmax(-1)
                    chosen = torch.multinomial(probs, 1, generator=generator)
                tokens = torch.cat((tokens, chosen), dim=1)
        finally:
            self.train(was_training)
        return tokens


def _checkpointed(function: Any, *args: Any) -> Any:
    return run_checkpointed(function, *args, use_reentrant=False, preserve_rng_state=False)


class Block(nn.Module):
    """Attention, then experts or a dense feed-forward, each added to the residual stream."""

    def __init__(
        self, config: GPTConfig, layer: int, seed: int, meta_experts: bool, **where: Any
    ) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model, eps=1e-6, **where)
        self.attention = Attention(config, layer, **where)
        self.feed_norm = nn.RMSNorm(config.d_model, eps=1e-6, **where)
        self.moe: MoE | None = None
        self.dense: FeedForward | None = None
        if config.is_moe(layer):
            self.moe = MoE(
                d_model=config.d_model,
                d_hidden=config.d_hidden,
                n_experts=config.n_experts,
                top_k=config.top_k,
                gated=config.gated,
                normalize=config.normalize_weights,
                layer=layer // config.moe_every,
                n_layers=config.n_layers,
                seed=seed,
                meta_experts=meta_experts,
                **where,
            )
        else:
            self.dense = FeedForward(config, **where)

    def __call__(
        self, x_BSD: Tensor, cos: Tensor, sin: Tensor, pieces: int, recompute: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Calls `forward`, under a checkpoint with `recompute`. A subclass may skip the whole call,
        as pipeline stages do."""
        call = super().__call__
        if recompute:
            found = _checkpointed(call, x_BSD, cos, sin, pieces, recompute)
        else:
            found = call(x_BSD, cos, sin, pieces, recompute)
        return cast(tuple[Tensor, Tensor | None], found)

    def forward(
        self, x_BSD: Tensor, cos: Tensor, sin: Tensor, pieces: int, recompute: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return (x, balance loss or None).

        The last operation is the addition to the residual, which saves nothing for backward. So a
        recomputation under checkpoint, which stops at the last saved tensor, does not run the
        experts.
        """
        x_BSD = self._attend(x_BSD, cos, sin, pieces, recompute)
        normed = self.feed_norm(x_BSD)
        if self.moe is None:
            assert self.dense is not None
            return x_BSD + self.dense(normed), None
        y_BSD, balance = self.moe(normed, pieces)
        return x_BSD + y_BSD, balance

    def _attend(
        self, x_BSD: Tensor, cos: Tensor, sin: Tensor, pieces: int, recompute: bool
    ) -> Tensor:
        if pieces == 1:
            return self._attend_piece(x_BSD, cos, sin)
        # A checkpoint for each piece, so that backward has the activations of one piece at a time.
        # It costs one more forward of attention, a few percent of a step.
        done = [
            _checkpointed(self._attend_piece, x, cos, sin)
            if recompute
            else self._attend_piece(x, cos, sin)
            for x in x_BSD.chunk(pieces)
        ]
        return torch.cat(done)

    def _attend_piece(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y_BSD: Tensor = self.attention(self.attention_norm(x_BSD), cos, sin)
        return x_BSD + y_BSD


class Attention(nn.Module):
    """Causal multi-head attention with rotary embeddings, packed q, k and v, no biases."""

    def __init__(self, config: GPTConfig, layer: int, **where: Any) -> None:
        super().__init__()
        self.layer = layer
        self.n_heads = config.n_heads
        d = config.d_model
        self.qkv = nn.Linear(d, 3 * d, bias=False, **where)
        self.out = nn.Linear(d, d, bias=False, **where)

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, d_model = x_BSD.shape
        qkv = self.qkv(x_BSD).view(batch, length, 3, self.n_heads, -1)
        packed = rotate_packed(qkv, cos, sin)
        if (cache := current_cache()) is not None:
            q, k, v = (part[0] for part in packed)
            y = cache.attend(self.layer, q, k, v, AttentionOptions())
        else:
            q, k, v = (part.transpose(1, 2) for part in packed)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        out: Tensor = self.out(y.reshape(batch, length, d_model))
        return out


class FeedForward(nn.Module):
    """Dense feed-forward of layers between MoE layers: one expert for all tokens."""

    def __init__(self, config: GPTConfig, **where: Any) -> None:
        super().__init__()
        shape = config.expert_shape
        self.gated = shape.gated
        self.w_in = nn.Linear(shape.d_model, shape.in_rows, bias=False, **where)
        self.w_out = nn.Linear(shape.d_hidden, shape.d_model, bias=False, **where)

    def forward(self, x_BSD: Tensor) -> Tensor:
        h = self.w_in(x_BSD)
        if self.gated:
            gate, up = h.chunk(2, dim=-1)
            a = F.silu(gate) * up
        else:
            a = F.gelu(h)
        y: Tensor = self.w_out(a)
        return y


class Rope(nn.Module):
    """Cosines and sines of the rotary embedding, in float32 and not in the state dict."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig, device: torch.device | str | None) -> None:
        super().__init__()
        width = config.d_model // config.n_heads
        # in float64: float32 angles of thousands of radians are inexact
        exponent = torch.arange(0, width, 2, dtype=torch.float64) / width
        angles = torch.outer(
            torch.arange(config.max_seq, dtype=torch.float64), config.rope_theta**-exponent
        )
        self.register_buffer("cos", angles.cos().float().to(device), persistent=False)
        self.register_buffer("sin", angles.sin().float().to(device), persistent=False)

    def forward(self, length: int, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the tables [S, width / 2] for `rotate_packed`; positions are 0, 1, ... by
        default."""
        if positions is not None:
            return self.cos[positions], self.sin[positions]
        return self.cos[:length], self.sin[:length]
