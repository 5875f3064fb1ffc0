"""`overspill.Stages`: trains a model stage by stage."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from overspill.core.errors import ConfigError, OrderError
from overspill.core.layer_map import StagePart
from overspill.models.stages.activations import SMALL, Activations, ParkedActivations
from overspill.models.stages.blocks import StagedBlocks
from overspill.models.stages.checks import (
    check_count,
    check_optimizer,
    check_same,
    checked_batches,
    checked_loss,
    loss_of,
)
from overspill.models.stages.division import divide_model, expert_times
from overspill.models.stages.step import Accumulates, MicroBatch, Stage, StagedPass, Take
from overspill.moe.engine import Engine
from overspill.moe.pipeline.activations import HostCopies
from overspill.parallel.stage_link import StageLink

_log = logging.getLogger("overspill")


class Stages:
    """Training of a model stage by stage. All micro-batches of a step pass a stage, some blocks of
    the model, before the next one: an expert is uploaded once for all of them in forward, and once
    in backward.

    The experts and dense blocks of the next stage are uploaded while a stage computes. On a GPU the
    activations of a stage wait in host memory for its backward. The results are equal to those of
    micro-batches that pass the whole model one after another.

    Ranks along the dimension "stage" of the mesh that the model was offloaded with divide the
    stages: neighbouring ones are on different ranks, to which hidden states and their gradients
    are sent. All ranks must make the same calls.
    """

    def __init__(
        self,
        model: nn.Module,
        n_stages: int | None = None,
        *,
        offload_activations: bool | None = None,
        small_activation: int = SMALL,
    ) -> None:
        """
        Args:
            model: a transformers model of `overspill.load` or `overspill.offload`, or an offloaded
                GPT-MoE.
            n_stages: how many stages its blocks are divided into; None: as it was offloaded.
            offload_activations: let activations wait in host memory; None: if the model computes on
                a GPU.
            small_activation: activations of fewer bytes stay on the device.
        """
        engine = getattr(model, "overspill", None)
        if not isinstance(engine, Engine):
            raise ConfigError("stages need an offloaded model; call overspill.offload(model) first")
        self._model, self._engine = model, engine
        parts = self._parts(n_stages)
        ranks = None if engine.ranks is None else engine.ranks.stages
        place = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        self._stages = _own_stages(parts, *place)
        self.blocks = [part.blocks for part in parts]
        """Blocks of each stage, also of stages of other ranks."""
        self._blocks = StagedBlocks(model)
        engine.stage_order.plan([stage.layers for stage in self._stages])
        self._link = None if ranks is None else StageLink(ranks, engine.device)
        if offload_activations is None:
            offload_activations = engine.device.type == "cuda"
        copies = HostCopies(engine.device, engine.recorder, engine.settings.inject)
        parked = ParkedActivations(copies, small_activation)
        self._activations = parked if offload_activations else Activations()
        self._warned = self._closed = False
        self._compared: set[bool] = set()  # kinds of passes whose first micro-batches were compared

    def _parts(self, n_stages: int | None) -> Sequence[StagePart]:
        engine = self._engine
        if known := engine.layer_map.stages:
            if n_stages not in (None, len(known)):
                raise ConfigError(
                    f"{n_stages} stages, but the model was offloaded with stages={len(known)}"
                )
            return known
        if n_stages is None:
            raise ConfigError("give the number of stages")
        sizes = engine.n_experts, engine.shape.numel, engine.dtype.itemsize
        times = expert_times(self._model, n_stages, engine.layout, engine.device, engine.ranks)
        return divide_model(self._model, n_stages, *sizes, times)

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def has_outputs(self) -> bool:
        """Whether this rank has the last stage, and so the losses."""
        return any(stage.is_last for stage in self._stages)

    def backward(
        self,
        micro_batches: Iterable[MicroBatch],
        optimizer: Accumulates | None = None,
        loss: Callable[[int, Any], Tensor] | None = None,
    ) -> None:
        """Run the forward and backward passes of a step, before `optimizer.step()`.

        Args:
            micro_batches: the keyword arguments of the model for each, the same on all ranks along
                stages.
            optimizer: the `overspill.AdamW` that trains the experts; may be left out if they are
                frozen.
            loss: the loss of a micro-batch from its number and from what the model returns; by
                default `output.loss / len(micro_batches)`, times the number of ranks along stages,
                over which gradients are averaged. Called once for each micro-batch, in order, on
                the rank with the last stage.
        """
        check_optimizer(self._model, optimizer)
        batches = checked_batches(micro_batches)
        ranks = self._engine.ranks
        factor = (1 if ranks is None else ranks.n_stages) / len(batches)

        def take(number: int, output: Any) -> Tensor:
            if loss is not None:
                return checked_loss(number, loss(number, output))
            return loss_of(number, output) * factor

        self._pass(batches, take, optimizer).run(backward=True)

    @torch.no_grad()
    def forward(
        self, micro_batches: Iterable[MicroBatch], take: Callable[[int, Any], None]
    ) -> None:
        """Run forward passes without gradients, for evaluations. `take` gets the number of each
        micro-batch and what the model returns for it, on the rank with the last stage."""

        def taken(number: int, output: Any) -> None:
            take(number, output)

        self._pass(checked_batches(micro_batches), taken, None).run(backward=False)

    def _pass(
        self, micro_batches: Sequence[MicroBatch], take: Take, optimizer: Accumulates | None
    ) -> StagedPass:
        if self._closed:
            raise OrderError("these stages are closed; make new ones with overspill.Stages(model)")
        self._check_ranks(micro_batches, torch.is_grad_enabled())
        self._check_room(len(micro_batches))
        return StagedPass(
            self._model,
            self._blocks,
            self._stages,
            self._engine,
            self._link,
            self._activations,
            micro_batches,
            take,
            optimizer,
        )

    def _check_ranks(self, micro_batches: Sequence[MicroBatch], trains: bool) -> None:
        ranks = None if self._engine.ranks is None else self._engine.ranks.stages
        if ranks is None:
            return
        check_count(ranks, len(micro_batches))
        if trains not in self._compared:  # once: reading tensors waits for the GPU
            check_same(ranks, micro_batches)
            self._compared.add(trains)

    def _check_room(self, micro_batches: int) -> None:
        if self._warned or micro_batches == 1:
            return
        large = [stage for stage in self._stages if not self._engine.stage_order.fits(stage.layers)]
        if large:
            self._warned = True
            divisible = any(len(stage.blocks) > 1 for stage in large)
            _log.warning(
                "the experts of %d of %d stages do not fit in the slots on %s at once, and are "
                "uploaded for each micro-batch; give %smore slots or --gpu-memory",
                len(large),
                len(self._stages),
                self._engine.device,
                "more stages, or " if divisible else "",
            )

    def close(self) -> None:
        """Restore the model. Calling it again has no effect."""
        if not self._closed:
            self._closed = True
            self._blocks.close()
            self._engine.stage_order.plan([])


def _own_stages(parts: Sequence[StagePart], rank: int, n_ranks: int) -> list[Stage]:
    stages, layer = [], 0
    for number in range(rank, len(parts), n_ranks):
        count = len(parts[number].layers)
        layers, last = range(layer, layer + count), number == len(parts) - 1
        stages.append(Stage(number, parts[number].blocks, layers, last))
        layer = layers.stop
    return stages
