import contextlib
import json
import os

import aiohttp
import psutil
import pytest
import structlog

from engine.errors import ModelFileError
from engine.generate import generate
from engine.model import Model
from engine.params import SamplingParams
from scheduler.serve.app import Server
from scheduler.serve.load import CacheRoomError, _progress, load
from scheduler.serve.settings import ServeSettings
from tests.tiny_model import write_tiny_llama


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", max_context=128)


@contextlib.contextmanager
def loading(path, **fields):
    loaded = load(ServeSettings(model=path, kernels="reference", **fields))
    with contextlib.closing(loaded):
        yield loaded


def test_a_loaded_model_has_the_slots_and_the_context_asked_for_and_nothing_in_its_cache(path):
    with loading(path, slots=3, context=64) as loaded:
        assert loaded.max_len == 64
        assert len(loaded.scheduler.slots()) == 3
        cache = loaded.backend._cache
        assert (cache.n_slots, cache.max_len) == (3, 64)
        assert [cache.seq_len(slot=slot) for slot in range(3)] == [0, 0, 0]
        assert loaded.template is not None


@pytest.mark.parametrize("slots", [10**11, 10**15, 10**30])
def test_a_cache_the_system_has_no_room_for_is_refused_before_the_weights_are_read(path, slots):
    with (
        structlog.testing.capture_logs() as logs,
        pytest.raises(CacheRoomError, match=rf"^{slots} slots of 128 positions are .+ GiB .*--slots or --context$"),
    ):
        load(ServeSettings(model=path, slots=slots))
    assert [entry["event"] for entry in logs] == ["loading"]


def test_weights_that_cannot_be_packed_leave_no_process_that_renders_chats(path, monkeypatch):
    """It starts before them, to be ready when they are."""
    children = []

    def fail(*_args, **_options):
        children.extend(psutil.Process().children())
        raise ModelFileError(path, "has no weights")

    before = psutil.Process().children()
    monkeypatch.setattr(Model, "of", fail)
    with pytest.raises(ModelFileError, match="has no weights"):
        load(ServeSettings(model=path, kernels="reference"))
    (worker,) = set(children) - set(before)
    assert not worker.is_running()


def test_a_stage_is_told_of_now_and_then_and_at_its_end():
    report = _progress()
    with structlog.testing.capture_logs() as logs:
        for fraction in (0.0, 0.1, 0.26, 0.3, 0.9, 1.0, 1.0):
            report("packing weights", fraction)
    assert [entry["event"] for entry in logs] == [f"packing weights {percent} %" for percent in (0, 26, 90, 100)]


def test_more_threads_than_cpus_are_warned_of(path):
    threads = (os.cpu_count() or 1) + 1
    with structlog.testing.capture_logs() as logs, loading(path, threads=threads):
        pass
    (warning,) = [entry for entry in logs if entry["log_level"] == "warning"]
    assert warning["threads"] == threads


def test_the_fingerprint_tells_kv_dtypes_apart(path):
    with loading(path, kv_dtype="float16") as half, loading(path, kv_dtype="float32") as full:
        assert half.fingerprint != full.fingerprint


@pytest.mark.parametrize(("quant", "weights", "num_said"), [("F16", "auto", 1), ("F16", "f32", 0), ("Q8_0", "auto", 0)])
def test_rounding_of_float_weights_is_said_once(tmp_path, quant, weights, num_said):
    path = write_tiny_llama(tmp_path / "tiny.gguf", quant=quant)
    with structlog.testing.capture_logs() as logs:
        load(ServeSettings(model=path, weights=weights)).close()
    assert sum("rounded to 8 bits" in entry["event"] for entry in logs) == num_said


def test_the_fingerprint_tells_kept_weights_from_rounded_ones(tmp_path):
    path = write_tiny_llama(tmp_path / "tiny.gguf", quant="F16")
    kept, rounded = (Model.load(path, weights=weights).fingerprint("float16") for weights in ("f32", "auto"))
    assert kept != rounded


@pytest.mark.parametrize("broken", ["{{ 1 | nothing }}", "{% if %}"])
def test_a_template_that_does_not_compile_is_refused_at_the_start_and_leaves_no_process(tmp_path, broken):
    path = write_tiny_llama(tmp_path / "tiny.gguf", chat_template=broken)
    before = psutil.Process().children()  # a server that other tests share may be one
    with pytest.raises(ModelFileError, match=r"tiny\.gguf: tokenizer\.chat_template: does not compile: .*line 1"):
        load(ServeSettings(model=path, kernels="reference"))
    assert psutil.Process().children() == before


def test_a_file_that_is_no_model_is_refused(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match=r"x\.gguf"):
        load(ServeSettings(model=tmp_path / "x.gguf"))


async def test_the_text_served_is_that_of_generate(path):
    model = Model.load(path, kernels="reference")
    params = {"max_tokens": 12, "temperature": 1.0, "seed": 3}
    alone = generate(model, model.tokenizer, "Hello", SamplingParams(**params), kv_dtype="float16")
    async with Server(ServeSettings(model=path, port=0, kernels="reference")) as server:
        await server.start()
        async with aiohttp.ClientSession() as session:
            body = {"prompt": "Hello", "return_token_ids": True, **params}
            async with session.post(server.url + "/v1/completions", json=body) as response:
                choice = json.loads(await response.read())["choices"][0]
    assert choice["text"] == alone.text
    assert choice["finish_reason"] == alone.finish_reason
