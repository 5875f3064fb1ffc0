"""The popularity predictor of an offloaded model: which passes it sees, and who follows it."""

from collections.abc import Callable

from torch import Tensor

from overspill.moe.predictor import PREDICT_TOKENS, Observer
from overspill.moe.stage_order import StageOrder
from overspill.moe.streaming.lazy import LazyStreaming
from overspill.tiers.store import ExpertStore


class Popularity:
    """Learns from every forward, and tells uploads and the split between CPU and GPU which token
    rows the experts of the next layers will likely get. Used under the engine's lock."""

    def __init__(
        self,
        streaming: LazyStreaming,
        store: ExpertStore,
        stage_order: StageOrder,
        predicts: Callable[[], bool],
    ) -> None:
        """`predicts` says whether uploads follow predictions; decoding steps may have a predictor
        of their own."""
        self._streaming = streaming
        self._store = store
        self._stage_order = stage_order
        self._predicts = predicts
        self.observer: Observer | None = None
        """None: there is no predictor, or no forward yet."""
        self.new_observer: Callable[[], Observer | None] = lambda: None
        """Makes it for the first forward, when the weights of the gates are there."""

    def observe(self, layer: int, x_TD: Tensor, expert_ids_TK: Tensor) -> None:
        """A forward has routed the tokens of a layer. Called before the host waits for the counts
        of this routing: what is predicted is known when they are."""
        predicts = self._predicts()
        if predicts and self.observer is None:
            self.observer = self.new_observer()
        if self.observer is None or not len(x_TD):
            return
        self.observer.observe(layer, x_TD, expert_ids_TK, self._stage_order.visit)
        streaming = self._streaming.started
        if (
            not predicts
            or streaming is None
            or sum(self._store.residents) == len(self._store.entries)
        ):
            return
        every = -(-len(x_TD) // PREDICT_TOKENS)
        for later, distance in self.observer.later_layers(layer):
            if streaming.compute.wants_prediction(later):
                args = x_TD[::every], distance, expert_ids_TK.shape[1]
                ids_NK = self.observer.predictor.predict(layer, *args)
                streaming.compute.predict(later, ids_NK, len(x_TD) / len(ids_NK))
