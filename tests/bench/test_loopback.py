"""Copies through host memory, with functions that note the calls of the driver."""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from bench import loopback
from bench.loopback import HostLink, Link, native_copy
from overspill.transfer.driver import new_event

OUT, IN, HANDOVER, READY, FREE, BEGIN, HOLD, CLOCK = range(11, 19)
COPY = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
)
RECORD = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
WAIT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    *[ctypes.c_uint] * 7,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.POINTER(ctypes.c_uint64)),
    ctypes.c_void_p,
)


def queued(
    size: int, largest: int, has_rate: bool = False, failing: int = -1
) -> tuple[int, list[tuple[object, ...]]]:
    """The result, and the calls; one of them fails."""
    calls: list[tuple[object, ...]] = []

    def note(*call: object) -> int:
        calls.append(call)
        return 9 if len(calls) - 1 == failing else 0

    def launch(kernel: int, *rest: object) -> int:
        *sizes, stream, arguments, extra = rest
        assert sizes == [1, 1, 1, 1, 1, 1, 0]
        assert extra is None
        count = 1 if kernel == BEGIN else 2
        values = [arguments[number][0] for number in range(count)]  # type: ignore[index]
        return note("launch", kernel, stream, *values)

    functions = (
        COPY(lambda *args: note("copy", *args)),
        RECORD(lambda *args: note("record", *args)),
        WAIT(lambda *args: note("wait", *args[:2])),
        LAUNCH(launch),
    )
    kernels = (BEGIN, HOLD) if has_rate else (None, None)
    addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
    link = Link(*addresses, *kernels, CLOCK, OUT, IN, HANDOVER, largest, 2)
    code = native_copy()(ctypes.byref(link), 1000, 2000, 3000, size, 500, READY, FREE)
    return code, calls


def pieces(*lengths: int) -> list[tuple[object, ...]]:
    calls: list[tuple[object, ...]] = []
    first = 0
    for length in lengths:
        calls += [
            ("copy", 2000 + first, 3000 + first, length, OUT),
            ("record", HANDOVER, OUT),
            ("wait", IN, HANDOVER),
            ("copy", 1000 + first, 2000 + first, length, IN),
        ]
        first += length
    return calls


def test_a_piece_arrives_after_it_has_left() -> None:
    before, after = [("wait", OUT, READY), ("wait", OUT, FREE)], [("record", FREE, IN)]
    assert queued(10, 8) == (0, [*before, *pieces(5, 2, 2, 1), *after])
    assert queued(20, 5) == (0, [*before, *pieces(5, 5, 5, 2, 2, 1), *after])


def test_with_a_rate_the_link_takes_its_time() -> None:
    code, calls = queued(4, 4, has_rate=True)
    assert code == 0
    assert calls[0] == ("launch", BEGIN, IN, CLOCK)
    assert calls[-1] == ("launch", HOLD, IN, CLOCK, 500)
    assert calls[1:-1] == queued(4, 4)[1]


@pytest.mark.parametrize("failing", range(8))
def test_nothing_is_queued_after_a_failure(failing: int) -> None:
    code, calls = queued(6, 4, has_rate=True, failing=failing)
    assert code == 9
    assert len(calls) == failing + 1


def test_kernels_of_the_clock_can_be_compiled_for_gpus_of_capability_7(tmp_path: Path) -> None:
    knobs = pytest.importorskip("triton.knobs")
    source = Path(loopback.__file__).with_name("clock.ptx")
    command = [knobs.nvidia.ptxas.path, "-arch=sm_75", str(source), "-o", str(tmp_path / "clock")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("has_rate", [False, True])
@pytest.mark.parametrize("size", [1, 1000, 9 << 20])
def test_bytes_come_through(size: int, has_rate: bool) -> None:
    device = torch.device("cuda", 0)
    stream = torch.cuda.Stream(device)
    link = HostLink(stream, has_rate)
    ready, free = (new_event(device, blocking=True) for _ in range(2))
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target, host = torch.zeros_like(source), torch.empty(size, dtype=torch.uint8, pin_memory=True)
    ready.record(torch.cuda.current_stream(device))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    ready.wait(stream)
    begin.record(stream)
    link.copy(target, host, source, 5_000_000, ready, free)
    end.record(stream)
    torch.cuda.synchronize()
    assert torch.equal(target, source)
    assert torch.equal(host, source.cpu())
    assert free.query()
    assert not has_rate or 5 <= begin.elapsed_time(end) < 50
