"""The engine of an offloaded model, `model.overspill`: its parts and their lifetime.

`compute` runs the experts, `training` follows a training step (an error for inference), `records`
reads and writes weights and optimizer states, `memory` counts and limits the memory of the model,
`dense` places its other parameters. Some experts live on the compute device, the others are
streamed from host memory and disk.
"""

import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overspill.core.errors import ConfigError, OrderError
from overspill.hardware.machine import usable_cores
from overspill.hardware.profile import ExpertCosts
from overspill.moe.addresses import Addresses
from overspill.moe.dense_part import DensePart
from overspill.moe.dispatch import LocalDispatcher
from overspill.moe.engine_memory import EngineMemory
from overspill.moe.expert_moves import ExpertMoves
from overspill.moe.gradients import ExpertGradients
from overspill.moe.layer_pass import LayerPass
from overspill.moe.model_part import ModelPart
from overspill.moe.pooled_experts import PooledExperts
from overspill.moe.popularity import Popularity
from overspill.moe.rank_rows import PassConditions, RankRows
from overspill.moe.records import ExpertRecords
from overspill.moe.residents.memory import Residents
from overspill.moe.row_placer import Balance, RowPlacer
from overspill.moe.settings import Settings
from overspill.moe.stage_order import StageOrder
from overspill.moe.streaming.gradients import StreamingGradients
from overspill.moe.streaming.streaming import Streaming
from overspill.moe.training_step import TrainingStep
from overspill.parallel.exchange.choice import exchange_among
from overspill.plan.budget import Placement
from overspill.plan.residents import spread_residents
from overspill.plan.usage import Swap
from overspill.tiers.layout import RecordLayout
from overspill.tiers.slab import Progress
from overspill.tiers.store import ExpertStore
from overspill.trace.recorder import Recorder


class Engine:
    """The experts of an offloaded model: their memory, their compute and their training."""

    def __init__(
        self,
        part: ModelPart,
        layout: RecordLayout,
        device: torch.device,
        placement: Placement,
        settings: Settings,
        recorder: Recorder,
        disk: Path | None = None,
        progress: Progress | None = None,
        costs: ExpertCosts | None = None,
    ) -> None:
        self.part = part
        self.layer_map, self.n_layers = part.layers, part.n_layers
        self.experts = part.experts
        self.n_experts = part.experts.n_global  # of a layer over all processes
        self.ranks = part.ranks
        self.shape, self.dtype = layout.shape, layout.dtype
        self.expert_parameters = part.layers.n_layers * self.n_experts * layout.shape.numel
        self.device = device
        self.placement = placement
        self.recorder = recorder
        self.settings = settings
        counts = spread_residents(placement.residents, part.n_layers, part.experts.n_local)
        with ExitStack() as undo:  # a failure leaves no thread and no file
            # first what may not fit: nothing else is allocated yet
            residents = self._residents = Residents(counts, layout, device)
            store = self._store = ExpertStore(
                part.n_layers, part.experts, layout, placement.permanent_slots,
                placement.cache_slots, device.type == "cuda", disk, progress, residents=counts,
                spare_records=placement.spare_records, shared=part.shared,
            )  # fmt: skip
            undo.callback(store.close)
            self.lifetime = store.lifetime
            self.records = ExpertRecords(store, residents)
            self.dense = DensePart(device, store.lifetime, placement, recorder, settings.inject)
            dispatcher = LocalDispatcher(store.places.computed, device)
            max_rows = settings.max_rows or placement.max_rows
            compute = self.compute = PooledExperts(
                store,
                residents,
                lambda: self._new_streaming(dispatcher, progress, costs),
                dispatcher,
                max_rows,
                settings.waves,
            )
            undo.callback(compute.close)
            self.addresses = Addresses(store, residents, compute, recorder, settings.inject)
            self._training = self._new_training() if placement.training else None
            self._lock = threading.RLock() if self._training is None else self._training.lock
            self._moves = ExpertMoves(
                store, residents, self.records, placement, self._training, compute
            )
            self.memory = EngineMemory(
                part,
                store,
                residents,
                compute,
                self.dense,
                self._moves,
                placement,
                self._lock,
            )
            self.stage_order = StageOrder(self._moves, compute, store, self._lock)
            self.servers: weakref.WeakSet[object] = weakref.WeakSet()
            """Objects that have keys and values of the model."""
            self.rank_rows = self._new_rank_rows()
            """Token rows of other ranks; None: none divide the experts of a layer."""
            self.popularity = Popularity(
                compute, self.stage_order,
                lambda: self.settings.popularity == "learned",
            )  # fmt: skip
            undo.pop_all()

    def _new_streaming(
        self, dispatcher: LocalDispatcher, progress: Progress | None, costs: ExpertCosts | None
    ) -> Streaming:
        return Streaming(
            self._store,
            dispatcher,
            self.device,
            self.placement,
            self.settings,
            self.recorder,
            updates_at_once=lambda: (
                self._training is not None and self._training.optimizer.updates_at_once
            ),
            progress=progress,
            costs=costs,
            shared=self.part.shared,
        )

    def _new_training(self) -> TrainingStep:
        def streamed() -> StreamingGradients | None:
            streaming = self.compute.streaming
            return None if streaming is None else streaming.gradients

        gradients = ExpertGradients(
            self._residents,
            self._store,
            self.settings.threads or usable_cores(),
            streamed,
            lambda keep: self._moves.reserve(keep),
        )
        n_ranks = 1 if self.ranks is None else self.ranks.size
        planned = self.placement.trains_experts
        return TrainingStep(self.n_layers, gradients, self.records, n_ranks, planned)

    def _new_rank_rows(self) -> RankRows | None:
        node = None if self.ranks is None else self.ranks.node
        if node is None or node.size == 1:
            return None
        sharing = self.part.sharing
        exchange = exchange_among(node, self.device, self.recorder, self.settings.inject)
        placer = RowPlacer(node.size, None if sharing is None else sharing.costs)
        return RankRows(exchange, self._store, placer, self._pass_conditions)

    def _pass_conditions(self) -> PassConditions:
        return PassConditions(self.settings, self.memory.free_bytes())

    # -- its parts ----------------------------------------------------------------------------

    @property
    def training(self) -> TrainingStep:
        self.lifetime.check()
        if self._training is None:
            raise OrderError(
                "the model was offloaded for inference; call model.train() before offload() (a "
                "model of from_pretrained() is in evaluation mode) to plan memory for an optimizer"
            )
        return self._training

    @property
    def can_train(self) -> bool:
        return self._training is not None

    def exclusive(self) -> AbstractContextManager[object]:
        """The lock of the thread that runs a layer's pass, a step or `flush`: they share slots,
        gradients and the step cursor. Passes of several threads may come in any order."""
        self.lifetime.check()  # first: in a forked child no thread would release the lock
        return self._lock

    @property
    def layout(self) -> RecordLayout:
        """The layout of the experts' records."""
        return self.records.layout

    # -- residents --------------------------------------------------------------------------------

    @property
    def residents(self) -> list[int]:
        """The number of resident experts of each layer."""
        return list(self._store.places.residents)

    @property
    def n_moves(self) -> int:
        """The number of times that experts have moved."""
        return self._moves.count

    def set_residents(self, counts: Sequence[int]) -> None:
        """Set the number of resident experts of each layer, between steps. Raises BudgetError if
        host memory and disk have no room for experts that leave the device."""
        if self.part.shared is not None:
            raise ConfigError(
                "experts cannot live on the compute device while ranks share those in host memory; "
                'offload with Settings(placement="static")'
            )
        with self.exclusive():
            self._moves.set_residents(counts)

    def swap_experts(self, swaps: Sequence[Swap]) -> None:
        """Swap resident experts and streamed ones of the same layer, between steps and before
        experts have optimizer states. The ids in routers, checkpoints and state dicts do not
        change."""
        with self.exclusive():
            self._moves.swap(swaps)

    # -- its memory ---------------------------------------------------------------------------

    def describe(self) -> str:
        """One line: the mode, and the place of everything."""
        return self.memory.describe(self.balance)

    def bytes_by_tier(self) -> dict[str, int]:
        """See `EngineMemory.bytes_by_tier`."""
        return self.memory.bytes_by_tier()

    # -- passes -------------------------------------------------------------------------------

    def recover(self) -> None:
        """Let transfers begin anew after a failure, before a pass or a decoding step."""
        if self.compute.streaming is not None:
            self.compute.streaming.recover()

    def hint(self, layer: int, expert_ids_TK: Tensor) -> None:
        """Let experts that a pre-gate has chosen for the next forward through a layer be uploaded,
        and read from disk, with those of the layers before it. No-op with several ranks: they do
        not know yet which tokens of others they get."""
        streamer = self.compute.streamer if self.rank_rows is None else None
        if streamer is not None:
            with self.exclusive():
                streamer.hint(layer, expert_ids_TK)

    @property
    def balance(self) -> Balance | None:
        """Distribution of token rows over ranks in the last passes; None with one rank."""
        return None if self.rank_rows is None else self.rank_rows.balance

    def begin_pass(self, layer_pass: LayerPass, tokens: int) -> None:
        """Begin a forward through a layer. Before the first layer of a step experts may move."""
        self.recover()
        if layer_pass.layer == 0 and self.stage_order.begins_step:
            follow = self.settings.follow_usage and self.settings.activations != "keep"
            self._moves.before_pass(layer_pass, tokens, follow)

    # -- settings -----------------------------------------------------------------------------

    @property
    def overlap_updates(self) -> bool:
        return self.settings.overlap_updates

    def switch(self, settings: Settings) -> None:
        """Turn techniques on or off between steps, to measure the gain of each."""
        for name in (
            "max_rows", "threads", "inject", "cpu_policy", "residency", "placement", "popularity",
        ):  # fmt: skip
            if getattr(settings, name) != getattr(self.settings, name):
                raise ConfigError(f"{name} cannot be switched; set it when the model is offloaded")
        if self.rank_rows is not None:
            self.rank_rows.check(settings)
        self.flush()
        if self.compute.streaming is not None:
            self.compute.streaming.set_settings(settings)  # first: it may refuse them
        self.settings = settings
        self.compute.grouped = settings.waves

    # -- lifetime -----------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until every transfer and update has ended."""
        with self.exclusive():
            self.lifetime.check()
            self._moves.wait()

    def __reduce_ex__(self, protocol: object) -> Any:
        raise OrderError(
            "the engine of an offloaded model can be neither pickled nor copied; save "
            "model.state_dict(), or call overspill.save(model, folder)"
        )

    def check_whole(self, what: str) -> None:
        """Raise if other ranks hold experts of this model."""
        if self.ranks is not None:
            raise ConfigError(
                f"{what} is not supported for a model that was offloaded with a mesh: rank "
                f"{self.ranks.rank} of {self.ranks.size} holds {self.experts.n_local} of "
                f"{self.n_experts} experts of {self.n_layers} of {self.layer_map.n_layers} layers; "
                "call overspill.save(model, folder) on all ranks"
            )

    def check_conserved(self) -> None:
        """Asserts, when idle, that every slot and buffer is accounted for."""
        self.flush()
        self._store.places.check_conserved()
        if self.compute.streaming is not None:
            self.compute.streaming.check_conserved()

    def close(self) -> None:
        """End all threads and free the memory; the experts are gone. A pass in another thread ends
        first, with an error where it waits. No-op in a forked child."""
        if self.lifetime.forked:
            return
        if self.compute.streaming is not None:
            self.compute.streaming.interrupt()
        with self._lock:
            if self.lifetime.closed:
                return
            self.lifetime.closed = True
            self.rank_rows = None  # ends the thread of the exchange
            self.compute.close()
            self._residents.wait()
            self._store.close()
            self._residents.close()
            self.dense.close()
            self.memory.close()
