"""An exported GPT-MoE as a model of transformers: the arithmetic of `GPTMoE` in the modules and
with the interfaces of transformers. Importing this registers it with `AutoModelForCausalLM`.

Parts that a GPT-MoE shares with Mixtral are Mixtral's modules. It differs in experts without a
gate, dense blocks between MoE blocks, a router in float32 whose weights need not sum to 1, and the
balance loss. Shapes: B sequences of S tokens, T = B*S, D model, H hidden, h heads, w width of a
head, E experts, K top-k.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.generation import GenerationMixin
from transformers.integrations import use_experts_implementation
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import (
    MixtralDecoderLayer,
    MixtralModel,
    eager_attention_forward,
)
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import OutputRecorder

from overspill.compute.reference import moe_reference
from overspill.models.huggingface.gpt_config import OverspillGPTConfig
from overspill.models.rotary import rotate
from overspill.moe.router import balance_loss, wide_linear


@use_experts_implementation(has_gate=False)
class GPTMoEExperts(nn.Module):
    """Experts of two matrices with a GELU between them."""

    def __init__(self, config: OverspillGPTConfig) -> None:
        super().__init__()
        self.num_experts = config.num_local_experts
        shape = self.num_experts, config.intermediate_size, config.hidden_size
        self.up_proj = nn.Parameter(torch.empty(shape))
        self.down_proj = nn.Parameter(torch.empty(shape[0], shape[2], shape[1]))
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return moe_reference(x_TD, ids_TK, weights_TK, self.up_proj, self.down_proj, gated=False)


@use_experts_implementation
class GPTMoEGatedExperts(nn.Module):
    """Experts of three matrices: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: OverspillGPTConfig) -> None:
        super().__init__()
        self.num_experts = config.num_local_experts
        h, d = config.intermediate_size, config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * h, d))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, d, h))
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        w_in, w_out = self.gate_up_proj, self.down_proj
        return moe_reference(x_TD, ids_TK, weights_TK, w_in, w_out, gated=True)


class GPTMoERouter(nn.Module):
    """Softmax over all experts, then top-k, in float32 for any dtype of the model."""

    def __init__(self, config: OverspillGPTConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.norm_topk_prob = config.norm_topk_prob and self.top_k > 1
        self.weight = nn.Parameter(torch.empty(config.num_local_experts, config.hidden_size))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (logits [T, E], weights [T, K], expert ids [T, K])."""
        x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits_TE = wide_linear(x_TD, self.weight)
        weights_TK, ids_TK = logits_TE.softmax(-1).topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return logits_TE, weights_TK, ids_TK


class GPTMoESparseBlock(nn.Module):
    """Block of a router and its experts."""

    def __init__(self, config: OverspillGPTConfig) -> None:
        super().__init__()
        self.gate = GPTMoERouter(config)
        self.experts = (GPTMoEGatedExperts if config.gated else GPTMoEExperts)(config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights_TK, ids_TK = self.gate(x_TD)
        y_TD: Tensor = self.experts(x_TD, ids_TK, weights_TK)
        return y_TD.view_as(hidden_states)


class GPTMoEDenseBlock(nn.Module):
    """Feed-forward of a block without experts: one expert for all tokens."""

    def __init__(self, config: OverspillGPTConfig) -> None:
        super().__init__()
        h, d = config.intermediate_size, config.hidden_size
        self.gated = config.gated
        self.up_proj = nn.Linear(d, 2 * h if self.gated else h, bias=False)
        self.down_proj = nn.Linear(h, d, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden = self.up_proj(hidden_states)
        if self.gated:
            gate, up = hidden.chunk(2, dim=-1)
            hidden = self.act_fn(gate) * up
        else:
            hidden = self.act_fn(hidden)
        y: Tensor = self.down_proj(hidden)
        return y


class GPTMoERotary(nn.Module):
    """Cosines and sines of the rotary embedding, in float32: angles are computed in float64, since
    float32 angles of thousands of radians are inexact."""

    def __init__(self, config: OverspillGPTConfig) -> None:
        super().__init__()
        assert isinstance(config.rope_parameters, dict)
        self.theta: float = config.rope_parameters["rope_theta"]
        self.width = config.hidden_size // config.num_attention_heads

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return tables [B, S, w], whose halves are equal."""
        exponent = torch.arange(0, self.width, 2, dtype=torch.float64, device=x.device) / self.width
        angles = position_ids[..., None].double() * self.theta**-exponent
        both = torch.cat((angles, angles), dim=-1)
        return both.cos().float(), both.sin().float()


class GPTMoEAttention(nn.Module):
    """Causal attention with rotary embeddings, which are computed in float32."""

    def __init__(self, config: OverspillGPTConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        d = config.hidden_size
        self.head_dim = d // config.num_attention_heads
        self.num_key_value_groups = 1
        self.scaling = self.head_dim**-0.5
        self.is_causal = True
        self.q_proj = nn.Linear(d, d, bias=False)
        self.k_proj = nn.Linear(d, d, bias=False)
        self.v_proj = nn.Linear(d, d, bias=False)
        self.o_proj = nn.Linear(d, d, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (p(hidden_states).view(shape) for p in (self.q_proj, self.k_proj, self.v_proj))
        half = self.head_dim // 2
        cos, sin = (table[..., None, :half] for table in position_embeddings)
        q, k = (rotate(each.float(), cos, sin).to(v.dtype).transpose(1, 2) for each in (q, k))
        v = v.transpose(1, 2)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        y, weights = attend(
            self, q, k, v, attention_mask,
            dropout=0.0, scaling=self.scaling, sliding_window=None, **kwargs,
        )  # fmt: skip
        return self.o_proj(y.reshape(*hidden_states.shape[:-1], -1)), weights


class GPTMoEDecoderLayer(GradientCheckpointingLayer):  # type: ignore[misc]
    """Attention, then experts or a dense feed-forward, each added to the residual stream."""

    def __init__(self, config: OverspillGPTConfig, layer_idx: int) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = GPTMoEAttention(config, layer_idx)
        kind = GPTMoESparseBlock if config.is_moe(layer_idx) else GPTMoEDenseBlock
        self.mlp = kind(config)
        self.input_layernorm = nn.RMSNorm(d, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(d, eps=eps)

    forward = MixtralDecoderLayer.forward


class GPTMoEPreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    config_class = OverspillGPTConfig
    config: OverspillGPTConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["GPTMoEDecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_record_outputs = {  # noqa: RUF012
        "router_logits": OutputRecorder(GPTMoERouter, index=0),
        "hidden_states": GPTMoEDecoderLayer,
        "attentions": GPTMoEAttention,
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, GPTMoEExperts | GPTMoEGatedExperts | GPTMoERouter):
            for parameter in module.parameters(recurse=False):
                init.normal_(parameter, mean=0.0, std=std)


class GPTMoEModel(GPTMoEPreTrainedModel):
    """Embeddings, blocks and the final norm."""

    def __init__(self, config: OverspillGPTConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            GPTMoEDecoderLayer(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = GPTMoERotary(config)
        self.gradient_checkpointing = False
        self.post_init()

    forward = MixtralModel.forward


class GPTMoEForCausalLM(GPTMoEPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """GPT-MoE as a model of transformers, for layers that Mixtral cannot have."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: OverspillGPTConfig) -> None:
        super().__init__(config)
        self.model = GPTMoEModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> MoeCausalLMOutputWithPast:
        """Return loss and logits. With `output_router_logits`, the loss includes the balance loss
        of each MoE block over the tokens that the mask does not exclude."""
        if output_router_logits is None:
            output_router_logits = self.config.output_router_logits
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_router_logits=output_router_logits,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept, :])
        loss = balance = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        if output_router_logits:
            balance = self._balance(outputs.router_logits, attention_mask)
            if loss is not None:
                loss = loss + self.config.router_aux_loss_coef * balance.to(loss.device)
        return MoeCausalLMOutputWithPast(
            loss=loss,
            aux_loss=balance,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits,
        )

    def _balance(self, logits: tuple[Tensor, ...], mask: Tensor | None) -> Tensor:
        """Return the sum of the balance losses of all MoE blocks; 1.0 each for an even load."""
        losses = []
        for logits_TE in logits:
            if mask is not None:
                logits_TE = logits_TE[mask.reshape(-1).bool().to(logits_TE.device)]
            probs_TE = logits_TE.softmax(-1)
            ids_TK = probs_TE.topk(self.config.num_experts_per_tok, dim=-1).indices
            losses.append(balance_loss(probs_TE, ids_TK).to(logits[0].device))
        return torch.stack(losses).sum()


AutoModelForCausalLM.register(OverspillGPTConfig, GPTMoEForCausalLM)
