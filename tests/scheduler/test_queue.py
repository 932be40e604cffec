import pytest

from engine.errors import ParamError
from scheduler.output import TokensOnly
from scheduler.queue import WaitingQueue
from scheduler.sequence import Sequence
from tests.scheduler.driver import request


def queue_of(*requests, max_requests=9, max_tokens=99):
    queue = WaitingQueue(max_requests=max_requests, max_tokens=max_tokens)
    for asked in requests:
        queue.push(Sequence(asked, index, 1, 0.0, TokensOnly) for index in range(asked.n))
    return queue


def order(queue):
    popped = [queue.pop() for _ in range(len(queue))]
    return [(sequence.request.id, sequence.index) for sequence in popped]


def test_lower_priorities_come_first_and_equal_ones_in_order_of_arrival():
    queue = queue_of(
        request("a", priority=1), request("b"), request("c", priority=-5), request("d"), request("e", priority=1)
    )
    assert [request_id for request_id, _ in order(queue)] == ["c", "b", "d", "a", "e"]


def test_the_choices_of_a_request_stay_together():
    queue = queue_of(request("a", n=2), request("b", n=2), request("c", n=2, priority=-1))
    assert order(queue) == [("c", 0), ("c", 1), ("a", 0), ("a", 1), ("b", 0), ("b", 1)]


def test_a_place_counts_requests_not_choices():
    queue = queue_of(request("a", n=3), request("b"), request("c", priority=-1))
    assert [queue.place(request_id) for request_id in "cabx"] == [1, 2, 3, None]
    queue.pop()
    queue.pop()
    assert [queue.place(request_id) for request_id in "ab"] == [None, 1]  # two choices of "a" wait, the request runs


def test_a_request_waits_only_while_there_is_room_for_it_and_for_its_prompt():
    queue = queue_of(request("a", prompt=b"12345", n=2), max_requests=2, max_tokens=9)
    assert queue.refusal(4) is None
    assert "5 prompt tokens are waiting, with 5 more the limit 9 is passed" in queue.refusal(5).message
    queue.push([Sequence(request("b"), 0, 1, 0.0, TokensOnly)])
    assert "2 requests are waiting, the limit is 2" in queue.refusal(1).message


@pytest.mark.parametrize(
    ("limits", "choices", "refusal"),
    [
        ({"max_requests": 2}, [1, 1, 1, 1], None),
        ({"max_requests": 1}, [1, 1, 1, 1], "prompt needs 2 places in the queue beside 2 slots, the queue has 1 place"),
        ({"max_requests": 0}, [1, 1, 1], "prompt needs 1 place in the queue beside 2 slots, the queue has 0 places"),
        ({"max_requests": 0}, [5], None),  # one request waits for nothing if there is a slot for one of its choices
        ({"max_requests": 0}, [1, 5], None),
        ({"max_requests": 1}, [2, 2, 2], "prompt needs 2 places in the queue beside 2 slots, the queue has 1 place"),
        ({"max_tokens": 10}, [2, 1, 1], None),
        (
            {"max_tokens": 9},
            [2, 1, 1],
            "prompt needs room for 10 tokens in the queue beside 2 slots, the queue has",
        ),
    ],
)
def test_what_could_never_be_taken_in_at_once_is_a_mistake_of_who_asks(limits, choices, refusal):
    queue = queue_of(request("someone else"), **limits)
    together = [request(f"r{i}", prompt=b"12345", n=n) for i, n in enumerate(choices)]
    if refusal is None:
        queue.check_together(together, n_slots=2)
        return
    with pytest.raises(ParamError, match=refusal) as caught:
        queue.check_together(together, n_slots=2)
    assert caught.value.param == "prompt"


def test_one_that_waits_is_told_of_as_one():
    queue = queue_of(request("a", prompt=b"1"), max_requests=1, max_tokens=9)
    assert queue.refusal(1).message.startswith("1 request is waiting")
    assert queue_of(request("a", prompt=b"1"), max_tokens=1).refusal(1).message.startswith("1 prompt token is waiting")


@pytest.mark.parametrize(
    ("limits", "num_prompt", "expected"),
    [
        ({"max_requests": 2}, 1, 1),  # a request waits no longer when its first choice has started
        ({"max_requests": 3}, 1, 0),
        ({"max_tokens": 10}, 4, 1),  # and its prompt is gone with it
        ({"max_tokens": 10}, 9, 4),
        ({"max_tokens": 10}, 11, 5),  # never: it must find a free slot
        ({"max_requests": 0}, 1, 5),
    ],
)
def test_room_is_as_far_away_as_slots_must_become_free(limits, num_prompt, expected):
    queue = queue_of(request("a", prompt=b"12345", n=3), request("b", prompt=b"12"), **limits)
    assert queue.num_before_room(num_prompt) == expected


def test_what_is_removed_waits_no_longer():
    queue = WaitingQueue(max_requests=9, max_tokens=99)
    kept, removed = (Sequence(request(name), 0, 1, 0.0, TokensOnly) for name in "ab")
    queue.push([kept])
    queue.push([removed])
    queue.remove(removed.request)
    assert [len(queue), queue.pop()] == [1, kept]


def test_removing_a_request_compares_none_of_the_choices_that_wait():
    compared = []

    class Counted(Sequence):
        def __eq__(self, other):
            compared.append(other)
            return self is other

        __hash__ = object.__hash__

    queue = WaitingQueue(max_requests=9, max_tokens=99)
    asked = [request(name, n=50) for name in "abc"]
    for one in asked:
        queue.push(Counted(one, index, 1, 0.0, TokensOnly) for index in range(one.n))
    queue.remove(asked[1])
    queue.remove(asked[1])
    assert [sequence_id for sequence_id, _ in order(queue)] == ["a"] * 50 + ["c"] * 50
    assert compared == []


def test_counts_and_places_follow_every_change():
    queue = queue_of(request("a", n=2), request("b", prompt=b"12345", n=2), request("c", priority=-1), max_tokens=20)
    assert [queue.place(name) for name in "cab"] == [1, 2, 3]
    queue.remove(request("b", prompt=b"12345", n=2))
    assert (len(queue), queue.place("b"), queue.refusal(9).message) == (
        3,
        None,
        "12 prompt tokens are waiting, with 9 more the limit 20 is passed",
    )
    queue.pop()
    queue.pop()
    assert (len(queue), queue.place("a"), queue.refusal(20)) == (1, None, None)
    queue.remove(request("a", n=2))
    assert (len(queue), queue.refusal(20)) == (0, None)
