"""An all-to-all of torch.distributed on a stream of its own."""

import torch

from overspill.core.errors import ConfigError, RankError
from overspill.parallel.exchange.interface import Exchange, Transfer
from overspill.parallel.ranks import Ranks
from overspill.trace.recorder import Recorder
from overspill.transfer.streams import Inject, StreamEvent
from overspill.transfer.work_stream import WorkStream


class CollectiveExchange(Exchange):
    """NCCL runs beside compute. gloo with tensors in host memory ends before the call returns."""

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        recorder: Recorder | None = None,
        inject: Inject | None = None,
    ) -> None:
        super().__init__(device, recorder, inject)
        if ranks.through_host:
            raise ConfigError(
                "the mesh has no NCCL group, and gloo sends from host memory; use a StagedExchange"
            )
        self.rank, self.size = ranks.rank, ranks.size
        self.ranks = ranks
        self._stream = WorkStream("exchange", device, self.recorder, inject)

    def _transfer(self, transfer: Transfer) -> StreamEvent:
        rows, result, sent, received, ready, label = transfer
        ranks = self.ranks
        assert ranks is not None

        def work() -> None:
            try:
                with self._stream.entered():
                    ranks.all_to_all_into(result, rows, sent, received)
            except RuntimeError as error:  # another rank has ended, or makes other calls
                raise RankError(f"an exchange of token rows failed: {error}") from error

        return self._stream.run(work, [ready], label, rows.nbytes)
