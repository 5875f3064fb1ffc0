# Triton is optional and untyped, and its compiler rejects annotations on kernels.
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,call-arg,arg-type"
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""Kernels that let a stream take a given time: one thread waits for the GPU's clock."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

_TICK = tl.constexpr(64)  # nanoseconds


class Clock:
    """The kernels are compiled here and launched without Triton's look-up, which takes longer than
    a small transfer."""

    def __init__(self, device: torch.device) -> None:
        self._time = torch.zeros(1, dtype=torch.int64, device=device)
        with torch.cuda.device(device):
            self._begin = _begin.warmup(self._time, grid=(1,), num_warps=1)[1, 1, 1]
            self._hold = _hold.warmup(self._time, 2, grid=(1,), num_warps=1)[1, 1, 1]

    def begin(self, stream: torch.cuda.Stream) -> None:
        """Notes the time at which the stream gets here."""
        self._begin(self._time, stream=stream.cuda_stream)

    def hold(self, stream: torch.cuda.Stream, nanoseconds: int) -> None:
        """The stream goes on when this time has passed since `begin`, at once if it has. In ticks
        the time fits in 32 bits."""
        self._hold(self._time, -(-nanoseconds // _TICK.value), stream=stream.cuda_stream)


@triton.jit
def _begin(clock_ptr):
    tl.store(clock_ptr, globaltimer())


@triton.jit(do_not_specialize=["ticks"])
def _hold(clock_ptr, ticks):
    end = tl.load(clock_ptr) + ticks.to(tl.int64) * _TICK
    now = globaltimer()
    while now < end:
        now = globaltimer()
