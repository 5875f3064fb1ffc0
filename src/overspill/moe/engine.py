"""The engine of an offloaded model, `model.overspill`: three parts and their lifetime.

`compute` runs the experts, `training` follows a training step (None for inference), `records` reads
and writes weights and optimizer states. Some experts have their home on the compute device, the
others are streamed from host memory and disk.
"""

import functools
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overspill.core.errors import ConfigError, OrderError
from overspill.core.expert_map import ExpertMap
from overspill.core.layer_map import LayerMap
from overspill.core.sizes import format_size
from overspill.hardware.machine import usable_cores
from overspill.hardware.profile import ExpertCosts
from overspill.moe.addresses import Addresses
from overspill.moe.compute import ExpertCompute
from overspill.moe.dense_part import DensePart
from overspill.moe.device_memory import CudaMemory, DeviceMemory
from overspill.moe.dispatch import LocalDispatcher
from overspill.moe.expert_moves import ExpertMoves
from overspill.moe.gradients import ExpertGradients
from overspill.moe.homes.compute import HomeCompute
from overspill.moe.homes.memory import DeviceHomes
from overspill.moe.layer_pass import LayerPass
from overspill.moe.memory_limit import MEMORY_LIMITS, ModelMemory
from overspill.moe.rank_rows import Now, RankRows
from overspill.moe.records import ExpertRecords
from overspill.moe.row_placer import Balance, RowPlacer, Sharing
from overspill.moe.settings import Settings
from overspill.moe.stage_order import StageOrder
from overspill.moe.streaming.lazy import LazyStreaming
from overspill.moe.streaming.streaming import Streaming
from overspill.moe.training_step import TrainingStep
from overspill.parallel.exchange.choice import exchange_among
from overspill.parallel.exchange.interface import Exchange
from overspill.parallel.ranks import Ranks
from overspill.plan.budget import Placement
from overspill.plan.homes import DeviceShare, spread_homes
from overspill.plan.usage import Exchange as ExchangedHomes
from overspill.tiers.layout import RecordLayout
from overspill.tiers.slab import Progress
from overspill.tiers.store import ExpertStore
from overspill.trace.recorder import Recorder


class Engine:
    """What a model holds."""

    def __init__(
        self,
        n_layers: int,
        experts: ExpertMap,
        layout: RecordLayout,
        device: torch.device,
        placement: Placement,
        settings: Settings,
        recorder: Recorder,
        disk: Path | None = None,
        progress: Progress | None = None,
        costs: ExpertCosts | None = None,
        ranks: Ranks | None = None,
        sharing: Sharing | None = None,
        layers: LayerMap | None = None,
    ) -> None:
        """With `ranks`, `experts` are this one's part of a layer, and `layers` its part of the
        model; with `sharing` it can compute experts of others too."""
        self.n_layers = n_layers
        self.layer_map = layers or LayerMap.whole(n_layers)
        self.experts = experts
        self.n_experts = experts.n_global  # of a layer over all processes
        self.shape, self.dtype = layout.shape, layout.dtype
        self.device = device
        self.ranks = ranks
        self.rank_rows: RankRows | None = None
        """Token rows of other ranks; None: none divide the experts of a layer."""
        self._shared = None if sharing is None else sharing.shared
        self.placement = placement
        self.recorder = recorder
        self._settings = settings
        self._memory: ModelMemory | None = None
        self._training: TrainingStep | None = None
        counts = spread_homes(placement.homes, n_layers, experts.n_local)
        with ExitStack() as undo:  # a failure leaves no thread and no file
            # first what may not fit: nothing else is allocated yet
            homes = self._homes = DeviceHomes(counts, layout, device)
            store = self._store = ExpertStore(
                n_layers,
                experts,
                layout,
                placement.home_slots,
                placement.cache_slots,
                device.type == "cuda",
                disk,
                progress,
                homes=counts,
                spare_records=placement.spare_records,
                shared=self._shared,
            )
            undo.callback(store.close)
            self.lifetime = store.lifetime
            self.records = ExpertRecords(store, homes)
            self.addresses = Addresses(store, homes, recorder, settings.inject)
            self.dense = DensePart(device, store.lifetime, placement, recorder, settings.inject)
            new = functools.partial(
                Streaming,
                store,
                homes,
                placement,
                recorder=recorder,
                updates_at_once=self._updates_at_once,
                progress=progress,
                costs=costs,
                shared=self._shared,
            )
            streaming = self._streaming = LazyStreaming(new, settings)
            undo.callback(streaming.close)
            if placement.training:
                threads = settings.threads or usable_cores()
                gradients = ExpertGradients(
                    homes, store, threads, lambda: streaming.gradients, self._make_room
                )
                self._training = TrainingStep(
                    n_layers, gradients, self.records, 1 if ranks is None else ranks.size
                )
            self._lock = threading.RLock() if self._training is None else self._training.lock
            dispatcher = LocalDispatcher(store.maps, device)
            max_rows = settings.max_rows or placement.max_rows
            self._home_compute = HomeCompute(
                homes, store.lifetime, dispatcher, max_rows, settings.waves
            )
            self._moves = ExpertMoves(
                store, homes, self.records, placement, self._training, streaming, self
            )
            self.stage_order = StageOrder(self._moves, streaming, store, self._lock)
            if ranks is not None and ranks.node.size > 1:
                costs_of_rows = None if sharing is None else sharing.costs
                exchange = exchange_among(ranks.node, device, recorder, settings.inject)
                self._exchange_through(exchange, RowPlacer(ranks.node.size, costs_of_rows))
            undo.pop_all()

    def _make_room(self, keep: bool) -> None:
        self._moves.make_room(keep)

    def _updates_at_once(self) -> bool:
        return self._training is not None and self._training.updates_at_once

    # -- its parts ----------------------------------------------------------------------------

    @property
    def compute(self) -> ExpertCompute:
        streaming = self._streaming.started
        if streaming is None or sum(self._store.homes) == len(self._store.entries):
            return self._home_compute
        return streaming.compute

    @property
    def training(self) -> TrainingStep:
        self.check_open()
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
        self.check_open()  # first: in a forked child no thread would release the lock
        return self._lock

    # -- its experts --------------------------------------------------------------------------

    @property
    def layout(self) -> RecordLayout:
        return self.records.layout

    @property
    def expert_parameters(self) -> int:
        return self.layer_map.n_layers * self.n_experts * self.shape.numel

    # -- homes --------------------------------------------------------------------------------

    @property
    def homes(self) -> list[int]:
        """How many experts of each layer have their home on the compute device."""
        return list(self._store.homes)

    @property
    def n_moves(self) -> int:
        """How often experts have moved; where they are has not changed if this has not."""
        return self._moves.count

    def announce(self, layer: int, expert_ids_TK: Tensor) -> None:
        """A pre-gate has chosen these experts for the next forward through a layer: they are
        uploaded, and read from disk, with those of the layers before it. Not with several ranks:
        they do not know yet which tokens of others they get."""
        streaming = self._streaming.started if self.rank_rows is None else None
        if streaming is not None and sum(self._store.homes) < len(self._store.entries):
            with self.exclusive():
                streaming.compute.announce(layer, expert_ids_TK)

    @property
    def cache_slots(self) -> int:
        """Host slots that experts on disk share."""
        with self._store.lock:  # none is on its way to another expert
            return self._store.cache_slots

    @property
    def uses_disk(self) -> bool:
        return self._store.disk_slots > 0

    def set_homes(self, counts: Sequence[int]) -> None:
        """Changes how many experts of each layer have their home on the compute device, between
        steps. Raises BudgetError if host memory and disk have no room for those that leave it."""
        if self._shared is not None:
            raise ConfigError(
                "experts cannot live on the compute device while ranks share those in host memory; "
                'offload with Settings(placement="static")'
            )
        with self.exclusive():
            self._moves.set_homes(counts)

    def exchange_homes(self, exchanges: Sequence[ExchangedHomes]) -> None:
        """Lets experts at home on the compute device and streamed ones of the same layer exchange
        their places, between steps and before experts have optimizer states. What routers,
        checkpoints and state dicts call an expert does not change."""
        with self.exclusive():
            self._moves.exchange(exchanges)

    # -- settings -----------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        return self._settings

    @property
    def overlap_updates(self) -> bool:
        return self._settings.overlap_updates

    def switch(self, settings: Settings) -> None:
        """Turns techniques on or off between steps, to measure what each gains."""
        for name in ("max_rows", "threads", "inject", "cpu_policy", "residency", "placement"):
            if getattr(settings, name) != getattr(self._settings, name):
                raise ConfigError(f"{name} cannot be switched; set it when the model is offloaded")
        if self.rank_rows is not None:
            self.rank_rows.check(settings)
        self.flush()
        self._streaming.set_settings(settings)  # first: it may refuse them
        self._settings = settings
        self._home_compute.set_grouped(settings.waves)

    # -- lifetime -----------------------------------------------------------------------------

    def flush(self) -> None:
        """Waits until every transfer and update has ended."""
        with self.exclusive():
            self.check_open()
            self._moves.wait()

    def __reduce_ex__(self, protocol: object) -> Any:
        raise OrderError(
            "the engine of an offloaded model can be neither pickled nor copied; save "
            "model.state_dict(), or call overspill.save(model, folder)"
        )

    def check_open(self) -> None:
        """Raises if the engine was closed, or is another process's."""
        self.lifetime.check()

    def check_whole(self, what: str) -> None:
        """Raises if other ranks hold experts of this model."""
        if self.ranks is not None:
            raise ConfigError(
                f"{what} is not supported for a model that was offloaded with a mesh: rank "
                f"{self.ranks.rank} of {self.ranks.size} holds {self.experts.n_local} of "
                f"{self.n_experts} experts of {self.n_layers} of {self.layer_map.n_layers} layers; "
                "call overspill.save(model, folder) on all ranks"
            )

    def check_conserved(self) -> None:
        """When idle: every slot and buffer is accounted for."""
        self.flush()
        self._store.check_conserved()
        self._streaming.check_conserved()

    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes of the experts on the compute device, in host memory and on disk; in host memory
        with those of the dense part, and of gradients for other ranks."""
        outbox = 0 if self._shared is None else self._shared.own.sizes.outbox
        return {
            "gpu": self._homes.nbytes + self._streaming.device_bytes,
            "host": self._moves.host_bytes + self.dense.host_bytes + outbox,
            "disk": self._store.memory.disk_bytes,
        }

    def gpu_use(self) -> dict[str, int] | None:
        """Bytes of the GPU's budget, of what this process has reserved, and what it is for: experts
        at home, slots and gradients of streamed ones, and the rest (dense part, activations).
        None without a GPU."""
        if self._memory is None:
            return None
        reserved = torch.cuda.memory_reserved(self.device) - self._memory.held_by_others()
        return {
            "budget": min(self._memory.budget, self._memory.available()),
            "reserved": reserved,
            "experts": self._homes.nbytes,
            "slots": self._streaming.device_bytes,
            "rest": reserved - self._homes.nbytes - self._streaming.device_bytes,
        }

    def describe(self) -> str:
        """One line: the mode and where everything is."""
        sizes = {tier: format_size(size) for tier, size in self.bytes_by_tier().items()}
        placement, store, at_home = self.placement, self._store, sum(self._store.homes)
        rank = "" if self.ranks is None else f"rank {self.ranks.rank} of {self.ranks.size}, "
        weights = "weights and gradients" if placement.training else "weights"
        parts = (placement.dense_weights, weights), (placement.dense_states, "optimizer states")
        dense = "".join(
            f"; dense {what} in host memory ({format_size(size)})" for size, what in parts if size
        )
        if self._streaming.started is None:
            return (
                f"{rank}mode gpu: all {at_home} experts and their states on {self.device} "
                f"({sizes['gpu']}){dense}"
            )
        homes = f"{at_home} experts and " if at_home else ""
        line = (
            f"{rank}mode {placement.mode}: {len(store.entries)} experts of "
            f"{format_size(self.layout.weight_bytes)}; {homes}{placement.slots} slots on "
            f"{self.device} ({sizes['gpu']}), {store.in_host} in host memory "
            f"({format_size(self._moves.host_bytes)})"
        )
        if store.on_disk:
            slots = f"{store.cache_slots} host slots"
            line += f", {store.on_disk} on disk ({sizes['disk']}) through {slots}"
        if self._shared is not None:
            line += f", those of all {self.n_experts} of a layer shared by ranks"
        if (balance := self.balance) is not None:
            line += f"; {balance}"
        return line + dense

    def limit_memory(self, budget: int | None) -> None:
        """Limits what torch allocates on the GPU to the budgets of all models; without one, the
        model shares what is free."""
        if self.device.type != "cuda":
            return
        memory = MEMORY_LIMITS.set(self, self.device, budget, CudaMemory(self.device))
        self._memory = memory
        if self.placement.fills:
            self.fill_memory(memory, memory.budget)

    def device_bytes(self) -> int:
        """What this model holds on the compute device between two passes."""
        return self.bytes_by_tier()["gpu"] + self.dense.device_bytes()

    def give_way(self) -> None:
        """Another model gets memory: experts that are too many leave the device, if not in the
        middle of a step."""
        if self.lifetime.forked or not self._moves.fills_memory:
            return
        with self._lock:
            if not self.lifetime.closed:
                self._moves.give_way()

    def fill_memory(self, memory: DeviceMemory, budget: int) -> None:
        """From now on lets as many experts live on the device as `budget` allows."""
        self._moves.fill_memory(memory, budget)

    def hold_homes(self, holder: object) -> None:
        """As long as `holder` lives, or until it releases them, no experts move by themselves:
        its copies of experts use the memory."""
        self._moves.holders.add(holder)

    def release_homes(self, holder: object) -> None:
        self._moves.holders.discard(holder)

    @property
    def device_share(self) -> DeviceShare:
        """Experts at home on the compute device, and gradients there."""
        return self._moves.share

    def recover(self) -> None:
        """Before a pass or a decoding step: a failure of transfers in an earlier one is over."""
        self._streaming.recover()

    def loop_back(self, exchange: Exchange) -> None:
        """From the next pass on, token rows of one process travel through `exchange`, a
        `LoopbackExchange`: to measure on one GPU what is hidden of an exchange."""
        if self.ranks is not None or exchange.size > 1:
            raise ConfigError("rows of several ranks travel already; offload without a mesh")
        with self.exclusive():
            self._exchange_through(exchange, RowPlacer(exchange.size, None))

    def _exchange_through(self, exchange: Exchange, placer: RowPlacer) -> None:
        def now() -> Now:
            memory, free = self._memory, 0
            if memory is not None:
                free = min(memory.budget, memory.available()) - memory.allocated()
            return Now(self._settings, free)

        self.rank_rows = RankRows(exchange, self._store, placer, now)

    @property
    def balance(self) -> Balance | None:
        """How evenly token rows were spread over ranks, lately; None with one rank."""
        return None if self.rank_rows is None else self.rank_rows.balance

    def begin_pass(self, layer_pass: LayerPass, tokens: int) -> None:
        """A forward through a layer begins. Between two steps the first layer's is the time to
        move experts."""
        self.recover()
        if layer_pass.layer == 0 and self.stage_order.begins_step:
            follow = self._settings.follow_usage and self._settings.activations != "keep"
            self._moves.before_pass(layer_pass, tokens, follow)

    def close(self) -> None:
        """Ends all threads and frees the memory; the experts are gone. A pass in another thread
        ends first, with an error where it waits. No-op in a forked child."""
        if self.lifetime.forked:
            return
        self._streaming.interrupt()
        with self._lock:
            if self.lifetime.closed:
                return
            self.lifetime.closed = True
            self.rank_rows = None  # ends the thread of the exchange
            self._streaming.close()
            self._homes.wait()
            self._store.close()
            self._homes.close()
            self.dense.close()
            MEMORY_LIMITS.lift(self)
