import pytest

from scheduler.pace import RECENT, Pace


def test_nothing_is_known_before_the_first_slot_became_free():
    assert Pace(4).seconds_until(3) == 0


def test_slots_held_for_ten_seconds_become_free_as_often_as_there_are_slots():
    pace = Pace(4)
    for _ in range(3):
        pace.on_release(10.0)
    assert pace.seconds_until(1) == pytest.approx(2.5)
    assert pace.seconds_until(6) == pytest.approx(15)


def test_the_first_choices_count_alike():
    pace = Pace(1)
    for held_s in (1.0, 2.0, 6.0):
        pace.on_release(held_s)
    assert pace.seconds_until(1) == pytest.approx(3)


def test_what_was_long_ago_is_forgotten():
    pace = Pace(1)
    for held_s in [1000.0] * 20 + [1.0] * 12 * RECENT:
        pace.on_release(held_s)
    assert pace.seconds_until(1) == pytest.approx(1, abs=0.1)
