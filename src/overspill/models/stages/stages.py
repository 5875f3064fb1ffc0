"""`overspill.Stages`: trains a model stage by stage."""

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from overspill.core.errors import ConfigError
from overspill.models.pregate import pregate_level
from overspill.models.stages.activations import SMALL, ParkedActivations
from overspill.models.stages.blocks import StagedBlocks
from overspill.models.stages.step import Accumulates, Loss, MicroBatch, Stage, StagedStep
from overspill.moe.engine import Engine
from overspill.moe.pipeline.activations import HostCopies
from overspill.moe.placeholder import ExpertPlaceholder
from overspill.plan.stages import BlockCost, divide_blocks

_log = logging.getLogger("overspill")


class Stages:
    """Lets all micro-batches of a step pass a stage, some blocks of the model, before the next one:
    an expert is uploaded once for all of them in forward, and once in backward.

    The experts and dense blocks of the next stage are uploaded while a stage computes. On a GPU
    the activations of a stage wait in host memory for its backward. The results are those of
    micro-batches that pass the whole model one after another.
    """

    def __init__(
        self,
        model: nn.Module,
        n_stages: int,
        *,
        offload_activations: bool | None = None,
        small_activation: int = SMALL,
    ) -> None:
        """
        Args:
            model: a transformers model of `overspill.load` or `overspill.offload`.
            n_stages: how many stages its blocks are divided into.
            offload_activations: let activations wait in host memory; None: if the model computes on
                a GPU.
            small_activation: activations of fewer bytes stay on the device.
        """
        engine = getattr(model, "overspill", None)
        if not isinstance(engine, Engine):
            raise ConfigError("stages need an offloaded model; call overspill.offload(model) first")
        if pregate_level(model):
            raise ConfigError(
                "a pre-gate chooses the experts of a later block, which may be in another stage; "
                "train pre-gates without stages"
            )
        self._model, self._engine = model, engine
        self._blocks = StagedBlocks(model)
        costs = [self._cost(self._blocks[n]) for n in range(len(self._blocks))]
        try:
            runs = divide_blocks(costs, n_stages)
        except BaseException:
            self._blocks.close()
            raise
        self._stages = self._make_stages(runs)
        engine.plan_stages([stage.layers for stage in self._stages])
        offload = (
            engine.device.type == "cuda" if offload_activations is None else offload_activations
        )
        copies = HostCopies(engine.device, engine.recorder, engine.settings.inject)
        self._activations = ParkedActivations(copies, small_activation) if offload else None
        self._warned = False

    def _cost(self, block: nn.Module) -> BlockCost:
        """Times are in proportion to the parameters that a token passes, memory to all of them."""
        engine, placeholders = self._engine, _placeholders(block)
        dense = sum(p.numel() for p in block.parameters())
        experts = len(placeholders) * engine.n_experts
        active = sum(p.top_k or 1 for p in placeholders)
        return BlockCost(
            float(dense + active * engine.shape.numel),
            sum(p.nbytes for p in block.parameters()) + experts * engine.layout.weight_bytes,
        )

    def _make_stages(self, runs: Sequence[range]) -> list[Stage]:
        stages, layer = [], 0
        for number, blocks in enumerate(runs):
            count = sum(len(_placeholders(self._blocks[n])) for n in blocks)
            layers = range(layer, layer + count)
            layer = layers.stop
            stages.append(Stage(number, blocks, layers, is_last=number == len(runs) - 1))
        return stages

    def __len__(self) -> int:
        return len(self._stages)

    @property
    def blocks(self) -> list[range]:
        """The blocks of each stage."""
        return [stage.blocks for stage in self._stages]

    def backward(
        self,
        micro_batches: Sequence[MicroBatch],
        optimizer: Accumulates | None = None,
        loss: Loss | None = None,
    ) -> None:
        """The forward and backward passes of a step, before `optimizer.step()`.

        Args:
            micro_batches: the keyword arguments of the model for each.
            optimizer: the `overspill.AdamW` that trains the experts; may be left out if they are
                frozen.
            loss: the loss of a micro-batch from its number and from what the model returns; by
                default `output.loss / len(micro_batches)`. Called once for each, in order.
        """
        if not micro_batches:
            raise ConfigError("a step in stages needs at least one micro-batch")
        count = len(micro_batches)

        def mean(_: int, output: Any) -> Tensor:
            return output.loss / count  # type: ignore[no-any-return]

        self._check_room(count)
        StagedStep(
            self._model,
            self._blocks,
            self._stages,
            self._engine,
            self._activations,
            micro_batches,
            optimizer,
            loss or mean,
        ).run()

    def _check_room(self, micro_batches: int) -> None:
        if self._warned or micro_batches == 1:
            return
        large = [stage for stage in self._stages if not self._engine.fits(stage.layers)]
        if large:
            self._warned = True
            _log.warning(
                "the experts of %d of %d stages do not fit in the GPU's slots at once, and are "
                "uploaded for each micro-batch; give more stages, or more GPU memory",
                len(large),
                len(self._stages),
            )

    def close(self) -> None:
        """The model is as before."""
        self._blocks.close()


def _placeholders(block: nn.Module) -> list[ExpertPlaceholder]:
    return [p for p in block.parameters() if isinstance(p, ExpertPlaceholder)]
