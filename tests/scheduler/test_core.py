import pytest

from engine.batch import Copy, RowError
from engine.errors import ContextLengthError, ParamError, QueueFullError
from engine.params import SamplingParams
from scheduler.events import ChoiceFinished, Delta, Finished, PromptProgress, PromptScored, Started, Usage
from scheduler.output import TokensOnly
from scheduler.request import FinishReason
from scheduler.sequence import Sequence
from tests.fakes import ByteTokenizer
from tests.scheduler.driver import Driver, request

(EOS,) = ByteTokenizer.eos_ids


def scripted(*token_ids):
    """A next_token that says `token_ids` after the prompt, whoever asks."""
    return lambda row, request, _index: token_ids[len(row) - len(request.prompt_ids)]


def failing(request_id, error="it broke", *, at=0):
    """A fault that fails `request_id`'s row once it has `at` tokens."""

    def fault(work):
        sequence = work.sequence
        if sequence.request.id == request_id and len(sequence.output_ids) == at:
            return RowError(error, RuntimeError(error))
        return None

    return fault


def test_one_request_runs_as_it_would_alone():
    driver = Driver()
    driver.submit(max_tokens=5)
    driver.run()
    driver.assert_equals_solo()
    driver.assert_all_slots_free()


def test_events_come_in_order():
    driver = Driver()
    driver.submit(max_tokens=2)
    driver.run()
    assert [type(e) for e in driver.events["a"]] == [Started, Delta, Delta, ChoiceFinished, Finished]


def test_a_whole_prompt_is_one_tick_and_gives_the_first_token():
    driver = Driver(prefill_chunk=8)
    driver.submit(prompt=b"12345678", max_tokens=1)
    driver.tick()
    assert driver.finished().usage.completion_tokens == 1


def test_a_long_prompt_runs_in_chunks_and_only_the_last_wants_logits():
    driver = Driver(prefill_chunk=4)
    driver.submit(prompt=b"0123456789", max_tokens=1)
    driver.run()
    chunks = [batch.chunks[0] for batch in driver.batches]
    assert [(c.start, len(c.token_ids), c.n_logits) for c in chunks] == [(0, 4, 0), (4, 4, 0), (8, 2, 1)]
    driver.assert_equals_solo()


def test_short_prompts_share_a_prefill_tick_oldest_first():
    driver = Driver(prefill_chunk=8)
    for name, prompt in [("a", b"01"), ("b", b"012345678"), ("c", b"01234"), ("d", b"0")]:
        driver.submit(name, prompt=prompt, max_tokens=4)
    driver.run()
    prefills = [
        [(work.sequence.request.id, work.chunk.start, len(work.chunk.token_ids)) for work in batch.work]
        for batch in driver.batches
        if any(work.chunk.start < work.sequence.num_prompt for work in batch.work)
    ]
    assert prefills == [[("a", 0, 2), ("b", 0, 6)], [("b", 6, 3), ("c", 0, 5)], [("d", 0, 1)]]
    for name in "abcd":
        driver.assert_equals_solo(name)


def test_of_several_choices_only_one_takes_part_in_a_shared_prefill():
    driver = Driver(prefill_chunk=50)
    driver.submit("a", prompt=b"01234", n=3, max_tokens=2)
    driver.submit("b", prompt=b"012", max_tokens=2)
    driver.tick()
    assert [len(chunk.token_ids) for chunk in driver.batches[0].chunks] == [4, 3]
    driver.run()
    assert len(driver.batches[1].copies) == 2
    driver.assert_equals_solo("a")
    driver.assert_equals_solo("b")


def test_all_running_sequences_decode_in_one_batch():
    driver = Driver()
    for name in "abc":
        driver.submit(name, prompt=name.encode() * 3, max_tokens=6)
    driver.run()
    assert max(len(batch.work) for batch in driver.batches) == 3
    for name in "abc":
        driver.assert_equals_solo(name)


def test_running_streams_go_on_between_the_chunks_of_a_long_prompt():
    driver = Driver(prefill_chunk=4, max_len=256)
    driver.submit("a", max_tokens=200)
    driver.tick(20)
    driver.submit("b", prompt=bytes(range(65, 65 + 40)), max_tokens=1)
    seen = []
    while not any(isinstance(e, Finished) for e in driver.events["b"]):
        before = len(driver.token_ids("a"))
        driver.tick()
        seen.append(len(driver.token_ids("a")) - before)
    assert seen == [0, 1] * 9 + [0]  # ten chunks of b, one token of a between each
    driver.run()
    driver.assert_equals_solo("a")
    driver.assert_equals_solo("b")


def test_requests_start_first_come_first_served():
    driver = Driver(n_slots=1)
    for name in "abc":
        driver.submit(name, max_tokens=2)
    order = []
    while driver.tick():
        order += [name for name in "abc" if driver.is_started(name) and name not in order]
    assert order == ["a", "b", "c"]


def test_a_freed_slot_goes_to_the_head_of_the_queue_before_the_next_tick():
    driver = Driver(n_slots=1)
    driver.submit("a", max_tokens=1)
    driver.submit("b", max_tokens=1)
    assert not driver.is_started("b")
    driver.tick()
    assert driver.is_started("b")
    assert driver.scheduler.slots()[0].request_id == "b"


def test_eos_ends_with_stop_counts_as_a_token_and_has_no_text():
    driver = Driver(next_token=scripted(ord("h"), ord("i"), EOS))
    driver.submit(skip_special_tokens=False)
    driver.run()
    assert driver.text() == "hi"
    assert driver.token_ids() == [ord("h"), ord("i"), EOS]
    assert driver.choice() == ChoiceFinished("a", 0, FinishReason.STOP, None, 3)


def test_eos_as_the_last_allowed_token_ends_with_stop_not_length():
    driver = Driver(next_token=scripted(ord("h"), EOS))
    driver.submit(max_tokens=2)
    driver.run()
    assert driver.choice().reason is FinishReason.STOP
    assert driver.finished().usage.completion_tokens == 2


def test_with_ignore_eos_it_goes_on():
    driver = Driver(next_token=scripted(ord("h"), EOS, ord("i"), EOS))
    driver.submit(ignore_eos=True, max_tokens=4)
    driver.run()
    assert driver.text() == "hi"
    assert driver.choice() == ChoiceFinished("a", 0, FinishReason.LENGTH, None, 4)


@pytest.mark.parametrize(("include", "text"), [(False, "h"), (True, "hi")])
def test_a_stop_token_ends_with_its_id_as_the_reason(include, text):
    driver = Driver(next_token=scripted(*b"hi!"))
    driver.submit(stop_token_ids=(ord("i"),), include_stop_str_in_output=include)
    driver.run()
    assert driver.text() == text
    assert driver.choice() == ChoiceFinished("a", 0, FinishReason.STOP, ord("i"), 2)


def test_a_stop_string_across_tokens_frees_the_slot_at_once_and_cuts_the_text():
    driver = Driver(n_slots=1, next_token=scripted(*b"one, two"))
    driver.submit("a", stop=("e, t",))
    driver.submit("b", max_tokens=1)
    while not any(isinstance(e, Finished) for e in driver.events["a"]):
        driver.tick()
    assert driver.text("a") == "on"
    assert driver.token_ids("a") == list(b"one, t")
    assert driver.choice("a") == ChoiceFinished("a", 0, FinishReason.STOP, "e, t", 6)
    assert driver.is_started("b")


def test_a_stop_string_that_completes_with_the_last_token_ends_with_stop():
    driver = Driver(next_token=scripted(*b"abc"))
    driver.submit(stop=("bc",), max_tokens=3)
    driver.run()
    assert driver.text() == "a"
    assert driver.choice().reason is FinishReason.STOP
    assert driver.choice().stop_reason == "bc"


def test_a_character_cut_by_the_length_can_complete_a_stop_string():
    driver = Driver(next_token=scripted(*b"xa\xe2"))
    driver.submit(stop=("a\ufffd",), max_tokens=3)
    driver.run()
    assert driver.text() == "x"
    assert driver.choice() == ChoiceFinished("a", 0, FinishReason.STOP, "a\ufffd", 3)


def test_stop_strings_count_only_after_min_tokens():
    driver = Driver(next_token=scripted(*b"xxaxx"))
    driver.submit(stop=("x",), min_tokens=3)
    driver.run()
    assert driver.text() == "xxa"
    assert driver.choice().num_tokens == 4


def test_without_max_tokens_an_answer_ends_when_the_context_is_full():
    driver = Driver(max_len=24)
    driver.submit(prompt=b"x" * 20)
    driver.run()
    assert driver.choice() == ChoiceFinished("a", 0, FinishReason.LENGTH, None, 4)
    driver.assert_equals_solo()
    driver.assert_all_slots_free()


def test_max_tokens_beyond_the_context_is_clamped():
    driver = Driver(max_len=10)
    driver.submit(prompt=b"x" * 8, max_tokens=500)
    driver.run()
    assert driver.choice() == ChoiceFinished("a", 0, FinishReason.LENGTH, None, 2)


def test_max_tokens_zero_prefills_and_ends_with_length():
    driver = Driver(prefill_chunk=4)
    driver.submit(max_tokens=0, prompt_logprobs=1, n=2)
    driver.run()
    assert driver.text() == ""
    assert driver.finished().reason is FinishReason.LENGTH
    assert driver.finished().usage.completion_tokens == 0
    assert driver.finished().timings.ttft_s is None
    assert [lp and lp.token_id for lp in driver.finished().prompt_logprobs] == [None, *b"rompt"]
    driver.assert_all_slots_free()


@pytest.mark.parametrize("prompt", [b"x", b"xy", b"0123456789abcdef-"])
def test_prompt_logprobs_name_every_prompt_token_but_the_first(prompt):
    driver = Driver(prefill_chunk=5)
    driver.submit(prompt=prompt, prompt_logprobs=2, max_tokens=2)
    driver.run()
    scored = driver.finished().prompt_logprobs
    assert scored[0] is None
    assert [lp.token_id for lp in scored[1:]] == list(prompt[1:])
    driver.assert_equals_solo()


def test_chunks_with_prompt_logprobs_stay_small():
    driver = Driver(prefill_chunk=1000, max_len=1000)
    driver.submit(prompt=b"x" * 300, prompt_logprobs=0, max_tokens=1)
    driver.run()
    assert max(batch.num_tokens for batch in driver.batches) == 64


def test_choices_share_one_prefill_and_differ():
    driver = Driver(n_slots=4)
    driver.submit(prompt=b"0123456", n=3, max_tokens=12)
    driver.run()
    assert sum(batch.num_tokens for batch in driver.batches[:2]) == 6 + 3
    assert driver.batches[1].copies == (Copy(0, 1, 6), Copy(0, 2, 6))
    assert len({driver.text(index=i) for i in range(3)}) == 3
    driver.assert_equals_solo()
    assert driver.finished().usage.prompt_tokens == 7
    assert driver.finished().usage.completion_tokens == 36
    assert sum(isinstance(e, Started) for e in driver.events["a"]) == 1


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
@pytest.mark.parametrize("prompt", [b"x", b"xy", b"0123456789"])
def test_there_may_be_more_choices_than_slots(max_tokens, prompt):
    driver = Driver(n_slots=2)
    driver.submit(prompt=prompt, n=7, max_tokens=max_tokens)
    driver.submit("b", max_tokens=3)
    driver.run()
    driver.assert_equals_solo("a")
    driver.assert_equals_solo("b")
    driver.assert_all_slots_free()


@pytest.mark.parametrize("prompt_logprobs", [None, 1])
@pytest.mark.parametrize("num_others", [0, 1])
def test_a_prompt_that_many_choices_only_score_is_computed_once(prompt_logprobs, num_others):
    driver = Driver(n_slots=2)
    for index in range(num_others):
        driver.submit(f"other {index}", max_tokens=30)
    driver.submit("a", b"a longer prompt", n=7, max_tokens=0, prompt_logprobs=prompt_logprobs)
    driver.run()
    rows = [work for batch in driver.batches for work in batch.work if work.sequence.request.id == "a"]
    first = [work for work in rows if work.sequence.index == 0]
    assert sum(len(work.chunk.token_ids) for work in first) == len(b"a longer prompt")
    assert len(rows) - len(first) <= 1
    assert [driver.choice("a", index).reason for index in range(7)] == [FinishReason.LENGTH] * 7
    assert driver.finished("a").usage == Usage(len(b"a longer prompt"), 0)
    assert sum(isinstance(event, PromptScored) for event in driver.events["a"]) == (prompt_logprobs is not None)
    for index in range(num_others):
        driver.assert_equals_solo(f"other {index}")


def test_a_late_choice_copies_from_a_sibling_that_lives():
    ends_at = {0: 2, 1: 9, 2: 4}  # choice 0 ends first: its slot goes to choice 2 while choice 1 runs on

    def next_token(row, request, index):
        return EOS if len(row) - len(request.prompt_ids) == ends_at[index] else ord("x")

    driver = Driver(n_slots=2, next_token=next_token)
    driver.submit(prompt=b"0123456", n=3)
    driver.run()
    assert [copy for batch in driver.batches for copy in batch.copies] == [Copy(0, 1, 6), Copy(1, 0, 6)]
    driver.assert_equals_solo()


def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers():
    driver = Driver(max_len=16)
    with pytest.raises(ContextLengthError, match=r"16 tokens.* 16") as caught:
        driver.submit(prompt=b"x" * 16)
    assert (caught.value.num_prompt, caught.value.max_len) == (16, 16)
    driver.assert_all_slots_free()


@pytest.mark.parametrize(("bad", "param"), [({"prompt": b""}, "prompt"), ({"n": 0}, "n")])
def test_an_empty_request_is_refused(bad, param):
    with pytest.raises(ParamError) as caught:
        Driver().submit(**bad)
    assert caught.value.param == param


def test_an_id_in_use_is_refused_and_free_again_afterwards():
    driver = Driver()
    driver.submit("a", max_tokens=1)
    with pytest.raises(ParamError, match="already running"):
        driver.submit("a")
    driver.run()
    driver.submit("a", max_tokens=1)


def test_the_queue_is_bounded_and_counts_whole_requests():
    driver = Driver(n_slots=2, max_queue=2)
    driver.submit("a", n=2)
    driver.submit("b", n=3)
    driver.submit("c")
    with pytest.raises(QueueFullError, match="2 requests are waiting, the limit is 2"):
        driver.submit("d")
    assert driver.scheduler.num_waiting == 4
    driver.abort("b")
    driver.submit("d")


def test_the_queue_is_bounded_in_prompt_tokens_too():
    driver = Driver(n_slots=1, max_queue_tokens=10)
    driver.submit("runs", prompt=b"x" * 40)
    driver.submit("a", prompt=b"x" * 6, n=3)
    assert driver.scheduler.metrics.num_refused == {"requests": 0, "tokens": 0}
    with pytest.raises(QueueFullError, match="6 prompt tokens are waiting, with 5 more the limit 10 is passed"):
        driver.submit("b", prompt=b"x" * 5)
    assert driver.scheduler.metrics.num_refused == {"requests": 0, "tokens": 1}
    driver.submit("c", prompt=b"x" * 4)
    driver.abort("a")
    driver.submit("b", prompt=b"x" * 5)


def test_a_full_queue_says_how_long_its_head_will_likely_wait():
    driver = Driver(n_slots=2, max_queue=1)
    for name in "ab":
        driver.submit(name, max_tokens=5)
    driver.run()  # each held its slot for 1 prefill and, taking turns, 4 decodes and the other's prefill
    held_s = [driver.finished(name).timings.e2e_s for name in "ab"]
    for name in "cde":
        driver.submit(name)
    with pytest.raises(QueueFullError) as refused:
        driver.submit("f")
    assert refused.value.retry_after_s == pytest.approx(sum(held_s) / 2 / 2)


def test_lower_priorities_start_first_and_nobody_who_runs_is_disturbed():
    driver = Driver(n_slots=1)
    driver.submit("runs", max_tokens=3, priority=9)
    driver.submit("later", max_tokens=3, priority=1)
    driver.submit("sooner", max_tokens=3)
    driver.tick(2)
    assert driver.is_started("runs")
    driver.run()
    started = [name for name in ("runs", "later", "sooner") if driver.is_started(name)]
    queue_s = {name: driver.finished(name).timings.queue_s for name in started}
    assert queue_s["runs"] == 0
    assert queue_s["sooner"] < queue_s["later"]
    for name in started:
        driver.assert_equals_solo(name)


@pytest.mark.parametrize("prompt", [b"x", b"xy", b"0123456789abcdef-"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_a_scored_prompt_is_told_of_before_the_first_token(prompt, n, max_tokens):
    driver = Driver(prefill_chunk=5)
    driver.submit(prompt=prompt, n=n, prompt_logprobs=2, max_tokens=max_tokens)
    driver.run()
    events = driver.events["a"]
    (scored,) = [event for event in events if isinstance(event, PromptScored)]
    assert scored.logprobs == driver.finished().prompt_logprobs
    assert not any(isinstance(event, Delta | ChoiceFinished) for event in events[: events.index(scored)])


def test_a_prompt_that_is_not_to_be_scored_is_not_told_of():
    driver = Driver()
    driver.submit()
    driver.run()
    assert not any(isinstance(event, PromptScored | PromptProgress) for event in driver.events["a"])


@pytest.mark.parametrize("n", [1, 3])
def test_progress_is_told_chunk_by_chunk_to_who_asks(n):
    driver = Driver(prefill_chunk=4, n_slots=1)
    driver.submit("first", max_tokens=2)
    driver.submit(prompt=b"0123456789", n=n, reports_progress=True, max_tokens=2)
    driver.run()
    events = driver.events["a"]
    progress = [event for event in events if isinstance(event, PromptProgress)]
    counts = [4, 8, 10] if n == 1 else [4, 8, 9, 10]
    assert [event.num_computed for event in progress] == counts
    assert [event.elapsed_s for event in progress] == [float(tick) for tick in range(1, len(counts) + 1)]
    assert {event.num_prompt for event in progress} == {10}
    assert events.index(progress[-1]) < min(i for i, event in enumerate(events) if isinstance(event, Delta))
    driver.assert_equals_solo()


def test_the_view_of_a_request_says_where_it_is_and_what_it_waits_for():
    driver = Driver(n_slots=2, prefill_chunk=4)

    def view(name):
        seen = driver.scheduler.view(name)
        return seen.state, seen.position, seen.waits_for, seen.num_computed, seen.num_output

    driver.submit("a", prompt=b"0123456789")
    driver.submit("b", prompt=b"01234")
    driver.submit("c", n=2)
    driver.submit("d", priority=-1)
    assert view("a") == ("prefilling", None, None, 0, 0)
    assert view("b") == ("prefilling", None, "prefill", 0, 0)
    assert view("c") == ("queued", 2, "slot", 0, 0)
    assert view("d") == ("queued", 1, "slot", 0, 0)
    driver.tick(3)
    assert view("a") == ("decoding", None, None, 10, 1)
    assert view("b") == ("prefilling", None, None, 2, 0)  # the rest of a's last tick was b's
    driver.abort("a")
    driver.abort("b")
    driver.abort("d")
    assert driver.scheduler.view("a") is None
    driver.tick(4)
    seen = driver.scheduler.view("c")
    assert (seen.state, seen.num_choices, seen.num_finished, seen.num_prompt) == ("decoding", 2, 0, 6)
    assert seen.num_output == len(driver.token_ids("c", 0)) + len(driver.token_ids("c", 1)) > 2
    assert driver.scheduler.view("nobody") is None


def test_without_a_queue_a_free_slot_still_takes_a_request():
    driver = Driver(n_slots=1, max_queue=0)
    driver.submit("a")
    with pytest.raises(QueueFullError):
        driver.submit("b")


def test_cancel_while_queued_never_starts_the_request():
    driver = Driver(n_slots=1)
    driver.submit("a", max_tokens=3)
    driver.submit("b")
    driver.abort("b")
    driver.run()
    assert [type(e) for e in driver.events["b"]] == [ChoiceFinished, Finished]
    assert driver.finished("b").reason is FinishReason.ABORT
    driver.assert_equals_solo("a")


def test_cancel_while_prefilling_frees_the_slot():
    driver = Driver(n_slots=1, prefill_chunk=2)
    driver.submit("a", prompt=b"a long prompt")
    driver.submit("b", max_tokens=3)
    driver.tick()
    driver.abort("a")
    assert driver.scheduler.slots()[0].request_id == "b"
    driver.run()
    driver.assert_equals_solo("b")


def test_cancel_in_mid_flight_ignores_the_result_even_when_the_slot_has_a_new_owner():
    driver = Driver(n_slots=1)
    driver.submit("a", max_tokens=9)
    driver.tick(3)
    driver.submit("b", max_tokens=3)
    batch = driver.begin_tick()
    driver.abort("a")
    assert driver.scheduler.slots()[0].request_id == "b"
    driver.end_tick(batch)
    assert driver.finished("a").usage.completion_tokens == 3
    driver.run()
    driver.assert_equals_solo("b")
    driver.assert_all_slots_free()


def test_cancel_keeps_the_text_that_was_held_back():
    driver = Driver(next_token=scripted(*b"xyz"))
    driver.submit(stop=("xyz!",))
    driver.tick(2)
    assert driver.text() == ""
    driver.abort("a")
    assert driver.text() == "xy"
    assert driver.token_ids() == list(b"xy")


def test_finishing_twice_or_somebody_unknown_does_nothing():
    driver = Driver()
    driver.submit("a")
    driver.abort("a")
    driver.abort("a")
    driver.abort("nobody")
    assert driver.finished("a").reason is FinishReason.ABORT
    assert driver.scheduler.metrics.num_finished[FinishReason.ABORT] == 1


def test_a_row_that_fails_ends_its_own_request_only():
    driver = Driver(fault=failing("a", "it broke", at=3))
    driver.submit("a", n=2)
    driver.submit("b", max_tokens=9)
    driver.run()
    assert driver.finished("a").reason is FinishReason.ERROR
    assert driver.finished("a").error == "it broke"
    assert isinstance(driver.finished("a").cause, RuntimeError)
    assert {driver.choice("a", i).reason for i in range(2)} == {FinishReason.ERROR}
    driver.assert_equals_solo("b")
    driver.assert_all_slots_free()


def test_prefill_and_decode_and_queue_add_up_exactly():
    driver = Driver(n_slots=1)
    driver.t = 0.1
    driver.submit("a", max_tokens=3)
    driver.submit("b", max_tokens=4)
    driver.run()
    for name, queue_s, prefill_s, decode_s in [("a", 0, 1, 2), ("b", 3, 1, 3)]:
        timings = driver.finished(name).timings
        assert timings.queue_s + timings.prefill_s + timings.decode_s == timings.e2e_s
        assert (timings.queue_s, timings.prefill_s, timings.decode_s) == pytest.approx((queue_s, prefill_s, decode_s))
        assert timings.ttft_s == timings.queue_s + timings.prefill_s


def test_a_request_that_never_ran_spent_its_time_in_the_queue():
    driver = Driver(n_slots=1)
    driver.submit("a", max_tokens=9)
    driver.submit("b")
    driver.tick(3)
    driver.abort("b")
    timings = driver.finished("b").timings
    assert (timings.queue_s, timings.prefill_s, timings.decode_s, timings.ttft_s) == (3, 0, 0, None)


def test_without_an_output_the_events_carry_tokens_only():
    driver = Driver()
    events = driver.scheduler.submit(request(max_tokens=1), 0.0)
    batch = driver.scheduler.schedule()
    events += driver.scheduler.update(batch, driver.backend.run(batch), 1.0)
    (delta,) = [e for e in events if isinstance(e, Delta)]
    assert delta.text == ""
    assert len(delta.tokens) == 1


def test_the_views_tell_what_every_slot_does():
    driver = Driver(n_slots=3, prefill_chunk=4, max_len=10)
    driver.submit("a", prompt=b"ab", max_tokens=5)
    driver.submit("b", prompt=b"abcdefgh", max_tokens=2)
    driver.tick(3)
    states = [(v.state, v.request_id, v.num_computed, v.num_output) for v in driver.scheduler.slots()]
    assert states == [("decoding", "a", 3, 2), ("prefilling", "b", 6, 0), ("idle", None, 0, 0)]
    assert driver.scheduler.cache_usage == 9 / 30


def test_a_batch_must_be_updated_before_the_next():
    driver = Driver()
    driver.submit()
    batch = driver.begin_tick()
    with pytest.raises(AssertionError):
        driver.begin_tick()
    driver.end_tick(batch)
    with pytest.raises(AssertionError):
        driver.end_tick(batch)


def test_next_token_id_walks_through_prompt_and_output():
    sequence = Sequence(request(prompt=b"ab"), 0, 9, 0.0, TokensOnly)
    sequence.output_ids += [7, 8]
    ids = []
    for sequence.num_computed in range(4):
        ids.append(sequence.next_token_id)
    assert ids == [*b"ab", 7, 8]
    assert sequence.request.params == SamplingParams(seed=0)


def test_only_choices_that_run_have_an_output_open():
    driver = Driver(n_slots=2)
    opened = []
    open_output = driver.open_output
    driver.open_output = lambda asked, index: opened.append(index) or open_output(asked, index)
    driver.submit("a", n=50, max_tokens=2)
    assert opened == [0, 1]
    driver.tick(4)
    assert opened == [0, 1, 2, 3]
    driver.abort("a")
    assert driver.finished("a").choice_reasons[4:] == (FinishReason.ABORT,) * 46


def test_ending_many_choices_looks_at_each_a_few_times_only(monkeypatch):
    looks = []
    is_finished = Sequence.is_finished.fget
    monkeypatch.setattr(Sequence, "is_finished", property(lambda one: looks.append(one) or is_finished(one)))
    driver = Driver(n_slots=2)
    driver.submit("a", n=128)
    driver.abort("a")
    assert driver.finished().choice_reasons == (FinishReason.ABORT,) * 128
    assert len(looks) <= 4 * 128
