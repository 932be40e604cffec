import pytest

from scheduler.slots import SlotPool


def test_the_lowest_free_slot_is_handed_out_first():
    pool = SlotPool(3)
    assert [pool.acquire() for _ in range(3)] == [0, 1, 2]
    pool.release(1)
    pool.release(0)
    assert pool.acquire() == 0
    assert pool.num_free == 1


def test_a_slot_is_given_back_only_once():
    pool = SlotPool(2)
    slot = pool.acquire()
    pool.release(slot)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(slot)


def test_an_empty_pool_hands_out_nothing():
    pool = SlotPool(1)
    pool.acquire()
    with pytest.raises(AssertionError, match="without a free slot"):
        pool.acquire()
