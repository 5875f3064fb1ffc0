"""Learning from prompts and decoding steps which experts later layers will need."""

from typing import Any

from overspill.models.predictor import new_observer, save_predictor
from overspill.serve.decode.step import Computed


class StepObserver:
    """Observer of prompts and decoding steps. Its predictor is saved at the end."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._popularity = model.overspill.popularity
        self._owned = self._popularity.observer is None  # a model that is trained may have one
        self._observer = self._popularity.observer or new_observer(model, distances=(1,))
        self.predictor = self._observer.predictor
        self._n_learned = self.predictor.learned_tokens
        self._popularity.observer = self._observer  # of prompts

    def observe(self, first: int, computed: Computed) -> None:
        """Learn from a step, whose experts are in the layers from `first` on."""
        self._observer.observe_step(first, computed.inputs_LBD, computed.ids_LBK)

    def idle(self) -> None:
        """Use the time in which no step follows."""
        self._observer.idle()

    def stats(self) -> dict[str, float]:
        return {f"predictor_{name}": value for name, value in self._observer.stats().items()}

    def close(self) -> None:
        """Save the predictor if it has learned; an observer of training is left to training."""
        if not self._owned:
            return
        self._popularity.observer = None
        if self.predictor.learned_tokens != self._n_learned:
            save_predictor(self._model, self.predictor)
