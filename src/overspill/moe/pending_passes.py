"""Forwards of trained experts whose backward will come in this step."""

import weakref

from overspill.moe.layer_pass import LayerPass, PendingBackward


class PendingPasses:
    """Forwards that wait for their backward, by layer. The gradient of a layer is complete only if
    there are no others."""

    def __init__(self, n_layers: int) -> None:
        # sets, because adding and removing is atomic and a graph may be freed in any thread
        self._pending: list[set[PendingBackward]] = [set() for _ in range(n_layers)]
        self._expected = [0] * n_layers  # forwards that a reentrant checkpoint will repeat

    def expect_recomputation(self, layer: int) -> None:
        """Note a forward without a graph, which a reentrant checkpoint will repeat during backward,
        with a graph."""
        self._expected[layer] += 1

    def open(self, layer_pass: LayerPass, recomputed: bool = False) -> None:
        """Add a forward whose backward will come, unless its graph is freed."""
        layer = layer_pass.layer
        if recomputed:
            self._expected[layer] = max(0, self._expected[layer] - 1)
        pending = self._pending[layer]
        pending.add(layer_pass.pending)
        weakref.finalize(layer_pass, pending.discard, layer_pass.pending)

    def close(self, layer_pass: LayerPass) -> None:
        """Remove a forward: its backward has come."""
        self._pending[layer_pass.layer].discard(layer_pass.pending)

    def __contains__(self, layer_pass: LayerPass) -> bool:
        return layer_pass.pending in self._pending[layer_pass.layer]

    def of_layer(self, layer: int) -> bool:
        """Whether more backward passes of a layer will come."""
        return bool(self._pending[layer] or self._expected[layer])

    def forget_expected(self) -> None:
        """Expect no recomputation any more."""
        self._expected = [0] * len(self._expected)

    def forget(self) -> None:
        """Remove all forwards: a graph from before the end of a step must not train after it."""
        for pending in self._pending:
            pending.clear()
        self.forget_expected()
