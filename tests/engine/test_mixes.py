from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import Copy
from engine.mixes import MAX_SLOTS, Mix, random_mix


def replay(mix: Mix) -> list[int]:
    """Run `mix` on lists of ids, checking every rule of the kernels' `begin`; returns each sequence's length."""
    held: list[list[int]] = [[] for _ in range(mix.n_slots)]
    lengths = [0] * len(mix.sequences)
    for tick in mix.ticks:
        for step in tick.before:
            if isinstance(step, Copy):
                assert 0 < step.length <= len(held[step.source])
                held[step.target] = held[step.source][: step.length]
            else:
                assert 0 < step.length <= len(held[step.slot])
                del held[step.slot][step.length :]
        assert tick.chunks
        assert len({chunk.slot for chunk in tick.chunks}) == len(tick.chunks)
        for index, chunk in zip(tick.sequences, tick.chunks, strict=True):
            sequence = mix.sequences[index]
            assert 0 <= chunk.n_logits <= len(chunk.token_ids)
            assert chunk.start <= len(held[chunk.slot])
            del held[chunk.slot][chunk.start :]
            held[chunk.slot] += chunk.token_ids
            assert tuple(held[chunk.slot]) == sequence.token_ids[: len(held[chunk.slot])]
            assert len(held[chunk.slot]) <= mix.max_len
            assert chunk.start + len(chunk.token_ids) <= sequence.num_prompt or len(chunk.token_ids) == 1
            lengths[index] = len(held[chunk.slot])
    return lengths


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**64),
    number=st.integers(0, 20),
    vocab_size=st.integers(1, 1000),
    max_context=st.integers(2, 1000),
)
def test_every_mix_can_be_run_and_keeps_to_the_model_s_limits(
    seed: int, number: int, vocab_size: int, max_context: int
):
    mix = random_mix(seed, number, vocab_size=vocab_size, max_context=max_context)

    lengths = replay(mix)

    assert 1 <= mix.n_slots <= MAX_SLOTS
    assert mix.max_len <= max_context
    assert all(0 < length <= len(s.token_ids) for length, s in zip(lengths, mix.sequences, strict=True))
    assert all(0 <= token_id < vocab_size for s in mix.sequences for token_id in s.token_ids)
    assert all(0 < s.num_prompt <= len(s.token_ids) <= mix.max_len for s in mix.sequences)


def test_the_same_seed_and_number_give_the_same_mix_and_others_another():
    def mix(seed: int, number: int) -> Mix:
        return random_mix(seed, number, vocab_size=100, max_context=64)

    assert mix(1, 2) == mix(1, 2)
    assert mix(1, 2).ticks != mix(1, 4).ticks
    assert mix(1, 2).ticks != mix(2, 2).ticks


def test_mixes_cover_what_a_server_does():
    mixes = [random_mix(0, number, vocab_size=100, max_context=2048) for number in range(40)]
    sequences = [sequence for mix in mixes for sequence in mix.sequences]
    chunks = [chunk for mix in mixes for tick in mix.ticks for chunk in tick.chunks]

    assert {mix.kv_dtype for mix in mixes} == {"float16", "float32"}
    assert min(mix.n_slots for mix in mixes) == 1
    assert max(len(tick.chunks) for mix in mixes for tick in mix.ticks) > 24
    assert {sequence.origin for sequence in sequences} == {"fresh", "reused", "truncated", "copied"}
    assert max(sequence.num_prompt for sequence in sequences) > 512
    assert {chunk.n_logits for chunk in chunks} >= {0, 1, 2}
    assert max(len(chunk.token_ids) for chunk in chunks) > 256
    assert any(
        length < len(sequence.token_ids)
        for mix in mixes
        for length, sequence in zip(replay(mix), mix.sequences, strict=True)
    ), "none was abandoned"
