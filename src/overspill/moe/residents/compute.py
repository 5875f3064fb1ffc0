"""The compute side of a model whose experts are all resident."""

from collections.abc import Collection, Iterator

from torch import Tensor

from overspill.core.experts import Phase
from overspill.core.lifetime import Lifetime
from overspill.moe.compute import ExpertCompute
from overspill.moe.dispatch import Dispatcher
from overspill.moe.layer_pass import LayerPass, Wave
from overspill.moe.residents.memory import Residents
from overspill.moe.residents.waves import resident_waves


class ResidentCompute(ExpertCompute):
    """No slots and no transfers: a whole layer is one wave. With `grouped` off every expert is a
    wave of its own."""

    def __init__(
        self,
        residents: Residents,
        lifetime: Lifetime,
        dispatcher: Dispatcher,
        max_rows: int,
        grouped: bool,
    ) -> None:
        super().__init__(residents.device, dispatcher, max_rows)
        self._residents = residents
        self._lifetime = lifetime
        self._grouped = grouped

    def set_grouped(self, grouped: bool) -> None:
        self._grouped = grouped

    def enter_forward(
        self, layer_pass: LayerPass, expert_ids_TK: Tensor, phase: Phase, keep: bool
    ) -> None:
        self._lifetime.check()
        # one wave holds the whole layer if its activations fit: then the host needs no counts
        many = expert_ids_TK.numel() > self.max_rows
        packed = self._residents.layout.format is not None  # which ones are unpacked
        need_counts = self.device.type == "cpu" or many or packed or not self._grouped
        layer_pass.order = self.dispatcher.route(
            layer_pass.layer,
            expert_ids_TK,
            layer_pass.drops,
            need_counts,
            counts=layer_pass.known_counts,
        )

    def enter_backward(self, layer_pass: LayerPass, need_dw: bool) -> None:
        self._lifetime.check()
        self.follow_swaps(layer_pass)
        if layer_pass.on_cpu:  # in forward: the last experts have moved to the device since
            layer_pass.on_cpu = frozenset()
            self.dispatcher.sort(layer_pass.rows, last=frozenset())

    def waves(
        self, layer_pass: LayerPass, phase: Phase, positions: Collection[int] | None = None
    ) -> Iterator[Wave]:
        return resident_waves(self._residents, layer_pass, self.max_rows, self._grouped, positions)
