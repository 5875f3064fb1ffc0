"""The experts of a model for its passes: resident ones, then streamed ones."""

from collections.abc import Callable, Collection, Iterator

from torch import Tensor

from overspill.core.errors import OrderError
from overspill.core.experts import Phase
from overspill.moe.dispatch import Dispatcher
from overspill.moe.layer_pass import LayerPass, Wave
from overspill.moe.residents.memory import Residents
from overspill.moe.residents.waves import resident_waves
from overspill.moe.streaming.compute import StreamingCompute
from overspill.moe.streaming.cpu_experts import CpuExperts
from overspill.moe.streaming.streaming import Streaming
from overspill.tiers.store import ExpertStore


class PooledExperts:
    """The compute side of the engine: resident experts, and the streamer that brings the others to
    the device, or lets the CPU compute them.

    Streaming, which has slots and threads, starts when an expert is not resident. If all experts
    are resident there is no streamer. Then a whole layer is one wave, if its
    activations fit; the host needs no counts and does not wait for the device. Experts are named by
    their local positions; `dispatcher` maps the router's ids to them.
    """

    def __init__(
        self,
        store: ExpertStore,
        residents: Residents,
        new_streaming: Callable[[], Streaming],
        dispatcher: Dispatcher,
        max_rows: int,
        grouped: bool,
    ) -> None:
        """`grouped` lets a wave have several experts."""
        self._store = store
        self._residents = residents
        self.streaming: Streaming | None = None
        """None if all experts have been resident from the beginning."""
        self._new_streaming = new_streaming
        self.dispatcher = dispatcher
        self.max_rows = max_rows  # token rows of a wave, which bound its activations
        self.grouped = grouped

    def start_streaming(self, keep: bool | None) -> None:
        """Start streaming, once. `keep` is whether the optimizer keeps gradients; None: there is no
        optimizer yet."""
        if self.streaming is not None:
            return
        streaming = self._new_streaming()
        try:
            if keep is not None and streaming.gradients is not None:
                streaming.gradients.allocate(keep)
        except BaseException:
            streaming.close()
            raise
        self.streaming = streaming

    def close(self) -> None:
        """End the threads of streaming."""
        if self.streaming is not None:
            self.streaming.close()

    @property
    def streamer(self) -> StreamingCompute | None:
        """The streamer; None while all experts are resident."""
        streaming, store = self.streaming, self._store
        if streaming is None or sum(store.places.residents) == len(store.places.entries):
            return None
        return streaming.compute

    @property
    def cpu(self) -> CpuExperts:
        """The experts of a pass that the CPU computes; there must be some (`LayerPass.on_cpu`)."""
        streamer = self.streamer
        assert streamer is not None
        return streamer.cpu

    def enter_forward(
        self, layer_pass: LayerPass, expert_ids_TK: Tensor, phase: Phase, keep: bool
    ) -> None:
        """Begin a forward pass. Orders the token rows and decides which side computes which expert.
        `phase` is BACKWARD for the recomputation of a checkpoint; with `keep` the rows keep their
        order until backward."""
        self._store.lifetime.check()
        layer, streamer = layer_pass.layer, self.streamer
        args = layer, expert_ids_TK, layer_pass.drops
        if streamer is None:
            # one wave holds the whole layer if its activations fit: then the host needs no counts
            many = expert_ids_TK.numel() > self.max_rows
            packed = self._residents.layout.format is not None  # which ones are unpacked
            on_cpu = self._residents.device.type == "cpu"
            need_counts = on_cpu or many or packed or not self.grouped
            counts = layer_pass.known_counts
            layer_pass.order = self.dispatcher.route(*args, need_counts, counts=counts)
            return
        may_resort = streamer.allow_split(layer_pass, sortable=not keep)
        layer_pass.order = self.dispatcher.route(
            *args,
            need_counts=True,
            may_resort=may_resort,
            unsorted=may_resort and streamer.expects_split(layer),
            counts=layer_pass.known_counts,
        )
        streamer.follow_hints(first=layer == 0)
        streamer.enter(layer_pass, phase)

    def enter_backward(self, layer_pass: LayerPass, need_dw: bool) -> None:
        """Begin the backward of a pass, with or without weight gradients; the CPU may get other
        experts than in forward."""
        self._store.lifetime.check()
        self._follow_swaps(layer_pass)
        rows, streamer = layer_pass.rows, self.streamer
        if streamer is not None:
            self.dispatcher.count(rows)  # all experts may have been resident in forward
            streamer.allow_split(layer_pass, sortable=rows.expert_ids_TK is not None)
            streamer.enter(layer_pass, Phase.BACKWARD, need_dw)
        elif layer_pass.on_cpu:  # in forward: the last experts have moved to the device since
            layer_pass.on_cpu = frozenset()
            self.dispatcher.sort(rows, last=frozenset())

    def _follow_swaps(self, layer_pass: LayerPass) -> None:
        """Order the token rows anew if experts of the layer were swapped since the forward."""
        layer, old = layer_pass.layer, layer_pass.rows
        if self.dispatcher.is_current(layer, old):
            return
        if layer_pass.kept is not None:
            raise OrderError(
                f"experts of layer {layer} were swapped since the forward, which kept "
                "activations in their order; run the forward again"
            )
        assert old.routed_TK is not None
        may_resort = old.expert_ids_TK is not None
        args = layer, old.routed_TK, layer_pass.drops
        layer_pass.order = self.dispatcher.route(*args, need_counts=True, may_resort=may_resort)
        layer_pass.on_cpu = frozenset()

    def waves(
        self, layer_pass: LayerPass, phase: Phase, positions: Collection[int] | None = None
    ) -> Iterator[Wave]:
        """Yield the layer's experts, or those at some positions, as they become available on the
        device. Compute a wave before asking for the next."""
        resident = resident_waves(
            self._residents, layer_pass, self.max_rows, self.grouped, positions
        )
        streamer = self.streamer
        if streamer is None:
            return resident
        return streamer.waves(resident, layer_pass, phase, self.max_rows, positions)
