"""A decoding step through the modules of a model of transformers, for models whose attention can be
replaced. Experts and attention are computed as in fused steps."""

from typing import Any

import torch
from torch import Tensor

from overspill.compute.activation import form_of
from overspill.compute.activation_form import Form
from overspill.compute.decode.attention import attend
from overspill.compute.decode.cpu import add_cpu_rows
from overspill.models.attention_cache import (
    AttentionOptions,
    Indexer,
    Keys,
    RelativeBias,
    TokenBias,
    attention_cache,
)
from overspill.models.gpt import GPTMoE
from overspill.models.huggingface.expert_adapters import has_expert_adapters
from overspill.models.huggingface.recurrent import RecurrentStates
from overspill.models.huggingface.seq2seq import EncoderDecoder
from overspill.models.pregate import pregate_level
from overspill.moe.decoding import decoding
from overspill.moe.placeholder import ExpertPlaceholder
from overspill.moe.predictor import Predictor
from overspill.serve.decode.step import Batch, Computed
from overspill.serve.decode.step_experts import StepExperts
from overspill.serve.paged import PagedCache, score_parts


def can_step(model: Any, placeholders: list[ExpertPlaceholder]) -> bool:
    """Return whether the kernels compute these experts, which have no adapters beside their
    weights, and the host has no part in a step: a graph does not call hooks."""
    hooks = any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())
    if isinstance(model, GPTMoE):  # its forward has other arguments
        return False
    if hooks or has_expert_adapters(model):
        return False
    return all(_form_of(each) is not None for each in placeholders)


def _form_of(placeholder: ExpertPlaceholder) -> Form | None:
    return form_of(placeholder.activation, placeholder.engine.shape.gated)


class ModuleStep:
    """Computes logits with the modules of the model."""

    def __init__(
        self,
        model: Any,
        experts: StepExperts,
        cache: PagedCache,
        seq2seq: EncoderDecoder | None = None,
        states: RecurrentStates | None = None,
        predictor: Predictor | None = None,
    ) -> None:
        """`predictor` names experts of later layers, for a mode that wants to know them."""
        self._model = model
        self._predictor = predictor
        self._inputs: list[Tensor] = []  # of the experts, layer by layer
        self._seq2seq = seq2seq
        self._states = states
        self._experts = experts
        self._cache = cache
        self.level = pregate_level(model)
        self.n_layers = len(experts.table.offsets)
        self._first = 0 if seq2seq is None else seq2seq.encoder_layers
        self._forms: dict[int, Form] = {}  # of the activations of layers
        self._announced: dict[int, Tensor] = {}  # experts of later layers
        self._biases: dict[RelativeBias, Tensor] = {}  # by distance
        self._batch: Batch  # of the current step
        self._ids: Tensor | None = None

    def __call__(self, batch: Batch) -> Computed:
        self._batch, self._ids = batch, batch.ids
        self._announced.clear()
        self._biases.clear()
        self._inputs = []
        if self._states is not None:
            self._states.begin_step(batch.states)
        with attention_cache(self), decoding(self):
            logits = self._logits(batch)
        if self._ids is None:  # the decoder of an encoder-decoder may have no experts
            self._ids = torch.empty(0, len(logits), 0, dtype=torch.int32, device=logits.device)
        return Computed(logits, self._ids, inputs_LBD=self._inputs)

    def _logits(self, batch: Batch) -> Tensor:
        if self._seq2seq is not None:
            return self._seq2seq(batch.tokens, batch.positions)
        ids, positions = batch.tokens[None], batch.positions[None]
        out = self._model(input_ids=ids, position_ids=positions, use_cache=False)
        logits: Tensor = out.logits[0]
        return logits

    @property
    def positions(self) -> Tensor:
        return self._batch.positions

    def attend(
        self, layer: int, q_Thd: Tensor, k_Tkd: Tensor, v_Tkd: Tensor, options: AttentionOptions
    ) -> Tensor:
        batch, size = self._batch, self._cache.block_size
        keys, values = memory = self._cache.memory(layer, k_Tkd, v_Tkd)
        if options.keys is Keys.SOURCE:
            assert batch.sources is not None
            where = batch.sources.last, batch.sources.blocks, size
        else:
            slots = self._slots(batch)
            keys[slots] = k_Tkd
            values[slots] = v_Tkd
            where = options.chosen or (batch.positions, batch.blocks, size)
        scale = q_Thd.shape[-1] ** -0.5 if options.scale is None else options.scale
        q_Thd = q_Thd.contiguous()
        y = attend(
            q_Thd, memory, *where, float(scale), options.window, options.sinks, options.softcap,
            self._bias(options.bias),
        )  # fmt: skip
        return y.view(*q_Thd.shape[:2], -1)

    def _slots(self, batch: Batch) -> Tensor:
        """Return the slot of each token in the cache of keys and values."""
        size = self._cache.block_size
        rows = torch.arange(len(batch.tokens), device=batch.tokens.device)
        blocks = batch.blocks[rows, batch.positions // size]
        return blocks * size + batch.positions % size

    def choose(self, indexer: Indexer) -> tuple[Tensor, Tensor, int] | None:
        """Return for each sequence the index of the last of its slots that it sees, its slots, and
        1, as for blocks of one slot; None if sequences see all slots."""
        batch, size = self._batch, self._cache.block_size
        own_B = self._slots(batch)
        every_BL = batch.blocks[..., None] * size + torch.arange(size, device=own_B.device)
        every_BL = every_BL.flatten(1)
        count = every_BL.shape[1] if every_BL.shape[1] > indexer.most else 0

        rows_B1 = torch.arange(len(own_B), device=own_B.device)[:, None]
        sees_B1L = torch.arange(count, device=own_B.device) <= batch.positions[:, None, None]

        def choose(part: slice) -> Tensor:
            def store(k_N1d: Tensor) -> Tensor:
                memory = self._cache.index_memory(indexer.layer, k_N1d)
                memory[own_B[part]] = k_N1d[:, 0]
                return memory[every_BL[part, :count]]

            return indexer.choose(rows_B1[part], sees_B1L[part], store)[:, 0]

        parts = score_parts(len(own_B), indexer.heads * count)
        found_BK = torch.cat([choose(part) for part in parts])
        if not count:
            return None
        chosen_BK = every_BL.gather(1, found_BK.long())
        return batch.positions.clamp(max=indexer.most - 1), chosen_BK, 1

    def _bias(self, bias: RelativeBias | TokenBias | None) -> Tensor | None:
        """Return the bias by distance: one that all layers share, or that of each token."""
        if bias is None:
            return None
        if isinstance(bias, TokenBias):
            return bias.by_distance_NhTn[0].transpose(0, 1).contiguous()
        if bias not in self._biases:
            self._biases[bias] = bias.by_distance()
        return self._biases[bias]

    def experts(
        self,
        placeholder: ExpertPlaceholder,
        x_TD: Tensor,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
    ) -> Tensor:
        batch, layer = self._batch, placeholder.layer
        if self._ids is None:
            shape = placeholder.engine.n_layers - self._first, *expert_ids_TK.shape
            self._ids = torch.empty(shape, dtype=torch.int32, device=x_TD.device)
        ids = self._ids[layer - self._first]
        if batch.ids is None:
            ids.copy_(_every_id(expert_ids_TK, placeholder))
        weights = weights_TK.float().contiguous()
        x_TD = x_TD.contiguous()
        if self._predictor is not None:
            self._inputs.append(x_TD)
        self._experts.begin_ahead(layer, self, batch.real)
        routed = self._experts.look_up(layer, ids, weights, batch.real, x_TD)
        if layer not in self._forms:
            form = _form_of(placeholder)
            assert form is not None
            self._forms[layer] = form
        y, rows = self._experts.compute(placeholder, self._forms[layer], x_TD, routed)
        if rows is not None:
            add_cpu_rows(y, rows)
        return y.to(x_TD.dtype)

    def hint(self, placeholder: ExpertPlaceholder, expert_ids_TK: Tensor) -> None:
        ids_TK = _every_id(expert_ids_TK, placeholder)
        self._announced[placeholder.layer] = ids_TK.to(torch.int32)

    def known(self, layer: int) -> Tensor | None:
        """Return the ids of experts that a pre-gate has chosen already."""
        if self._batch.ids is not None:  # the pre-gates do not choose
            return self._batch.ids[layer - self._first]
        return self._announced.get(layer)

    def guess(self, layer: int) -> Tensor | None:
        """Return the ids that the predictor names for the input of the layer before."""
        if not self._experts.follows(len(self._batch.tokens)):
            return None
        if self._batch.ids is not None:  # the routers do not choose
            return self._batch.ids[layer - self._first]
        assert self._ids is not None
        assert self._predictor is not None, "the routers of other layers are not known"
        args = layer - 1, self._inputs[-1], 1, self._ids.shape[2]
        return self._predictor.predict(*args).to(torch.int32)


def _every_id(ids_TK: Tensor, placeholder: ExpertPlaceholder) -> Tensor:
    """Return ids in which an expert stands in the place of none; its weight is zero, and it is not
    another expert of the token."""
    if not placeholder.drops:
        return ids_TK
    count = placeholder.engine.n_experts
    places = torch.arange(ids_TK.shape[1], device=ids_TK.device)
    return torch.where(ids_TK < count, ids_TK, (ids_TK[:, :1] + places) % count)
