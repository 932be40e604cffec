"""The reference kernels against another implementation, on the real model.

`tests/data/greedy.json` and `logits.npz` were made with Hugging Face transformers (eager attention) in float32 on the
exactly dequantized weights of this file, and `logits64_*` by a forward in float64; where each number comes from is told
in the files themselves and in `tests/data/README.md`.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from engine.batch import Chunk
from engine.generate import generate
from engine.model import Model
from engine.params import SamplingParams

DATA = Path(__file__).parents[1] / "data"
GREEDY = json.loads((DATA / "greedy.json").read_text())["cases"]

# Measured: 3.6e-5 from float64, 5.8e-5 from transformers in float32, which is itself 5.4e-5 from float64. Another CPU
# sums in another order; four times the distance between two good implementations leaves room for that.
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def model(model_path):
    return Model.load(model_path, kernels="reference")


@pytest.mark.parametrize("length", [1, 7, 64, 300])
def test_reference_logits_are_those_of_float32_transformers(model, length):
    with np.load(DATA / "logits.npz") as golden:
        token_ids = tuple(golden[f"ids_{length}"].tolist())
        logits = model.forward([Chunk(0, 0, token_ids, length)], model.new_cache(1, length, "float32"))
        np.testing.assert_allclose(logits[-1], golden[f"logits_{length}"], atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(logits[-1], golden[f"logits64_{length}"], atol=TOLERANCE, rtol=0)
        np.testing.assert_array_equal(logits.argmax(axis=-1), golden[f"argmax_all_{length}"])


@pytest.mark.parametrize("case", GREEDY, ids=[case["prompt"][:30] for case in GREEDY])
def test_greedy_continuations_are_those_of_float32_transformers(model, case):
    """All 32 ids, although the two likeliest logits are at times only 0.003 apart."""
    assert model.tokenizer.encode(case["rendered"]) == case["prompt_ids"]
    generation = generate(
        model, model.tokenizer, case["prompt_ids"], SamplingParams(temperature=0, max_tokens=32), eos_ids=frozenset()
    )
    assert list(generation.ids) == case["greedy_ids"]


def test_a_request_in_company_gets_the_bits_it_gets_alone(model):
    """Eight prompts at once, in chunks, through float16 slots that were used before."""
    prompts = [tuple(case["prompt_ids"]) for case in GREEDY]
    alone = [model.forward([Chunk(0, 0, ids)], model.new_cache(1, 64, "float16"))[0] for ids in prompts]
    cache = model.new_cache(len(prompts), 64, "float16")
    model.forward([Chunk(slot, 0, ids[::-1]) for slot, ids in enumerate(prompts)], cache)
    for start in range(0, max(map(len, prompts)), 9):
        chunks = [
            Chunk(slot, start, ids[start : start + 9], int(start + 9 >= len(ids)))
            for slot, ids in enumerate(prompts)
            if start < len(ids)
        ]
        logits = iter(model.forward(chunks, cache))
        for chunk in chunks:
            if chunk.n_logits:
                np.testing.assert_array_equal(next(logits), alone[chunk.slot])
