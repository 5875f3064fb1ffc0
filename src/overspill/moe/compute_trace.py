"""Spans of the compute device, timed by stream events or, on a CPU, by the clock."""

import time

import torch

from overspill.trace.recorder import Recorder
from overspill.trace.spans import COMPUTE

_Start = torch.cuda.Event | int | None


class ComputeTrace:
    """Records a span for each wave and for the dense work between expert layers (attention, norms,
    router)."""

    def __init__(self, recorder: Recorder, device: torch.device) -> None:
        self.recorder = recorder
        self.device = device
        self._wave: tuple[str, _Start] = ("", None)
        self._dense: _Start = None

    def enter_experts(self) -> None:
        self._end("dense", self._dense)
        self._dense = None

    def leave_experts(self) -> None:
        self._dense = self._now()

    def begin_wave(self, name: str) -> None:
        self._wave = (name, self._now())

    def end_wave(self) -> None:
        """End the span of the wave. A second call has no effect."""
        self._end(*self._wave)
        self._wave = ("", None)

    def _now(self) -> _Start:
        if not self.recorder.enabled:
            return None
        if self.device.type != "cuda":
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _end(self, name: str, start: _Start) -> None:
        if isinstance(start, int):
            self.recorder.host_span(COMPUTE, name, start)
        elif start is not None:
            end = self._now()
            if isinstance(end, torch.cuda.Event):
                self.recorder.device_span(COMPUTE, name, start, end)
