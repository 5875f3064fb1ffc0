"""The position in a step, and the experts that come next."""

from collections.abc import Callable, Iterator, Sequence

from overspill.core.experts import Phase
from overspill.moe.streaming.expected_counts import CountSource, ExpectedCounts
from overspill.plan.banks import Chunk
from overspill.plan.order import Position, StageVisit, upcoming


class StepCursor:
    """Follows the passes through the layers. Used under the store's lock; experts are named by
    their local positions."""

    def __init__(self, n_local: int, residents: Sequence[int]) -> None:
        """`residents` is the number of resident experts of each layer, the first ones, which are
        not streamed."""
        self.n_layers = n_layers = len(residents)
        self.n_local = n_local
        self._residents = residents
        self.here = Position(0, Phase.FORWARD)
        self._visit: StageVisit | None = None  # if micro-batches pass the model in stages
        self.passes = 0  # passes through layers so far
        self._training = True  # whether a backward follows the current forward
        self.counts_ahead = ExpectedCounts(n_layers)
        """Token rows of each expert in the next passes."""
        self._counts: Sequence[int] = [1] * n_local  # of the current pass
        self._finished: set[int] = set()  # experts that the current pass is done with

    def enter(self, layer: int, phase: Phase, counts: Sequence[int], training: bool) -> None:
        """Begin a pass through `layer`."""
        self.passes += 1
        self.here, self._counts, self._finished = Position(layer, phase), counts, set()
        if phase is Phase.FORWARD:
            self._training = training
            self.counts_ahead.observe(layer, counts)

    def follow_stage(self, visit: StageVisit | None) -> None:
        """Set the stage and the micro-batch of the next passes."""
        self._visit = visit

    def stage_passes(self, layer: int, fits: Callable[[range], bool]) -> int:
        """Passes through a layer, from the current or next one on, for which the device keeps its
        experts: 1, or in a stage that `fits` there those of the micro-batches that follow."""
        visit = self._visit
        if visit is None or not visit.first <= layer < visit.stop:
            return 1
        if not fits(range(visit.first, visit.stop)):
            return 1
        return visit.passes(self.next_phase(layer))

    def finish(self, positions: Sequence[int]) -> None:
        """Note that the current pass is done with these experts."""
        self._finished.update(positions)

    def next_phase(self, layer: int) -> Phase:
        """The direction of the layer's next (or current) pass."""
        if layer == self.here.layer:
            return self.here.phase
        if self._visit is not None and self._visit.returns(layer, self.here):
            return self.here.phase
        ahead = layer > self.here.layer
        if self.here.phase is Phase.FORWARD:
            return Phase.FORWARD if ahead or not self._training else Phase.BACKWARD
        return Phase.FORWARD if ahead else Phase.BACKWARD

    def expected(self, layer: int) -> tuple[Sequence[int] | Sequence[float] | None, CountSource]:
        """The token rows of each expert in the layer's next pass, and their source."""
        if layer == self.here.layer:
            return self._counts, CountSource.ROUTING
        return self.counts_ahead.expected(layer, self.next_phase(layer))

    def last_counts(self) -> list[Sequence[int] | Sequence[float] | None]:
        """The token rows of each expert in the last forward through each layer; None before it."""
        layers = range(self.n_layers)
        return [self.counts_ahead.expected(layer, Phase.BACKWARD)[0] for layer in layers]

    def busy(self, layer: int, least: float = 0.5) -> list[int]:
        """The streamed experts of a layer that are expected to have tokens; all, if nothing is
        known."""
        counts, _ = self.expected(layer)
        streamed = range(self._residents[layer], self.n_local)
        if counts is None:
            return list(streamed)
        return [position for position in streamed if counts[position] >= least]

    def chunks(self, part: int, n_parts: int, ahead: bool) -> Iterator[Chunk]:
        """The chunk that is being computed, then (with `ahead`) all that follow."""
        yield Chunk(self.here.layer, part)
        for position, is_current in self._upcoming() if ahead else ():
            first = part + 1 if is_current else 0
            for number in range(first, n_parts):
                yield Chunk(position.layer, number)

    def needed(self, with_states: bool) -> Iterator[tuple[int, int, bool]]:
        """(layer, expert, whether its states are needed too) in the order of need. `with_states`:
        experts are updated as soon as their backward is done, also those without tokens."""
        for position, is_current in self._upcoming():
            states = with_states and position.phase is Phase.BACKWARD
            # a token that is generated needs other experts than the last one: reading those ahead
            # would delay what is needed now
            likely = self._training or position == self.here
            busy = self.busy(position.layer, 0.5 if likely else 1.0)
            # experts that only decay come last: the pass does not wait for them, and with few host
            # slots they would displace the ones it waits for
            streamed = range(self._residents[position.layer], self.n_local)
            idle = sorted(set(streamed) - set(busy)) if states else []
            for expert in busy + idle:
                if not is_current or expert not in self._finished:
                    yield position.layer, expert, states

    def _upcoming(self) -> Iterator[tuple[Position, bool]]:
        """The positions that follow, and whether each is the current pass. In stages another
        micro-batch may pass the same position next."""
        following = upcoming(self.here, self.n_layers, self._training, self._visit)
        for number, position in enumerate(following):
            yield position, position == self.here and (number == 0 or self._visit is None)
