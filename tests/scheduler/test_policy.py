from scheduler.policy import PROMPT_LOGPROBS_CHUNK, Decode, Prefill, Prompt, View, next_tick, shares


def decide(num_decoding=0, *num_left, after_prefill=False):
    return next_tick(View(num_decoding, tuple(map(Prompt, num_left)), prefill_chunk=10, after_prefill=after_prefill))


def test_nothing_to_do_is_no_tick():
    assert decide() is None
    assert decide(after_prefill=True) is None


def test_a_short_prompt_runs_whole_and_a_long_one_by_chunks():
    assert decide(0, 7) == Prefill((7,))
    assert decide(0, 25) == Prefill((10,))


def test_the_oldest_prompts_share_a_tick_as_far_as_it_goes():
    assert decide(0, 4, 3, 3, 1) == Prefill((4, 3, 3))
    assert decide(0, 4, 25, 1) == Prefill((4, 6))
    assert decide(0, 10, 1) == Prefill((10,))


def test_scored_prompts_share_their_own_limit_and_leave_the_rest_of_the_tick_to_others():
    scored, plain = Prompt(50, is_scored=True), Prompt(100)
    assert shares([scored, plain, scored, plain], 512) == (50, 100, PROMPT_LOGPROBS_CHUNK - 50, 100)
    assert shares([Prompt(500, is_scored=True), plain], 512) == (PROMPT_LOGPROBS_CHUNK, 100)


def test_nobody_overtakes_a_prompt_that_gets_no_token():
    scored = Prompt(PROMPT_LOGPROBS_CHUNK, is_scored=True)
    assert shares([scored, scored, Prompt(1)], 512) == (PROMPT_LOGPROBS_CHUNK,)


def test_prefills_follow_each_other_while_nobody_decodes():
    assert decide(0, 25, after_prefill=True) == Prefill((10,))


def test_prefills_and_decode_ticks_take_turns():
    assert decide(3, 25, after_prefill=False) == Prefill((10,))
    assert decide(3, 25, after_prefill=True) == Decode()


def test_without_prompts_every_tick_decodes():
    assert decide(3) == Decode()
    assert decide(3, after_prefill=True) == Decode()
