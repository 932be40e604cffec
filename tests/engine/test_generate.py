import numpy as np
import pytest

from engine.batch import Chunk
from engine.errors import CacheError, ContextLengthError, ParamError
from engine.generate import generate
from engine.kv_cache import KVCache
from engine.model import Model
from engine.params import SamplingParams
from engine.sampler import request_rng, sample
from tests.tiny_model import write_tiny_llama

NO_EOS = frozenset()
PROMPT = tuple(b + 3 for b in b"The quick brown fox")  # ids 3 and up are the bytes in order


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = write_tiny_llama(tmp_path_factory.mktemp("m") / "m.gguf", max_context=320, tied=False, seed=6)
    return Model.load(path, kernels="reference")


def greedy(**kwargs):
    return SamplingParams(temperature=0, **kwargs)


def run(model, params, prompt=PROMPT, **kwargs):
    return generate(model, model.tokenizer, prompt, params, **({"eos_ids": NO_EOS} | kwargs))


@pytest.fixture(scope="module")
def free(model):
    """Twelve greedy tokens nothing ends: what the tests derive their expectations from."""
    generation = run(model, greedy(max_tokens=12))
    assert len(set(generation.ids)) == 12, "the tests below need a continuation that does not repeat itself"
    return generation


class Recording:
    """A model that keeps what it was asked and what it answered."""

    def __init__(self, model):
        self._model = model
        self.config = model.config
        self.new_cache = model.new_cache
        self.chunks, self.logits = [], []

    def forward(self, chunks, cache):
        logits = self._model.forward(chunks, cache)
        self.chunks += chunks
        self.logits.append(logits[0])
        return logits


@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
def test_cached_steps_give_the_logits_of_recomputing_everything(model, kv_dtype):
    cached, recomputed = Recording(model), Recording(model)
    one = generate(cached, model.tokenizer, PROMPT, greedy(max_tokens=16), kv_dtype=kv_dtype, eos_ids=NO_EOS)
    other = generate(
        recomputed, model.tokenizer, PROMPT, greedy(max_tokens=16), cache="none", kv_dtype=kv_dtype, eos_ids=NO_EOS
    )
    assert len(one.ids) == 16
    assert one.ids == other.ids
    assert one.text == other.text
    # Within 1e-5 would do for most; this engine promises the same bits.
    np.testing.assert_array_equal(cached.logits, recomputed.logits)


def test_the_model_sees_the_prompt_once_and_then_only_new_tokens(model):
    recording = Recording(model)
    generation = generate(recording, model.tokenizer, PROMPT, greedy(max_tokens=4), eos_ids=NO_EOS)
    positions = range(len(PROMPT), len(PROMPT) + 3)
    assert recording.chunks == [
        Chunk(0, 0, PROMPT),
        *(Chunk(0, p, (token,)) for p, token in zip(positions, generation.ids, strict=False)),
    ]


def test_caching_saves_more_than_four_fifths_of_the_work_at_256_tokens(model):
    prompt = tuple(range(3, 259))
    params = greedy(max_tokens=8)
    cached, recomputed = run(model, params, prompt), run(model, params, prompt, cache="none")
    assert cached.ids == recomputed.ids
    assert cached.stats.num_rows == 256 + 7
    assert recomputed.stats.num_rows == sum(range(256, 264))
    assert recomputed.stats.num_rows > 5 * cached.stats.num_rows


def test_chunks_of_3_1_5_2_equal_one_forward(model):
    whole = model.forward([Chunk(0, 0, PROMPT[:11], 11)], model.new_cache(1, 11))
    cache = model.new_cache(1, 11)
    parts = [model.forward([Chunk(0, a, PROMPT[a:b], b - a)], cache) for a, b in [(0, 3), (3, 4), (4, 9), (9, 11)]]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_a_cache_handed_in_is_written_from_its_beginning(model, free):
    config = model.config
    cache = KVCache(config.n_layers, config.n_kv_heads, config.d_head, 64)
    for _ in range(2):
        assert run(model, greedy(max_tokens=12), cache=cache).ids == free.ids
        assert cache.seq_len() == len(PROMPT) + 11


def test_a_cache_handed_in_bounds_the_context(model):
    config = model.config
    cache = KVCache(config.n_layers, config.n_kv_heads, config.d_head, len(PROMPT) + 5)
    generation = run(model, greedy(), cache=cache)
    assert (len(generation.ids), generation.finish_reason) == (5, "length")
    with pytest.raises(ContextLengthError):
        run(model, greedy(), PROMPT * 2, cache=cache)


def test_a_full_context_ends_with_length(model):
    generation = run(model, greedy(max_tokens=1000))
    assert generation.finish_reason == "length"
    assert len(PROMPT) + len(generation.ids) == model.config.max_context


def test_no_tokens_asked_for_none_given(model):
    generation = run(model, greedy(max_tokens=0))
    assert (generation.text, generation.ids, generation.finish_reason) == ("", (), "length")
    assert generation.stats.num_completion_tokens == 0


def test_eos_is_counted_but_in_neither_ids_nor_text(model, free):
    eos = free.ids[3]
    generation = run(model, greedy(max_tokens=12, logprobs=0), eos_ids={eos})
    assert generation.ids == free.ids[:3]
    assert generation.text == model.tokenizer.decode(free.ids[:3])
    assert generation.finish_reason == "stop"
    assert generation.stats.num_completion_tokens == 4
    assert [entry.token_id for entry in generation.logprobs] == list(free.ids[:3])


def test_eos_beats_length_on_the_same_token(model, free):
    assert run(model, greedy(max_tokens=4), eos_ids={free.ids[3]}).finish_reason == "stop"
    assert run(model, greedy(max_tokens=3), eos_ids={free.ids[3]}).finish_reason == "length"


def test_the_tokenizers_eos_ends_unless_others_are_given(model):
    biased = greedy(max_tokens=5, logit_bias={2: 100.0})
    assert run(model, biased, eos_ids=None).finish_reason == "stop"
    assert run(model, biased, eos_ids=NO_EOS).ids == (2,) * 5


def test_ignored_eos_goes_on_and_is_a_token_like_others(model, free):
    generation = run(model, greedy(max_tokens=12, ignore_eos=True), eos_ids={free.ids[3]})
    assert generation.ids == free.ids


def test_min_tokens_puts_eos_off(model, free):
    generation = run(model, greedy(max_tokens=12, min_tokens=6), eos_ids={free.ids[3]})
    assert generation.stats.num_completion_tokens >= 6
    assert free.ids[3] not in generation.ids


def test_a_stop_token_ends_and_is_shown_only_on_request(model, free):
    hidden = run(model, greedy(max_tokens=12, stop_token_ids=(free.ids[4],)))
    assert (hidden.ids, hidden.finish_reason) == (free.ids[:4], "stop")
    shown = run(model, greedy(max_tokens=12, stop_token_ids=(free.ids[4],), include_stop_str_in_output=True))
    assert (shown.ids, shown.finish_reason) == (free.ids[:5], "stop")
    assert shown.text == model.tokenizer.decode(free.ids[:5])


@pytest.fixture(scope="module")
def spelling(tmp_path_factory):
    """A model made to say "abcdefghij...": token t is followed by t + 1."""
    vocab, eye = 263, np.eye(263, dtype=np.float32)
    path = write_tiny_llama(
        tmp_path_factory.mktemp("s") / "s.gguf",
        n_layers=1,
        d_model=vocab,
        n_heads=1,
        n_kv_heads=1,
        d_head=4,
        d_ff=2,
        tied=False,
        tensors={
            "token_embd.weight": eye,
            "output.weight": np.roll(eye, 1, axis=0),
            "output_norm.weight": np.ones(vocab, np.float32),
            "blk.0.attn_output.weight": np.zeros((vocab, 4), np.float32),
            "blk.0.ffn_down.weight": np.zeros((vocab, 2), np.float32),
        },
    )
    return Model.load(path, kernels="reference")


def spell(model, params, prompt="a", **kwargs):
    return generate(model, model.tokenizer, prompt, params, **kwargs)


def test_text_is_cut_before_a_stop_string_that_spans_tokens(spelling):
    generation = spell(spelling, greedy(max_tokens=20, stop=("zzz", "efg")))
    assert (generation.text, generation.finish_reason) == ("bcd", "stop")
    assert spelling.tokenizer.decode(generation.ids) == "bcdefg"
    shown = spell(spelling, greedy(max_tokens=20, stop=("efg",), include_stop_str_in_output=True))
    assert shown.text == "bcdefg"


def test_what_was_held_back_for_a_stop_string_is_released_at_the_end(spelling):
    generation = spell(spelling, greedy(max_tokens=5, stop=("efX", "fg")))
    assert (generation.text, generation.finish_reason) == ("bcdef", "length")


def test_stop_strings_are_not_looked_for_in_the_first_min_tokens(spelling):
    generation = spell(spelling, greedy(max_tokens=20, min_tokens=4, stop=("c", "h")))
    assert generation.text == "bcdefg"


def test_pieces_handed_out_join_to_the_text_and_come_when_they_are_final(spelling):
    pieces = []
    generation = spell(spelling, greedy(max_tokens=6, stop=("deX",)), on_text=pieces.append)
    assert pieces == ["b", "c", "def", "g"]
    assert generation.text == "bcdefg"


def test_a_character_cut_at_the_end_becomes_one_replacement_character(spelling):
    # Bytes C2, C3, C4: each begins a character the next one does not finish.
    pieces = []
    generation = spell(spelling, greedy(max_tokens=1), prompt=(3 + 0xC2,), on_text=pieces.append)
    assert spelling.tokenizer.token_bytes(generation.ids[0]) == b"\xc3"
    assert generation.text == "\ufffd"
    assert pieces == ["\ufffd"]


def test_a_stop_string_completed_by_the_cut_character_still_stops(spelling):
    generation = spell(spelling, greedy(max_tokens=1, stop=("\ufffd",)), prompt=(3 + 0xC2,))
    assert (generation.text, generation.finish_reason) == ("", "stop")


def test_control_tokens_have_no_text_unless_asked_for(spelling):
    params = {"max_tokens": 2, "ignore_eos": True}
    assert spell(spelling, greedy(**params), prompt=(0,)).text == ""
    assert spell(spelling, greedy(**params, skip_special_tokens=False), prompt=(0,)).text == "<|im_start|><|im_end|>"


def test_seeded_sampling_equals_replaying_sample_by_hand(model):
    params = SamplingParams(
        temperature=1.3, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.5, seed=7, max_tokens=16, logprobs=3
    )
    recording = Recording(model)
    generation = generate(recording, model.tokenizer, PROMPT, params, eos_ids=NO_EOS)
    history = []
    for logits, entry in zip(recording.logits, generation.logprobs, strict=True):
        sampled = sample(logits, params, history, request_rng(7), PROMPT)
        assert sampled.logprobs == entry
        history.append(sampled.token_id)
    assert generation.ids == tuple(history)


def test_no_seed_is_seed_0_and_seeds_differ(model):
    unseeded, zero, one = (run(model, SamplingParams(temperature=2, max_tokens=12, seed=s)).ids for s in (None, 0, 1))
    assert unseeded == zero
    assert one != zero


def test_a_draw_depends_on_its_absolute_position(model):
    """Cutting an answer and asking for the rest gives the same rest."""
    params = SamplingParams(temperature=1.5, seed=3, max_tokens=12)
    whole = run(model, params).ids
    rest = run(model, SamplingParams(temperature=1.5, seed=3, max_tokens=7), (*PROMPT, *whole[:5])).ids
    assert rest == whole[5:]


def test_a_text_prompt_is_tokenized(model):
    assert run(model, greedy(max_tokens=3), prompt="x<|im_end|>").stats.num_prompt_tokens == 2
    ids = model.tokenizer.encode("The quick")
    assert run(model, greedy(max_tokens=3), "The quick").ids == run(model, greedy(max_tokens=3), ids).ids


def test_logprobs_are_none_unless_asked_for(model, free):
    assert free.logprobs is None
    asked = run(model, greedy(max_tokens=2, logprobs=2)).logprobs
    assert [len(entry.top) for entry in asked] == [2, 2]


def test_timings_are_the_differences_of_the_clock_handed_in(model, free):
    instants = iter([100.0, 103.0, 110.0])
    timings = run(model, greedy(max_tokens=4), clock=lambda: next(instants)).timings
    assert (timings.prefill_s, timings.decode_s) == (3, 7)
    assert free.timings is None


@pytest.mark.parametrize(
    ("prompt", "kwargs", "error", "said"),
    [
        ((), {}, ParamError, "at least one token"),
        ("", {}, ParamError, "at least one token"),
        ((263,), {}, ParamError, "got 263"),
        ((1,) * 320, {}, ContextLengthError, "320 tokens"),
        ((1,), {"cache": "paged"}, ParamError, "'paged'"),
        ((1,), {"kv_dtype": "int8"}, CacheError, "'int8'"),
    ],
)
def test_what_cannot_be_generated_is_refused(model, prompt, kwargs, error, said):
    with pytest.raises(error, match=said):
        run(model, greedy(), prompt, **kwargs)


def test_each_choice_draws_for_itself_and_a_request_s_first_is_choice_0(model):
    params = SamplingParams(max_tokens=8, seed=3)
    recording = Recording(model)

    first, second, third = (
        generate(recording, model.tokenizer, PROMPT, params, choice=choice, eos_ids=NO_EOS) for choice in range(3)
    )

    assert run(model, params) == first
    assert len({first.ids, second.ids, third.ids}) == 3
    drawn = []
    for logits in recording.logits[8:16]:
        drawn.append(sample(logits, params, drawn, request_rng(3, 1), PROMPT, eos_ids=NO_EOS).token_id)
    assert second.ids == tuple(drawn)
