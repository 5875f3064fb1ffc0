"""The pool of blocks: what is shared, and what is reused first."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overspill.models.huggingface.recurrent import States
from overspill.serve.blocks import BlockPool
from overspill.serve.checkpoints import Checkpoints

SIZE = 2


def taken(pool: BlockPool) -> int:
    block = pool.take()
    assert block is not None
    return block


def filled(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Blocks of a request that computed all full blocks of `tokens` itself."""
    blocks: list[int] = []
    for start in range(0, len(tokens) - SIZE + 1, SIZE):
        before = blocks[-1] if blocks else None
        blocks.append(taken(pool))
        pool.fill(blocks[-1], before, tokens[start : start + SIZE])
    return blocks


def test_a_pool_gives_each_block_once_and_then_none() -> None:
    pool = BlockPool(3, SIZE)
    assert {taken(pool) for _ in range(3)} == {0, 1, 2}
    assert pool.take() is None
    assert pool.n_free == 0
    pool.check_conserved()


def test_the_beginning_is_shared_while_it_is_used_and_after() -> None:
    pool = BlockPool(8, SIZE)
    blocks = filled(pool, [1, 2, 3, 4])
    assert pool.share([1, 2, 3, 4, 5]) == blocks
    pool.release(blocks)
    pool.release(blocks)
    assert pool.n_free == 8
    assert pool.share([1, 2, 9, 9, 9]) == blocks[:1]
    pool.check_conserved()


def test_one_token_is_always_left_to_compute() -> None:
    pool = BlockPool(8, SIZE)
    blocks = filled(pool, [1, 2, 3, 4])
    assert pool.share([1, 2, 3, 4]) == blocks[:1]
    assert pool.share([1, 2]) == []
    assert pool.share([1]) == []


def test_the_same_tokens_after_others_are_not_shared() -> None:
    pool = BlockPool(8, SIZE)
    filled(pool, [1, 2, 3, 4])
    assert pool.share([3, 4, 5]) == []
    assert pool.share([9, 9, 3, 4, 5]) == []


def test_a_block_that_was_reused_is_not_found() -> None:
    pool = BlockPool(2, SIZE)
    first = filled(pool, [1, 2, 3, 4])
    pool.release(first)
    assert taken(pool) == first[1], "the end of a sequence is reused first"
    assert pool.share([1, 2, 3, 4, 5]) == first[:1]


def test_what_follows_a_reused_block_is_not_found_through_its_new_content() -> None:
    pool = BlockPool(3, SIZE)
    parent, child = filled(pool, [1, 2, 3, 4])
    pool.release([parent])  # as if only the end were still used
    other = [taken(pool), taken(pool)]
    assert parent in other
    pool.fill(parent, None, [7, 8])
    assert pool.share([7, 8, 3, 4, 5]) == [parent]
    assert child not in pool.share([1, 2, 3, 4, 5])


def test_what_follows_a_block_that_was_never_full_is_not_found() -> None:
    """Neither as a beginning, nor after what the block or another one held before."""
    pool = BlockPool(3, SIZE)
    first, equal = filled(pool, [1, 2]), filled(pool, [1, 2])
    pool.release(equal)
    assert {taken(pool), taken(pool)} == {2, *equal}
    pool.fill(2, equal[0], [3, 4])
    pool.release([*equal, 2])
    assert pool.share([1, 2, 3, 4, 5]) == first
    pool = BlockPool(2, SIZE)
    new, following = taken(pool), taken(pool)
    pool.fill(following, new, [3, 4])
    assert pool.share([3, 4, 5]) == []


def test_of_two_equal_blocks_one_is_found_and_both_have_successors() -> None:
    pool = BlockPool(8, SIZE)
    first, second = filled(pool, [1, 2]), filled(pool, [1, 2])
    last = taken(pool)
    pool.fill(last, second[0], [3, 4])
    assert pool.share([1, 2, 3, 4, 5]) == [first[0], last]


def test_without_sharing_nothing_is_found() -> None:
    pool = BlockPool(4, SIZE, share=False)
    filled(pool, [1, 2, 3, 4])
    assert pool.share([1, 2, 3, 4, 5]) == []


def states() -> States:
    """Of 8 bytes."""
    return {(torch.nn.Identity(), ("conv", 0)): torch.zeros(2)}


def test_with_checkpoints_a_beginning_is_shared_up_to_the_last_one() -> None:
    checkpoints = Checkpoints(100)
    pool = BlockPool(4, SIZE, checkpoints=checkpoints)
    blocks = filled(pool, [1, 2, 3, 4, 5, 6])
    assert pool.share([1, 2, 3, 4, 5, 6, 7]) == []
    kept = states()
    pool.keep(blocks[1], kept)
    assert pool.share([1, 2, 3, 4, 5, 6, 7]) == blocks[:2]
    assert pool.states(blocks[1]) is kept
    assert pool.find([1, 2, 3, 4, 5, 6, 7]) == blocks
    pool.release(blocks[:2])
    pool.release(blocks)
    pool.check_conserved()
    assert [taken(pool) for _ in range(3)] == [3, blocks[2], blocks[1]]
    assert len(checkpoints) == checkpoints.nbytes == 0, "it leaves with its block"
    pool = BlockPool(4, SIZE, checkpoints=checkpoints)
    first, second = filled(pool, [1, 2]), filled(pool, [1, 2])
    pool.keep(second[0], kept)  # of the same content
    assert pool.share([1, 2, 3]) == first
    pool.forget()
    assert not checkpoints


def test_checkpoints_unused_for_longest_leave_first() -> None:
    checkpoints = Checkpoints(20)
    for number in (1, 2):
        checkpoints.put(number, states())
    checkpoints.use(1)
    checkpoints.put(3, states())
    assert [number in checkpoints for number in (1, 2, 3)] == [True, False, True]
    assert checkpoints.nbytes == 16
    checkpoints.put(3, states())
    Checkpoints(7).put(1, states())
    assert checkpoints.nbytes == 16


def test_a_block_cannot_be_released_twice() -> None:
    pool = BlockPool(2, SIZE)
    block = taken(pool)
    pool.release([block])
    with pytest.raises(AssertionError):
        pool.release([block])


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 1), min_size=1, max_size=9))),
)
def test_shared_blocks_hold_the_same_tokens_after_the_same_tokens(
    n_blocks: int, calls: list[tuple[bool, list[int]]]
) -> None:
    """Whatever was taken, filled and released in between."""
    pool = BlockPool(n_blocks, SIZE)
    content: dict[int, tuple[int, ...]] = {}  # all tokens up to the end of each block
    users: list[list[int]] = []
    for release_one, tokens in calls:
        if release_one and users:
            pool.release(users.pop(0))
        blocks = pool.share(tokens)
        for number, block in enumerate(blocks):
            assert content[block] == tuple(tokens[: (number + 1) * SIZE])
        for start in range(len(blocks) * SIZE, len(tokens) - SIZE + 1, SIZE):
            block = pool.take()
            if block is None:
                break
            assert not any(block in others for others in users)
            content[block] = tuple(tokens[: start + SIZE])
            pool.fill(block, blocks[-1] if blocks else None, tokens[start : start + SIZE])
            blocks.append(block)
        users.append(blocks)
        pool.check_conserved()
    for blocks in users:
        pool.release(blocks)
    assert pool.n_free == n_blocks
    pool.check_conserved()
