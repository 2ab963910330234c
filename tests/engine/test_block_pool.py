"""The free list of blocks, and who holds them."""

import pytest

from voxlite.engine.block_pool import BlockPool


def test_blocks_are_taken_one_by_one_until_none_is_free() -> None:
    pool = BlockPool(3)
    assert {pool.allocate() for _ in range(3)} == {0, 1, 2}
    assert pool.allocate() is None
    assert (pool.num_free_blocks, pool.num_held_blocks) == (0, 3)
    pool.check_integrity()


def test_a_freed_block_is_the_next_to_be_taken() -> None:
    pool = BlockPool(5)
    blocks = [pool.allocate() for _ in range(4)]
    assert blocks[1] is not None and blocks[2] is not None
    pool.free(blocks[1])
    pool.free(blocks[2])
    assert [pool.allocate(), pool.allocate()] == [blocks[2], blocks[1]]


def test_a_shared_block_is_free_when_its_last_holder_gives_it_back() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    assert block is not None
    pool.share(block)
    pool.share(block)
    assert (pool.ref_count(block), pool.num_held_blocks) == (3, 1)
    assert [pool.free(block) for _ in range(3)] == [False, False, True]
    assert (pool.ref_count(block), pool.num_free_blocks) == (0, 1)
    pool.check_integrity()


@pytest.mark.parametrize("change", ["free", "share"])
def test_a_block_that_nobody_holds_cannot_be_given_back_or_shared(change: str) -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    assert block is not None
    pool.free(block)
    with pytest.raises(AssertionError):
        getattr(pool, change)(block)


@pytest.mark.parametrize("fault", ["listed twice", "lost", "held and free"])
def test_a_wrong_free_list_is_found(fault: str) -> None:
    pool = BlockPool(3)
    held = pool.allocate()
    if fault == "listed twice":
        pool._free.append(pool._free[0])
    elif fault == "lost":
        pool._free.pop()
    else:
        assert held is not None
        pool._free.append(held)
    with pytest.raises(AssertionError):
        pool.check_integrity()


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks=0"):
        BlockPool(0)
