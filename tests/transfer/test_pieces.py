"""Copies through host memory in pieces, with functions that note the calls of the driver."""

import ctypes

import pytest
import torch

from overspill.transfer.driver import new_event
from overspill.transfer.pieces import Duplex, copy_through, native_copy

OUT, IN, EVENT = 11, 12, 13


def queued(size: int, piece: int, failing: int = -1) -> tuple[int, list[tuple[object, ...]]]:
    """The result, and the calls; one of them fails."""
    calls: list[tuple[object, ...]] = []

    def note(*call: object) -> int:
        calls.append(call)
        return 9 if len(calls) - 1 == failing else 0

    pointer, address = ctypes.c_void_p, ctypes.c_uint64
    kinds = (
        ctypes.CFUNCTYPE(ctypes.c_int, address, address, ctypes.c_size_t, pointer),
        ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer),
        ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, ctypes.c_uint),
    )
    names = "copy", "record", "wait"
    functions = [
        kind(lambda *args, name=name: note(name, *args))
        for kind, name in zip(kinds, names, strict=True)
    ]
    table = (pointer * 3)(*(ctypes.cast(function, pointer).value for function in functions))
    code = native_copy()(ctypes.addressof(table), 1000, 2000, 3000, size, piece, OUT, IN, EVENT)
    return code, calls


def test_a_piece_arrives_after_it_has_left() -> None:
    code, calls = queued(10, 4)
    assert code == 0
    assert calls == [
        call
        for first, length in ((0, 4), (4, 4), (8, 2))
        for call in (
            ("copy", 2000 + first, 3000 + first, length, OUT),
            ("record", EVENT, OUT),
            ("wait", IN, EVENT, 0),
            ("copy", 1000 + first, 2000 + first, length, IN),
        )
    ]
    assert queued(0, 4) == (0, [])


def test_nothing_is_queued_after_a_failure() -> None:
    code, calls = queued(10, 4, failing=5)
    assert code == 9
    assert len(calls) == 6


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 1000, 5 << 20])
def test_bytes_come_through(size: int) -> None:
    device = torch.device("cuda")
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    duplex = Duplex(*streams, new_event(device, blocking=False))
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target, host = torch.zeros_like(source), torch.empty(size, dtype=torch.uint8, pin_memory=True)
    torch.cuda.synchronize()
    copy_through(duplex, host, target, source, 1 << 20)
    torch.cuda.synchronize()
    assert torch.equal(target, source)
    assert torch.equal(host, source.cpu())
