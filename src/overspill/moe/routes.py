"""Enters a layer with its routing: counts the tokens, has the experts divided between CPU and
device, and sorts the rows accordingly.

Shapes: T tokens, D model, E experts, K top-k.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from overspill.compute.permute import Permutation, count_rows
from overspill.core.experts import Phase
from overspill.moe.course import Course
from overspill.moe.passes import LayerPass
from overspill.moe.predictor import Lookahead
from overspill.moe.settings import Settings
from overspill.moe.sharing import Sharing
from overspill.tiers.store import ExpertStore
from overspill.transfer.lanes import to_host

_FEW_ROWS = 8192  # are sorted on the host: there it takes less time than the launches
_LEARN_EVERY = 4  # forwards from one of which predictors learn: it costs more than to predict

Gates = Callable[[], Sequence[Tensor | None]]
"""The weights of the routers, where they are known."""


class Routes:
    """What passes go by. `settings` are the engine's."""

    def __init__(
        self,
        store: ExpertStore,
        course: Course,
        sharing: Sharing,
        gates: Gates,
        settings: Settings,
        device: torch.device,
    ) -> None:
        self.store = store
        self.course = course
        self.sharing = sharing
        self.gates = gates
        self.settings = settings
        self.device = device
        self.n_experts = course.n_experts
        self._lookahead: Lookahead | None = None

    def enter(
        self, layer_pass: LayerPass, x_TD: Tensor, expert_ids_TK: Tensor, phase: Phase
    ) -> None:
        """A pass begins, in forward or as the recomputation of one."""
        if self._likely(layer_pass.layer):
            # the split needs the counts before the rows can be sorted by it
            predicted_E = self._look_ahead(layer_pass, x_TD, expert_ids_TK, phase)
            self._note_counts(layer_pass, expert_ids_TK, predicted_E)
        else:
            layer_pass.permutation = Permutation.build(expert_ids_TK, self.n_experts)
            layer_pass.counts = to_host(layer_pass.permutation.counts_E).tolist()
            layer_pass.expert_ids_TK = expert_ids_TK if self.sharing.open else None
        self._follow(layer_pass, phase)
        self._divide(layer_pass, phase)

    def enter_again(self, layer_pass: LayerPass) -> None:
        """The backward of a pass begins; its experts may be divided otherwise."""
        self._follow(layer_pass, Phase.BACKWARD)
        if layer_pass.expert_ids_TK is not None:
            self._divide(layer_pass, Phase.BACKWARD)
            return
        with self.store.lock:
            self.sharing.keep(layer_pass.on_host)  # nothing to sort the rows by

    def _likely(self, layer: int) -> bool:
        with self.store.lock:
            return self.settings.may_share and self.sharing.likely(layer)

    def _look_ahead(
        self, layer_pass: LayerPass, x_TD: Tensor, expert_ids_TK: Tensor, phase: Phase
    ) -> Tensor | None:
        """What the predictors say of a layer ahead."""
        ahead = self.settings.lookahead
        if not ahead or phase is Phase.BACKWARD or layer_pass.simulated:
            return None
        if self._lookahead is None or self._lookahead.ahead != ahead:
            sizes = self.n_experts, x_TD.shape[1]
            with torch.inference_mode(False):  # it will have to learn when that is over
                self._lookahead = Lookahead(self.gates(), *sizes, self.device, ahead, _LEARN_EVERY)
        return self._lookahead.observe(layer_pass.layer, x_TD, expert_ids_TK)

    def _note_counts(
        self, layer_pass: LayerPass, expert_ids_TK: Tensor, predicted_E: Tensor | None
    ) -> None:
        """The host waits for the counts anyway: a prediction comes along, and so do few ids."""
        few = expert_ids_TK.numel() <= _FEW_ROWS
        if few:
            wanted = expert_ids_TK.reshape(-1).to(torch.int64)
        else:
            wanted = count_rows(expert_ids_TK, self.n_experts)
        if predicted_E is not None:
            wanted = torch.cat((wanted, predicted_E))
        wanted = to_host(wanted)
        if predicted_E is not None:
            wanted, predicted = wanted.split([len(wanted) - self.n_experts, self.n_experts])
            with self.store.lock:
                layer = layer_pass.layer + self.settings.lookahead
                self.course.popularity.predict(layer, predicted.tolist())
        if few:
            layer_pass.expert_ids_TK = wanted.view_as(expert_ids_TK)
            counts = np.bincount(wanted.numpy(), minlength=self.n_experts)
            layer_pass.counts = counts[: self.n_experts].tolist()
        else:
            layer_pass.expert_ids_TK, layer_pass.counts = expert_ids_TK, wanted.tolist()

    def _follow(self, layer_pass: LayerPass, phase: Phase) -> None:
        with self.store.lock:
            self.course.enter(layer_pass.layer, phase, layer_pass.counts, layer_pass.training)

    def _divide(self, layer_pass: LayerPass, phase: Phase) -> None:
        """Sorts the rows, again if the experts of the CPU are others than they were."""
        on_host: frozenset[int] = frozenset()
        if self.settings.may_share:
            with self.store.lock:
                before = layer_pass.on_host
                on_host = self.sharing.decide(layer_pass.layer, layer_pass.counts, phase, before)
        if layer_pass.permutation is not None and on_host == layer_pass.on_host:
            return
        ids_TK, counts = layer_pass.expert_ids_TK, layer_pass.counts
        assert ids_TK is not None
        layer_pass.on_host = on_host
        if ids_TK.device.type == "cpu":
            layer_pass.permutation = Permutation.on_host(ids_TK, counts, on_host, self.device)
        else:
            layer_pass.permutation = Permutation.with_counts(ids_TK, counts, on_host)
