import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ParamError
from engine.stop import StopChecker


def run(pieces, stops, **kwargs):
    """The released pieces, flush included, and the stop string that matched."""
    checker = StopChecker(stops, **kwargs)
    released = [checker.push(piece) for piece in pieces]
    return [*released, checker.flush()], checker.matched


def test_a_stop_string_spanning_three_pieces_is_cut_and_none_of_it_leaks():
    released, matched = run([" four", " five", " six", " one"], ["our five si"])
    assert released == [" f", "", "", "", ""]
    assert matched == "our five si"


def test_what_looked_like_a_stop_string_is_released_when_it_turns_out_not_to_be():
    assert run(["a<", "|im", "_x"], ["<|im_end|>"]) == (["a", "", "<|im_x", ""], None)


def test_what_is_held_at_the_end_is_released_by_flush():
    assert run(["ab", "c"], ["bcd"]) == (["a", "", "bc"], None)


def test_a_flushed_checker_holds_nothing():
    checker = StopChecker(["bcd"])
    checker.push("bc")
    assert checker.flush() == "bc"
    assert checker.flush() == ""


def test_text_after_the_stop_string_is_dropped_in_the_same_piece_and_in_later_ones():
    assert run(["one STOP two", "three"], ["STOP"]) == (["one ", "", ""], "STOP")


def test_the_stop_string_can_be_kept_in_the_output():
    assert run(["one ST", "OP two"], ["STOP"], include_stop=True) == (["one ", "STOP", ""], "STOP")


def test_the_stop_string_that_completes_first_wins_though_it_began_later():
    assert run(["xabcd"], ["abcd", "bc"]) == (["xa", ""], "bc")
    assert run(["xabcd"], ["abcd", "bc"], include_stop=True) == (["xabc", ""], "bc")


def test_of_two_that_complete_together_the_longest_wins_in_any_order():
    for stops in itertools.permutations(["c", "bc", "abc"]):
        assert run(["xabc"], stops) == (["x", ""], "abc")


def test_an_overlapping_false_start_does_not_hide_a_stop_string():
    assert run(["aab", "aabaac"], ["aabaac"])[1] == "aabaac"
    assert run(list("ababac"), ["abac"]) == (["", "", "", "ab", "", "", ""], "abac")


def test_without_stop_strings_everything_passes():
    assert run(["a", "", "b"], []) == (["a", "", "b", ""], None)


def test_an_empty_stop_string_is_refused_by_name():
    with pytest.raises(ParamError, match="empty") as refusal:
        StopChecker(["x", ""])
    assert refusal.value.param == "stop"


def test_stop_strings_and_text_may_hold_any_character():
    assert run(["a\U0001f600", "\ufffdb"], ["\U0001f600\ufffd"]) == (["a", "", ""], "\U0001f600\ufffd")


# The definition: look for stop strings in the whole text.

few_letters = st.text(alphabet="ab\U0001f600", max_size=24)
some_stops = st.lists(st.text(alphabet="ab\U0001f600", min_size=1, max_size=6), max_size=5)


def first_stop(text, stops):
    """(end, stop) of the stop string that completes first, the longest of those ending there; None without one."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    return (min(ends)[0], min(ends)[2]) if ends else None


def split(text, cuts):
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


@pytest.mark.slow
@given(few_letters, some_stops, st.lists(st.integers(0, 30), max_size=8), st.booleans(), st.randoms())
@settings(max_examples=500, deadline=None)
def test_any_split_and_any_order_equals_a_search_of_the_whole_text(text, stops, cuts, include_stop, rng):
    shuffled = rng.sample(stops, len(stops))
    released, matched = run(split(text, cuts), shuffled, include_stop=include_stop)
    found = first_stop(text, stops)
    if found is None:
        assert ("".join(released), matched) == (text, None)
    else:
        end, stop = found
        assert ("".join(released), matched) == (text[: end if include_stop else end - len(stop)], stop)


@pytest.mark.slow
@given(few_letters, some_stops, st.lists(st.integers(0, 30), max_size=8))
@settings(max_examples=500, deadline=None)
def test_exactly_the_longest_tail_that_could_become_a_stop_is_held(text, stops, cuts):
    checker, released, seen = StopChecker(stops), "", ""
    for piece in split(text, cuts):
        seen += piece
        released += checker.push(piece)
        if checker.matched is not None:
            break
        tails = [seen[start:] for start in range(len(seen))]
        held = next((tail for tail in tails if any(stop.startswith(tail) for stop in stops)), "")
        assert released == seen.removesuffix(held)
