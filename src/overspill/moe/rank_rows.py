"""Token rows of an offloaded model between the ranks that divide the experts of a layer."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from overspill.core.errors import ConfigError
from overspill.moe.layer_pass import LayerPass
from overspill.moe.received_rows import ReceivedRows
from overspill.moe.row_placer import Balance, RowPlacer
from overspill.moe.settings import Settings
from overspill.parallel.exchange.interface import Exchange
from overspill.parallel.row_exchange import RowExchange, SentRows
from overspill.plan.exchange_groups import Rows, check_groups, choose_groups, divide_experts
from overspill.tiers.store import ExpertStore


class PassConditions(NamedTuple):
    """Settings and free memory, which may change between passes."""

    settings: Settings
    free_memory: int
    """Free bytes of the device."""


class RankRows:
    """Assignment of token rows to ranks, the groups in which they travel, and the choice whether
    received rows are kept for backward. All ranks enter each method."""

    def __init__(
        self,
        exchange: Exchange,
        store: ExpertStore,
        placer: RowPlacer,
        conditions: Callable[[], PassConditions],
    ) -> None:
        self._store, self._placer, self._conditions = store, placer, conditions
        self._places = store.places
        self._device = exchange.device
        self._n_experts = store.places.experts.n_global
        self.exchange = RowExchange(exchange, self._n_experts, placer.place, self._divide)
        layout = store.memory.layout
        self._received = ReceivedRows(exchange, layout.shape, layout.dtype)
        self._n_ranks = exchange.size
        self.check(conditions().settings)

    def check(self, settings: Settings) -> None:
        """Raise for settings that an exchange does not support."""
        if settings.popularity == "learned":
            raise ConfigError("an exchange does not support popularity='learned'; leave one out")
        check_groups(settings.exchange_groups, self._n_experts, self._n_ranks)

    def route(self, layer: int, expert_ids_TK: Tensor) -> SentRows:
        """Tell all ranks which rows they get."""
        experts, own = self._places.maps[layer], self._places.experts.local_ids
        positions = () if experts.in_order else [*map(experts.position, own)]
        store = self._store
        with store.sync.lock:  # the versions that updates which have begun will give the experts
            versions = [entry.version for entry in self._places.layer_entries(layer)]
        rows = self.exchange.route(expert_ids_TK, versions, positions)
        with store.sync.lock:
            self._places.remote_experts.expect(layer, rows.versions)
        return rows

    def _divide(self, rows_GE: Rows, order_GE: Rows) -> Rows:
        """The groups of experts whose token rows travel together. On a CPU nothing runs beside the
        exchange; CPU experts begin when all rows are there."""
        settings = self._conditions().settings
        n = 1 if settings.cpu_experts else settings.exchange_groups
        if n is None:
            n = 1 if self._device.type == "cpu" else choose_groups(rows_GE)
        return divide_experts(rows_GE, order_GE, n)

    def keeps(self, layer_pass: LayerPass) -> bool:
        """Whether token rows that a training pass has received stay on the device until its
        backward."""
        assert layer_pass.sent is not None
        store, now = self._store, self._conditions()
        n_streamed = -(
            -(len(self._places.entries) - sum(self._places.residents)) // self._places.n_layers
        )
        return self._received.keeps(
            now.settings.received_rows,
            layer_pass.sent.most_rows,
            self._places.n_layers,
            n_streamed * store.memory.layout.weight_bytes,
            layer_pass.trained,
            now.free_memory,
        )

    @property
    def balance(self) -> Balance | None:
        """Distribution of token rows over ranks in the last passes."""
        return self._placer.balance()
