"""The current stage and micro-batch of a model that is passed in stages, for the engine."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

from overspill.moe.expert_moves import ExpertMoves
from overspill.moe.pooled_experts import PooledExperts
from overspill.plan.order import StageVisit
from overspill.tiers.store import ExpertStore


class StageOrder:
    """Uploads follow the order of stages."""

    def __init__(
        self,
        moves: ExpertMoves,
        compute: PooledExperts,
        store: ExpertStore,
        lock: AbstractContextManager[object],
    ) -> None:
        """`lock` is that of the engine."""
        self._moves = moves
        self._compute = compute
        self._sync = store.sync
        self._places = store.places
        self._lock = lock
        self._visit: StageVisit | None = None

    def plan(self, stages: Sequence[range]) -> None:
        """Set the layers that micro-batches pass in turn: only gradients of one stage are
        accumulated at a time. Without stages, those of the whole model."""
        layers = max((len(stage) for stage in stages), default=self._places.n_layers)
        with self._lock:
            self._moves.most_sums = layers * self._places.experts.n_local

    def follow(self, visit: StageVisit | None) -> None:
        """Set the stage and the micro-batch of the next passes; None: a whole model."""
        with self._lock:
            self._visit = visit
            if (streaming := self._compute.streaming) is not None:
                with self._sync.lock:
                    streaming.compute.cursor.follow_stage(visit)

    @property
    def visit(self) -> StageVisit | None:
        """The stage and the micro-batch of the next passes; None: those of a whole model."""
        return self._visit

    @property
    def begins_step(self) -> bool:
        """Whether a pass through the first layer is the first of a step."""
        return self._visit is None or self._visit.micro_batch == 0

    def fits(self, layers: range) -> bool:
        """Whether the device holds all experts of these layers at once, resident or in slots."""
        streaming = self._compute.streaming
        if streaming is None:
            return True
        with self._sync.lock:
            streaming.compute.plan.refresh()
            return streaming.compute.plan.fits(layers)
