"""The choice whether token rows that forward has received stay on the device until backward.

Else other ranks send them again. Keeping them saves one of the five exchanges of a layer and takes
memory that experts could have, so it is chosen where the exchange takes longest by measured speeds
and a small share of the free memory is enough.
"""

import torch

from overspill.compute.experts import StackedWeights
from overspill.core.experts import ExpertShape
from overspill.moe.pipeline.activations import HostCopies
from overspill.moe.pipeline.experts import Experts
from overspill.moe.pipeline.speeds import measure_speeds
from overspill.parallel.exchange.interface import Exchange
from overspill.plan.reuse import Restore, Speeds
from overspill.plan.streamed_reuse import StreamedLayer, cheapest_restore

_SHARE = 0.1  # of the free memory


class ReceivedRows:
    """The choice of one model. It is made on all ranks, at their first training pass."""

    def __init__(self, exchange: Exchange, shape: ExpertShape, dtype: torch.dtype) -> None:
        self._exchange = exchange
        self._shape = ExpertShape(shape.d_model, shape.d_hidden, shape.gated)
        self._dtype = dtype
        self._chosen: Restore | None = None
        self.speeds: Speeds | None = None
        """The speeds on which the choice was based, if they were measured."""

    def keeps(
        self, setting: str, rows: int, n_layers: int, streamed: int, trained: bool, free: int
    ) -> bool:
        """`rows` are those of the rank with most of them, `streamed` the bytes of experts of a
        layer that are uploaded, `free` those of the device. On a CPU nothing is measured, and rows
        are sent again."""
        if setting != "auto":
            return setting == "keep"
        if self._chosen is None:
            self._chosen = Restore.REPEAT
            if self._exchange.device.type != "cpu":
                self._chosen = self._choose(rows, n_layers, streamed, trained, free)
        return self._chosen is Restore.KEEP

    def _choose(self, rows: int, n_layers: int, streamed: int, trained: bool, free: int) -> Restore:
        told = self._exchange.gather_numbers(torch.tensor([streamed, -free]))
        uploads, shortest = told.max(0).values.tolist()
        ranks = self._exchange.ranks
        layer = StreamedLayer(
            self._shape,
            self._dtype.itemsize,
            rows,
            uploads,
            downloads=uploads if trained else 0,
            shared_link=ranks is not None and ranks.through_host,
        )
        if n_layers * layer.row_bytes > _SHARE * -shortest:
            return Restore.REPEAT
        self.speeds = self._measure()
        return cheapest_restore(layer, self.speeds)

    def _measure(self) -> Speeds:
        device, shape = self._exchange.device, self._shape
        with torch.random.fork_rng([device]):  # training draws the same numbers as without it
            w_in = torch.randn(1, shape.in_rows, shape.d_model, device=device).to(self._dtype)
            w_out = torch.randn(1, shape.d_model, shape.d_hidden, device=device).to(self._dtype)
            experts = Experts(StackedWeights(w_in, w_out), shape, None)
            return measure_speeds(experts, self._exchange, HostCopies(device))
