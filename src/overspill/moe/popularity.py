"""The popularity predictor of an offloaded model: the passes that it sees, and the uploads that
follow it."""

from collections.abc import Callable

from torch import Tensor

from overspill.moe.pooled_experts import PooledExperts
from overspill.moe.predictor import PREDICT_TOKENS, Observer
from overspill.moe.stage_order import StageOrder


class Popularity:
    """Learns from every forward, and tells uploads and the split between CPU and GPU which token
    rows the experts of the next layers will likely get. Used under the engine's lock."""

    def __init__(
        self,
        experts: PooledExperts,
        stage_order: StageOrder,
        predicts: Callable[[], bool],
    ) -> None:
        """`predicts` says whether uploads follow predictions; decoding steps may have a predictor
        of their own."""
        self._experts = experts
        self._stage_order = stage_order
        self._predicts = predicts
        self.observer: Observer | None = None
        """The predictor's learner; None without a predictor, and before the first forward."""
        self.new_observer: Callable[[], Observer | None] = lambda: None
        """Makes the observer at the first forward, when the gates have weights."""

    def observe(self, layer: int, x_TD: Tensor, expert_ids_TK: Tensor) -> None:
        """Learn from the routing of a layer's tokens, and predicts that of later layers. Called
        before the host waits for the counts of this routing: predictions are there when they
        are."""
        predicts = self._predicts()
        if predicts and self.observer is None:
            self.observer = self.new_observer()
        if self.observer is None or not len(x_TD):
            return
        self.observer.observe(layer, x_TD, expert_ids_TK, self._stage_order.visit)
        streamer = self._experts.streamer if predicts else None
        if streamer is None:
            return
        every = -(-len(x_TD) // PREDICT_TOKENS)
        for later, distance in self.observer.later_layers(layer):
            if streamer.wants_prediction(later):
                args = x_TD[::every], distance, expert_ids_TK.shape[1]
                ids_NK = self.observer.predictor.predict(layer, *args)
                streamer.predict(later, ids_NK, len(x_TD) / len(ids_NK))
