"""Banks hold the chunks needed next; in training no policy needs fewer uploads."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.plan.banks import Chunk, assign_banks, bank_size

chunks = st.builds(Chunk, layer=st.integers(0, 3), part=st.integers(0, 2))


@st.composite
def held_and_needed(draw: st.DrawFn) -> tuple[list[Chunk | None], list[Chunk]]:
    number = draw(st.integers(1, 6))
    distinct = draw(st.lists(chunks, unique=True, max_size=number))
    held: list[Chunk | None] = [*distinct, *[None] * (number - len(distinct))]
    return draw(st.permutations(held)), draw(st.lists(chunks, min_size=1, max_size=15))


@given(held_and_needed())
def test_the_first_chunks_needed_are_held_each_once(
    case: tuple[list[Chunk | None], list[Chunk]],
) -> None:
    held, needed = case
    banks, order = assign_banks(held, iter(needed))
    first = list(dict.fromkeys(needed))[: len(held)]
    assert order == first
    assert set(first) <= set(banks)
    assert len(banks) == len(held)
    present = [chunk for chunk in banks if chunk is not None]
    assert len(present) == len(set(present))


@given(held_and_needed())
def test_chunks_keep_their_banks_and_only_needed_ones_are_added(
    case: tuple[list[Chunk | None], list[Chunk]],
) -> None:
    held, needed = case
    banks, order = assign_banks(held, needed)
    for before, after in zip(held, banks, strict=True):
        if before in order:
            assert after == before
        assert after == before or after in order
    # a chunk is dropped only for a needed one
    came = [chunk for chunk in order if chunk not in held]
    assert sum(a != b for a, b in zip(held, banks, strict=True)) == len(came)


def fewest_loads(sequence: list[Chunk], banks: int) -> int:
    """The minimum over all eviction choices (exponential)."""
    costs = {frozenset[Chunk](): 0}
    for wanted in sequence:
        after: dict[frozenset[Chunk], int] = {}
        for held, cost in costs.items():
            if wanted in held:
                choices = [(held, cost)]
            elif len(held) < banks:
                choices = [(held | {wanted}, cost + 1)]
            else:
                choices = [(held - {dropped} | {wanted}, cost + 1) for dropped in held]
            for choice, total in choices:
                after[choice] = min(total, after.get(choice, total))
        costs = after
    return min(costs.values())


def loads(sequence: list[Chunk], number: int) -> int:
    banks: list[Chunk | None] = [None] * number
    total = 0
    for at, wanted in enumerate(sequence):
        before = banks
        banks, order = assign_banks(banks, iter(sequence[at:]))
        assert order[0] == wanted
        total += sum(a != b for a, b in zip(before, banks, strict=True))
    return total


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("layers_held", [1, 2, 3])
def test_in_training_no_policy_needs_fewer_uploads(parts: int, layers_held: int) -> None:
    up = [Chunk(layer, part) for layer in range(4) for part in range(parts)]
    down = [Chunk(layer, part) for layer in (3, 2, 1, 0) for part in range(parts)]
    sequence, number = (up + down) * 3, parts * layers_held
    assert loads(sequence, number) == fewest_loads(sequence, number)


@given(st.lists(chunks, min_size=1, max_size=14), st.integers(1, 4))
def test_a_chunk_is_uploaded_again_only_if_others_filled_the_banks(
    sequence: list[Chunk], number: int
) -> None:
    expected = 0
    for at, chunk in enumerate(sequence):
        before = sequence[:at][::-1]
        since = set(before[: before.index(chunk)]) if chunk in before else None
        expected += since is None or len(since) >= number
    assert loads(sequence, number) == expected >= fewest_loads(sequence, number)


def test_no_more_needed_chunks_are_read_than_there_are_banks() -> None:
    asked = []

    def needed() -> Iterator[Chunk]:
        for part in range(100):
            asked.append(part)
            yield Chunk(0, part)

    assign_banks([None] * 3, needed())
    assert asked == [0, 1, 2]


@given(st.integers(1, 400), st.integers(1, 130))
def test_banks_divide_the_slots_and_the_layer(slots: int, experts: int) -> None:
    size = bank_size(slots, experts)
    assert 1 <= size <= min(experts, max(1, slots // 3))
    assert slots // size >= min(slots, 3), "some fill while one computes"
    # parts are equal: one expert less per bank would need one more part
    parts = -(-experts // size)
    assert size == 1 or -(-experts // (size - 1)) > parts
