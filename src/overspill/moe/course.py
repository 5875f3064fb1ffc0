"""Where the step is and what comes next: the engine's memory of routing and position."""

from collections.abc import Iterator, Sequence

from overspill.core.experts import ExpertId, Phase
from overspill.moe.lookahead import Knowledge, Popularity
from overspill.plan.banks import Chunk
from overspill.plan.order import Position, upcoming


class Course:
    """Follows the passes through the layers. Read and changed under the store's lock."""

    def __init__(self, n_layers: int, n_experts: int) -> None:
        self.n_layers = n_layers
        self.n_experts = n_experts
        self.here = Position(0, Phase.FORWARD)
        self.entered = 0  # passes through layers so far
        self.training = True  # whether a backward follows the forward that goes on
        self.popularity = Popularity(n_layers, n_experts)
        self._counts: Sequence[int] = [1] * n_experts  # tokens of the current pass
        self._passed: set[int] = set()  # experts that the current pass is done with
        self.step_tokens = [[0] * n_experts for _ in range(n_layers)]

    def enter(self, layer: int, phase: Phase, counts: Sequence[int], training: bool) -> None:
        """A pass through `layer` begins."""
        self.entered += 1
        self.here, self._counts, self._passed = Position(layer, phase), counts, set()
        if phase is Phase.FORWARD:
            self.training = training
            self.popularity.observe(layer, counts)
            if training:
                sums = zip(self.step_tokens[layer], counts, strict=True)
                self.step_tokens[layer] = [a + b for a, b in sums]

    def leave(self, indices: Sequence[int]) -> None:
        """The current pass is done with these experts."""
        self._passed.update(indices)

    def end_step(self) -> None:
        self.step_tokens = [[0] * self.n_experts for _ in range(self.n_layers)]

    def next_phase(self, layer: int) -> Phase:
        """Which way the layer will be passed when it is passed next (or is being passed)."""
        if layer == self.here.layer:
            return self.here.phase
        ahead = layer > self.here.layer
        if self.here.phase is Phase.FORWARD:
            return Phase.FORWARD if ahead or not self.training else Phase.BACKWARD
        return Phase.FORWARD if ahead else Phase.BACKWARD

    def expected(self, layer: int) -> tuple[Sequence[int] | Sequence[float] | None, Knowledge]:
        """The tokens of each expert in the layer's next pass, and how well they are known."""
        if layer == self.here.layer:
            return self._counts, Knowledge.REAL
        return self.popularity.expected(layer, self.next_phase(layer))

    def busy(self, layer: int) -> list[int]:
        """The experts of a layer that will have tokens; all, if nothing is known."""
        tokens, _ = self.expected(layer)
        if tokens is None:
            return list(range(self.n_experts))
        return [index for index, count in enumerate(tokens) if count >= 0.5]

    def chunks(self, part: int, n_parts: int, ahead: bool) -> Iterator[Chunk]:
        """The chunk being computed, then (with `ahead`) all that follow."""
        yield Chunk(self.here.layer, part)
        for position in upcoming(self.here, self.n_layers, self.training) if ahead else ():
            first = part + 1 if position == self.here else 0
            for number in range(first, n_parts):
                yield Chunk(position.layer, number)

    def experts(self, with_states: bool) -> Iterator[tuple[ExpertId, bool]]:
        """(expert, whether its states are needed too) in the order of need. `with_states`: experts
        are updated as soon as their backward is done, those without tokens too."""
        for position in upcoming(self.here, self.n_layers, self.training):
            states = with_states and position.phase is Phase.BACKWARD
            busy = self.busy(position.layer)
            # those that only decay come after: the pass does not wait for them, and with few rows
            # they would keep out the ones it waits for
            idle = sorted(set(range(self.n_experts)) - set(busy)) if states else []
            for index in busy + idle:
                if position != self.here or index not in self._passed:
                    yield ExpertId(position.layer, index), states
