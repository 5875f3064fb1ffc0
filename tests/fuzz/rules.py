"""What Overspill may refuse that plain PyTorch allows, and which operations are left out.

The rules follow the state of each layer's experts as docs/training.md describes it. An operation
that may be refused must either be refused, with an error for users, or give the oracle's result.
"""

from dataclasses import dataclass

from tests.fuzz.program import Case, Op

BACKWARDS = ("backward", "accumulate", "retain", "inputs", "poison")
FORWARDS = ("forward", "evaluate", "logits", "generate")


@dataclass
class Graph:
    """A graph of the program."""

    trained: frozenset[int]
    """The layers whose experts were trained when it was made."""
    used: bool = False
    stale: bool = False
    """Weights have changed since."""
    swapped: bool = False
    """Experts were swapped since."""


class Rules:
    """Follows a program. A layer is "empty", has "part" of its gradient, the complete gradient
    "kept" until step(), or was "updated" during backward."""

    def __init__(self, case: Case, overlap_updates: bool) -> None:
        self.case = case
        self.overlap_updates = overlap_updates
        self.frozen = set(range(case.n_layers)) if case.frozen else set()
        self.graphs: dict[int, Graph] = {}
        self.layers = ["empty"] * case.n_layers
        self.poisoned = False
        self.lr_changed = False

    @property
    def updated(self) -> bool:
        return "updated" in self.layers

    @property
    def complete(self) -> bool:
        return self.updated or "kept" in self.layers

    def left_out(self, op: Op) -> bool:
        """Whether there is nothing to do, or torch itself would refuse."""
        needs_graph = op.name in (*BACKWARDS, "grad")
        if needs_graph and op.graph not in self.graphs:
            return True
        if op.name == "poison":  # dense gradients alone may be NaN, as in PyTorch
            untrained = not self.graphs[op.graph].trained - self.frozen
            return untrained or self.may_refuse(op)
        if op.name == "generate" and self.case.model != "gpt":
            return True
        if op.name in ("freeze", "unfreeze") and self.case.frozen:
            return True
        if op.name in ("freeze", "unfreeze", "freeze_dense") and self.case.checkpoint:
            return bool(self.graphs)  # torch.utils.checkpoint refuses the recomputation
        if op.name == "switch":
            return bool(self.graphs) or self.layers != ["empty"] * self.case.n_layers
        return False

    # -- what may be refused ----------------------------------------------------------------

    def may_refuse(self, op: Op) -> bool:
        if op.name in FORWARDS:
            return self.complete  # a forward between backward and step()
        if op.name in BACKWARDS or op.name == "grad":
            graph = self.graphs[op.graph]
            second = any(self.layers[layer] in ("kept", "updated") for layer in graph.trained)
            # kept activations have the order of the forward
            reordered = graph.swapped and self.case.settings.get("activations") == "keep"
            used = bool(graph.used and graph.trained)
            return graph.stale or second or used or reordered
        if op.name in ("move", "swap"):
            has_states = op.name == "swap" and not self.case.stateless
            return has_states or self.layers != ["empty"] * self.case.n_layers
        if op.name == "step":
            return self.poisoned or (self.updated and self.lr_changed)
        # experts that were updated during backward are ahead of the rest
        names = ("zero_grad", "model_zero_grad", "snapshot", "save", "new_optimizer")
        return op.name in names and self.updated

    def must_refuse(self, op: Op) -> bool:
        """What would make weights NaN. What plain PyTorch refuses, the oracle shows."""
        return op.name == "step" and self.poisoned

    def is_stale(self, op: Op) -> bool:
        """Whether the weights may have changed since the graph was made."""
        return op.graph in self.graphs and self.graphs[op.graph].stale

    # -- what an operation changes ----------------------------------------------------------

    def done(self, op: Op) -> None:
        if op.name == "forward":
            trained = frozenset(range(self.case.n_layers)) - self.frozen
            self.graphs[op.graph] = Graph(trained)
        elif op.name in BACKWARDS:
            self._backward(op)
        elif op.name == "drop":
            self.graphs.pop(op.graph, None)
        elif op.name == "step":
            self.ended()
            for graph in self.graphs.values():
                graph.stale = True
        elif op.name in ("zero_grad", "model_zero_grad"):
            self.ended()
        elif op.name == "freeze":
            self.frozen.add(op.layer)
        elif op.name == "unfreeze":
            self.frozen.discard(op.layer)
        elif op.name == "swap":
            for graph in self.graphs.values():
                graph.swapped = True
        elif op.name == "set_lr":
            self.lr_changed = True

    def _backward(self, op: Op) -> None:
        graph = self.graphs.pop(op.graph)
        others = [g for g in self.graphs.values() if not g.used and not g.stale]
        trained = frozenset() if op.name == "inputs" else graph.trained - self.frozen
        for layer in trained:
            if op.name == "accumulate" or any(layer in other.trained for other in others):
                self.layers[layer] = "part"
            elif self.case.clip is not None or not self.overlap_updates:
                self.layers[layer] = "kept"
            else:
                self.layers[layer] = "updated"
        graph.used = True
        self.poisoned |= op.name == "poison"
        self.lr_changed = False
        if op.name == "retain":
            self.graphs[op.graph] = graph

    def ended(self) -> None:
        """A step has ended, or its gradients were dropped."""
        self.layers = ["empty"] * self.case.n_layers
        self.poisoned = self.lr_changed = False

    def restored(self) -> None:
        """Weights and optimizer states were loaded."""
        self.graphs.clear()
        self.ended()
