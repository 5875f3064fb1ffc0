"""The shape of a GPT-MoE. Field docstrings are the help text."""

from dataclasses import dataclass

from overspill.core.errors import ConfigError
from overspill.core.experts import ExpertShape
from overspill.core.options import Count, check_options


@dataclass(frozen=True)
class GPTConfig:
    vocab: Count
    """Number of tokens in the vocabulary."""
    n_layers: Count
    """Transformer blocks."""
    d_model: Count
    """Width of the residual stream."""
    d_hidden: Count
    """Hidden width of an expert (and of the dense feed-forward of layers without experts)."""
    n_heads: Count
    """Attention heads; d_model / n_heads is the width of a head."""
    n_experts: Count
    """Experts in each MoE layer."""
    top_k: Count
    """Experts each token goes to."""
    gated: bool = False
    """Gated SiLU experts with three matrices; otherwise GELU with two."""
    moe_every: Count = 1
    """Every n-th layer is MoE; the others have one dense feed-forward of the same shape."""
    max_seq: Count = 1024
    """Longest sequence in tokens."""
    balance_coef: float = 0.01
    """Weight of the load-balance loss of each MoE layer; 0 turns it off."""
    tie_embeddings: bool = True
    """Use the token embedding as the output head too."""
    normalize_weights: bool = True
    """With top_k > 1, scale the routing weights of a token to sum to 1."""
    rope_theta: float = 10_000.0
    """Base of the rotary position embedding."""

    def __post_init__(self) -> None:
        check_options(self, GPTConfig)
        if self.top_k > self.n_experts:
            raise ConfigError(
                f"top_k={self.top_k} is more than n_experts={self.n_experts}; "
                f"give at most {self.n_experts}"
            )
        if self.d_model % self.n_heads or (self.d_model // self.n_heads) % 2:
            raise ConfigError(
                f"d_model={self.d_model} cannot be cut into n_heads={self.n_heads} heads of even "
                f"width (rotary embeddings rotate pairs); give a multiple of {2 * self.n_heads}"
            )
        if self.moe_every > self.n_layers:
            raise ConfigError(
                f"moe_every={self.moe_every} leaves no MoE layer among n_layers={self.n_layers}; "
                f"give at most {self.n_layers}"
            )
        if not self.balance_coef >= 0:
            raise ConfigError(f"balance_coef={self.balance_coef} must not be negative; 0 is off")
        if not self.rope_theta > 0:
            raise ConfigError(f"rope_theta={self.rope_theta} must be positive; 10000 is usual")

    def is_moe(self, layer: int) -> bool:
        """Whether block `layer`, counted over all blocks from 0, holds experts."""
        return (layer + 1) % self.moe_every == 0

    @property
    def n_moe_layers(self) -> int:
        return self.n_layers // self.moe_every

    @property
    def expert_shape(self) -> ExpertShape:
        return ExpertShape(self.d_model, self.d_hidden, self.gated)

    @property
    def expert_params(self) -> int:
        """Number of parameters of all experts."""
        return self.n_moe_layers * self.n_experts * self.expert_shape.numel

    @property
    def dense_params(self) -> int:
        """Number of parameters of everything but the experts: embedding, head, attention, norms,
        routers, dense layers."""
        embedding = self.vocab * self.d_model * (1 if self.tie_embeddings else 2)
        attention = self.n_layers * 4 * self.d_model**2
        norms = (2 * self.n_layers + 1) * self.d_model
        routers = self.n_moe_layers * self.n_experts * self.d_model
        dense_layers = (self.n_layers - self.n_moe_layers) * self.expert_shape.numel
        return embedding + attention + norms + routers + dense_layers

    @property
    def total_params(self) -> int:
        return self.dense_params + self.expert_params
