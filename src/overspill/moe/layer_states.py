"""The state of each layer in a training step, and the calls that it refuses."""

import enum

from overspill.core.errors import OrderError
from overspill.moe.gradients import ExpertGradients


class LayerState(enum.Enum):
    EMPTY = "no gradient"
    RUNNING = "in its backward"
    PARTIAL = "part of the gradient"
    COMPLETE = "the whole gradient, kept until step()"
    UPDATED = "updated during backward"
    STEPPING = "in step()"


AFTER_BACKWARD = (LayerState.COMPLETE, LayerState.UPDATED)
_FAILED = (LayerState.RUNNING, LayerState.STEPPING)


class LayerStates:
    """The states of all layers. `TrainingStep` changes them; the checks raise OrderError for calls
    in the wrong order."""

    def __init__(self, n_layers: int, gradients: ExpertGradients) -> None:
        self._states = [LayerState.EMPTY] * n_layers
        self._gradients = gradients
        self._ahead: set[int] = set()  # layers that an aborted step may have updated

    def __getitem__(self, layer: int) -> LayerState:
        return self._states[layer]

    def __setitem__(self, layer: int, state: LayerState) -> None:
        self._states[layer] = state

    def __contains__(self, state: LayerState) -> bool:
        return state in self._states

    def __len__(self) -> int:
        return len(self._states)

    def with_gradients(self) -> dict[int, LayerState]:
        """Return the layers that are not EMPTY, lowest first."""
        return {n: state for n, state in enumerate(self._states) if state is not LayerState.EMPTY}

    @property
    def has_gradients(self) -> bool:
        """Whether this step has gradients or updates already."""
        return any(state is not LayerState.EMPTY for state in self._states)

    def forget(self) -> None:
        """Make all layers EMPTY."""
        self._states = [LayerState.EMPTY] * len(self._states)

    # -- experts that are ahead of the rest of the model --------------------------------------

    @property
    def has_updated(self) -> bool:
        """Whether this step has updated experts, but not the rest of the model."""
        return self._gradients.has_updated or LayerState.STEPPING in self._states

    @property
    def has_begun(self) -> bool:
        """Whether this step has failed or has updated experts."""
        return self._gradients.has_updated or any(state in _FAILED for state in self._states)

    def abort(self) -> None:
        """Note that this step will not be finished, and may have updated the experts of any
        layer."""
        self._ahead.update(range(len(self._states)))

    def catch_up(self, layer: int | None = None) -> None:
        """Note that the weights of a layer were loaded, or that those of all layers are accepted as
        they are."""
        if layer is None:
            self._ahead.clear()
        else:
            self._ahead.discard(layer)

    # -- checks -------------------------------------------------------------------------------

    def _check_ahead(self) -> None:
        if self._ahead:
            raise OrderError(
                "a step that was never finished has updated experts, but not the rest of the "
                "model; load the last checkpoint, or call model.overspill.training.keep_updates() "
                "to continue with these weights"
            )

    def check_finished(self, layer: int) -> None:
        """Raise if a backward or a step has failed in this layer."""
        self._check_ahead()
        if self._states[layer] is LayerState.STEPPING:
            raise OrderError(
                "step() was interrupted or failed, when it had updated some of the experts; load "
                "the last checkpoint"
            )
        if self._states[layer] is LayerState.RUNNING:
            remedy = (
                "some experts were updated during backward already: load the last checkpoint"
                if self._gradients.has_updated
                else "call opt.zero_grad() to drop the gradients"
            )
            raise OrderError(f"a backward failed inside MoE layer {layer}; {remedy}")

    def check_all_finished(self) -> None:
        """Raise if a backward or a step has failed in any layer."""
        for layer in range(len(self._states)):
            self.check_finished(layer)

    def check_forward(self, layer: int) -> None:
        """Raise between a layer's backward and step(), where a forward would use weights of neither
        step."""
        self.check_finished(layer)
        if self._states[layer] in AFTER_BACKWARD:
            raise OrderError(
                "forward after backward without step(): call opt.step() after each backward (or, "
                "with clipping, opt.zero_grad() to drop the gradients), or wrap the backward of "
                "all micro-batches but the last in `with opt.accumulate():`"
            )

    def check_droppable(self) -> None:
        """Raise if gradients were used for updates already."""
        if self.has_updated:
            self.check_all_finished()
            raise OrderError(
                "zero_grad() after backward without step(): the experts were updated during "
                "backward already; call step() first, or set max_grad_norm (or overlap_updates="
                "False), which keeps gradients until step()"
            )

    def check_empty(self, refused: str) -> None:
        """Raise if this step has gradients or updates already."""
        self._check_ahead()
        for layer, state in enumerate(self._states):
            self.check_finished(layer)
            if state is not LayerState.EMPTY:
                raise OrderError(f"{refused} between backward and step(); call opt.step() first")

    def check_between_steps(self, what: str) -> None:
        """Raise if experts are one update ahead of the dense parameters, as between backward and
        step()."""
        self._check_ahead()
        if LayerState.STEPPING in self._states:
            self.check_finished(self._states.index(LayerState.STEPPING))
        if self._gradients.has_updated:
            raise OrderError(
                f"the model cannot be {what} between backward and step(): its experts were updated "
                "during backward, the rest was not; call opt.step() first"
            )
