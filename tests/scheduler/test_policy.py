from scheduler.policy import Decode, Prefill, View, next_tick


def decide(num_decoding=0, num_to_prefill=0, *, after_prefill=False):
    return next_tick(View(num_decoding, num_to_prefill, max_chunk=10, after_prefill=after_prefill))


def test_nothing_to_do_is_no_tick():
    assert decide() is None
    assert decide(after_prefill=True) is None


def test_a_short_prompt_runs_whole_and_a_long_one_by_chunks():
    assert decide(num_to_prefill=7) == Prefill(7)
    assert decide(num_to_prefill=25) == Prefill(10)


def test_chunks_follow_each_other_while_nobody_decodes():
    assert decide(num_to_prefill=25, after_prefill=True) == Prefill(10)


def test_chunks_and_decode_ticks_take_turns():
    assert decide(3, 25, after_prefill=False) == Prefill(10)
    assert decide(3, 25, after_prefill=True) == Decode()


def test_without_prompts_every_tick_decodes():
    assert decide(3) == Decode()
    assert decide(3, after_prefill=True) == Decode()
