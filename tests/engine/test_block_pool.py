"""Reservations and allocations of blocks."""

import pytest

from voxlite.engine.block_pool import BlockPool
from voxlite.engine.errors import Overloaded


def test_reservations_take_the_lowest_run_that_fits() -> None:
    pool = BlockPool(10)
    first, second = pool.reserve(3), pool.reserve(3)
    pool.cancel(first)
    assert (first, second) == (range(3), range(3, 6))
    assert pool.reserve(4) == range(6, 10)
    assert pool.reserve(2) == range(2)


def test_a_reservation_that_does_not_fit_is_refused_and_takes_nothing() -> None:
    pool = BlockPool(5)
    pool.reserve(3)
    with pytest.raises(Overloaded, match=r"3 KV-cache blocks in a row are needed, 2 of 5 are free"):
        pool.reserve(3)
    assert pool.num_free_blocks == 2


def test_every_block_is_in_one_state() -> None:
    pool = BlockPool(8)
    reservation = pool.reserve(4)
    pool.allocate(reservation[:3])
    assert (pool.num_free_blocks, pool.num_reserved_blocks, pool.num_held_blocks) == (4, 1, 3)
    pool.free(reservation[:2])
    assert (pool.num_free_blocks, pool.num_reserved_blocks, pool.num_held_blocks) == (4, 3, 1)
    assert [pool.is_held(block) for block in range(4)] == [False, False, True, False]


@pytest.mark.parametrize("change", ["allocate twice", "free what is not held", "cancel held"])
def test_illegal_moves_are_caught(change: str) -> None:
    pool = BlockPool(4)
    blocks = pool.reserve(2)
    with pytest.raises(AssertionError):
        if change == "allocate twice":
            pool.allocate(blocks)
            pool.allocate(blocks)
        elif change == "free what is not held":
            pool.free(blocks)
        else:
            pool.allocate(blocks)
            pool.cancel(blocks)


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks=0"):
        BlockPool(0)
