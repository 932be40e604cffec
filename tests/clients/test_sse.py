from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clients.sse import EventParser


def parse(*pieces: bytes) -> list[str]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)]


def test_an_event_is_its_data_without_the_one_leading_space():
    assert parse(b"data: one\n\ndata:two\n\ndata:  three\n\n") == ["one", "two", " three"]


def test_several_data_lines_are_joined_by_newlines():
    assert parse(b"data: YHOO\ndata: +2\ndata: 10\n\n") == ["YHOO\n+2\n10"]


def test_a_field_without_a_colon_has_an_empty_value():
    assert parse(b"data\n\ndata\ndata\n\n") == ["", "\n"]


def test_comments_and_other_fields_are_no_events():
    assert parse(b": ping\n\nevent: x\nid: 1\nretry: 5\n\ndata: y\n: within\n\n") == ["y"]


def test_blank_lines_alone_are_no_events():
    assert parse(b"\n\n\n\ndata: x\n\n\n") == ["x"]


def test_an_unfinished_event_is_withheld():
    assert parse(b"data: whole\n\ndata: half\n") == ["whole"]


def test_every_line_end_counts_also_mixed():
    assert parse(b"data: a\r\n\r\ndata: b\r\rdata: c\n\r\n") == ["a", "b", "c"]


def test_a_line_end_cut_in_two_is_one_line_end():
    assert parse(b"data: a\r", b"\ndata: b\r", b"\n\r", b"\n") == ["a\nb"]


def test_a_byte_order_mark_at_the_start_is_dropped():
    assert parse(b"\xef\xbb", b"\xbfdata: x\n\n") == ["x"]


def test_a_character_cut_in_two_stays_whole():
    assert parse(b"data: \xc3", b"\xa9\n", b"\n") == ["é"]


@pytest.mark.slow
@given(
    lines=st.lists(st.sampled_from(["data: x", "data:é", "data", ": ping", "id: 3", "datax: 1", "", ""])),
    ends=st.lists(st.sampled_from(["\n", "\r", "\r\n"]), min_size=40, max_size=40),
    cuts=st.lists(st.integers(0, 200)),
)
@settings(max_examples=200, deadline=None)
def test_how_the_bytes_were_cut_makes_no_difference(lines, ends, cuts):
    body = "".join(line + end for line, end in zip(lines, ends, strict=False)).encode()
    bounds = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    assert parse(*[body[a:b] for a, b in pairwise(bounds)]) == parse(body)
