"""Sizes of the pieces of prompts on machines that are simulated."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.plan.pieces import PieceSizes

ROOM = 10**6


def run(pieces: PieceSizes, seconds: Callable[[int], float], count: int = 40) -> list[int]:
    """The sizes of the pieces of a prompt that does not end."""
    sizes = []
    for _ in range(count):
        sizes.append(pieces.size(ROOM))
        pieces.record(sizes[-1], seconds(sizes[-1]))
    return sizes


@pytest.mark.parametrize(
    ("fixed", "token", "expected"),
    [
        (0.2, 2e-5, 8192),  # uploads take 10,000 times as long as a token; 32,768 tokens 0.86 s
        (2.0, 2e-5, 32768),  # as many uploads by a slower link
        (0.24, 3e-5, 8192),  # Qwen3-30B-A3B, 24 GiB
        (1.0, 1e-9, 512 * 4**9),  # all memory
        (0.0, 0.01, 512),  # a CPU
        (0.01, 2e-5, 2048),
    ],
)
def test_pieces_grow_while_uploads_take_most_of_the_time(
    fixed: float, token: float, expected: int
) -> None:
    sizes = run(PieceSizes(512), lambda tokens: fixed + token * tokens)
    assert max(set(sizes), key=sizes.count) == min(expected, max(sizes))
    assert sizes[0] == 512


@given(fixed=st.floats(0, 10), token=st.floats(1e-7, 0.1))
def test_the_pieces_of_a_long_prompt_are_nearly_as_fast_as_any(fixed: float, token: float) -> None:
    def seconds(tokens: int) -> float:
        return fixed + token * tokens

    sizes = run(PieceSizes(512), seconds)[8:]
    speed = sum(sizes) / sum(map(seconds, sizes))
    longest = max(0.5, 2 * seconds(512))
    every = [512 * 4**n for n in range(4)]
    best = max(size / seconds(size) for size in every if seconds(size) <= longest)
    assert speed > 0.6 * best


@given(fixed=st.floats(0, 10), token=st.floats(1e-7, 0.1))
def test_prompts_that_arrive_do_not_wait_long(fixed: float, token: float) -> None:
    """Beside pieces of one size, which is what they wait for but for a few."""

    def seconds(tokens: int) -> float:
        return fixed + token * tokens

    sizes = run(PieceSizes(512), seconds)
    slow = [size for size in sizes if seconds(size) > 1.001 * max(0.5, 2 * seconds(512))]
    assert len(slow) <= 3  # found out by trying; tried again later


@given(
    batches=st.lists(st.tuples(st.integers(1, 50_000), st.floats(0, 100)), max_size=30),
    room=st.integers(0, 10**6),
    most=st.none() | st.integers(512, 10**6),
)
def test_a_piece_is_within_its_limits(
    batches: list[tuple[int, float]], room: int, most: int | None
) -> None:
    pieces = PieceSizes(512, most)
    for tokens, seconds in batches:
        pieces.record(tokens, seconds)
    assert 512 <= pieces.size(room) <= max(512, min(room, most or room))


def test_one_slow_batch_is_forgotten() -> None:
    pieces = PieceSizes(512)
    times = iter([9.0, 0.2, 0.2, 5.0])  # the first piece, 512, 2,048 and 8,192 tokens
    sizes = run(pieces, lambda _: next(times, 0.2))
    assert sizes[3] == 8192
    assert 8192 not in sizes[4:15]
    assert max(sizes) > 8192


def test_pieces_that_do_not_fit_become_smaller() -> None:
    pieces = PieceSizes(512)
    run(pieces, lambda tokens: 0.2)
    sizes = []
    while pieces.shrink(pieces.size(ROOM)):
        sizes.append(pieces.size(ROOM))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 512


def test_a_fixed_size_stays() -> None:
    assert set(run(PieceSizes(7, 7), lambda tokens: 1.0)) == {7}


def test_pieces_become_larger_again_after_some_batches() -> None:
    """A lack of memory may pass."""
    pieces = PieceSizes(512)
    run(pieces, lambda tokens: 0.2)
    largest = pieces.size(ROOM)
    assert pieces.shrink(largest)
    assert pieces.shrink(512, 16)
    assert pieces.size(ROOM) == 256
    assert run(pieces, lambda tokens: 0.2, 18)[-1] >= largest
