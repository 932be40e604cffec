"""What is ready to tick is ready for every request."""

import logging

from engine.kernels.compiled import sampling
from engine.model import Model
from engine.params import SamplingParams
from scheduler.output import TokensOnly
from scheduler.prepare import prepare
from scheduler.request import Request
from tests.tiny_model import write_tiny_llama

EVERY_WAY_TO_CHOOSE = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, logprobs=2, repetition_penalty=1.2),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.01, typical_p=0.9, logprobs=1),
    SamplingParams(temperature=0.7, frequency_penalty=0.5),
)


def test_nothing_is_compiled_after_preparing(tmp_path, monkeypatch, caplog):
    """Each request would wait for it, with all that run beside it."""
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    sampling._kernels.cache_clear()
    caplog.set_level(logging.INFO, "lockstep.kernels")
    model = Model.load(write_tiny_llama(tmp_path / "tiny.gguf", quant="Q8_0"), kernels="compiled")
    scheduler, backend = prepare(model, model.new_cache(4, 64), prefill_chunk=8, max_queue=9)
    assert [record for record in caplog.records if record.name == "lockstep.kernels"]
    caplog.clear()

    for index, params in enumerate(EVERY_WAY_TO_CHOOSE):
        request = Request(id=str(index), prompt_ids=tuple(range(3, 20)), params=params)
        scheduler.submit(request, 0.0, TokensOnly)
    while (batch := scheduler.schedule()) is not None:
        scheduler.update(batch, backend.run(batch), 0.0)

    assert not [record for record in caplog.records if record.name == "lockstep.kernels"]
