import pytest

from clients.workload import Workload


def prompts(**changes):
    return Workload(
        **{"num_prompts": 3, "input_len": 4, "output_len": 2, "low_id": 5, "high_id": 9, **changes}
    ).prompts()


def test_the_same_seed_gives_the_same_prompts_on_any_machine():
    assert prompts(low_id=1000, high_id=30000) == prompts(low_id=1000, high_id=30000)
    assert prompts(low_id=1000, high_id=30000, num_prompts=1) == [[28670, 13623, 25836, 14781]]


def test_another_seed_gives_other_prompts():
    assert prompts(low_id=0, high_id=10**6, seed=1) != prompts(low_id=0, high_id=10**6, seed=2)


@pytest.mark.parametrize("num_prompts", [1, 7])
@pytest.mark.parametrize("input_len", [1, 50])
def test_prompts_have_the_asked_number_length_and_range(num_prompts, input_len):
    made = prompts(num_prompts=num_prompts, input_len=input_len)
    assert [len(prompt) for prompt in made] == [input_len] * num_prompts
    assert all(5 <= token_id <= 9 for prompt in made for token_id in prompt)


def test_more_prompts_begin_with_the_same_ones():
    assert prompts(num_prompts=5)[:3] == prompts(num_prompts=3)
