"""Whatever is asked, near to what is right or far from it, is answered or refused in the envelope, and nothing stays.

Bodies are made from the request Structs themselves: a new field or a new Struct is fuzzed from the day it is there.
"""

import asyncio
import importlib
import json
import pkgutil
from contextlib import AsyncExitStack
from dataclasses import dataclass

import aiohttp
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.chat import ChatTemplate
from scheduler.core import Scheduler
from scheduler.serve import wire
from scheduler.serve.app import Server
from scheduler.serve.load import Loaded, load
from scheduler.serve.settings import ServeSettings
from scheduler.serve.wire.chat import ChatRequest
from scheduler.serve.wire.completions import CompletionRequest
from scheduler.serve.wire.llama import LlamaRequest
from scheduler.serve.wire.socket import Auth, Cancel, Generate, SocketEvent
from scheduler.serve.wire.tokens import DetokenizeRequest, TemplateRequest, TokenizeRequest
from tests.fakes import ByteTokenizer, FakeBackend, mixed
from tests.live_server import Reply, parse_sse, strict_json
from tests.scheduler.serve.rig import HANG_GUARD_S, until
from tests.tiny_model import CHATML, write_tiny_llama

pytestmark = pytest.mark.slow

SLOTS = 4
CONTEXT = 48

HI = [{"role": "user", "content": "Hi"}]
CALLS = {
    CompletionRequest: ("/v1/completions", {"prompt": "Hi", "max_tokens": 3}),
    ChatRequest: ("/v1/chat/completions", {"messages": HI, "max_tokens": 3}),
    LlamaRequest: ("/completion", {"prompt": "Hi", "n_predict": 3}),
    TemplateRequest: ("/apply-template", {"messages": HI}),
    TokenizeRequest: ("/tokenize", {"prompt": "Hi"}),
    DetokenizeRequest: ("/detokenize", {"tokens": [7, 8]}),
}
"""Where each body goes, and one that is right."""
LINES = {
    Generate: {"op": "generate", "id": 1, "prompt": "Hi", "max_tokens": 3},
    Cancel: {"op": "cancel", "id": 1},
    Auth: {"op": "auth", "key": "x"},
}

# What JSON can say, and what Python's encoder says although JSON cannot: NaN, infinities, halves of a surrogate pair.
_integers = (
    st.integers(0, 5) | st.integers(-2, 300) | st.sampled_from([2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 10**400])
)
_floats = st.floats(0, 1) | st.floats() | st.sampled_from([1.0, 2.0, -2.0, -0.0, 5e-324, 1e-40, 1e39, 1.7e308])
_texts = (
    st.sampled_from(["", " ", "a", "stop", "<|im_end|>", "\u2028", "\ud800", "\x00", "😀", "a" * 300])
    | st.text(max_size=8)
    | st.text(st.characters(), max_size=3)
)
_json = st.recursive(
    st.none() | st.booleans() | _integers | _floats | _texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts, inner, max_size=3),
    max_leaves=5,
)
_ids = st.lists(st.integers(0, 255) | _integers, max_size=5)
_parts = st.fixed_dictionaries({"type": st.just("text") | _json, "text": _texts | _json})
_messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]) | _json},
    optional={"content": _texts | st.lists(_parts, max_size=3) | _json, "name": _json, "tool_calls": _json},
)
SHAPES = {
    "prompt": _texts | st.lists(_texts, max_size=4) | _ids | st.lists(_ids, max_size=4),
    "tokens": _ids,
    "messages": st.lists(_messages, max_size=4),
    "op": st.sampled_from(["generate", "cancel", "auth"]),
    "id": st.integers(0, 2) | _texts,
}
"""Fields of which the type says less than is asked of them."""


def _fitting(kind: msgspec.inspect.Type) -> st.SearchStrategy:
    """Values of a field's type, mostly; not all of them in the range that is allowed."""
    match kind:
        case msgspec.inspect.Metadata():
            return _fitting(kind.type)
        case msgspec.inspect.UnionType():
            return st.one_of(*map(_fitting, kind.types))
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.IntType():
            return _integers
        case msgspec.inspect.FloatType():
            return _floats
        case msgspec.inspect.StrType():
            return _texts
        case msgspec.inspect.ListType():
            return st.lists(_fitting(kind.item_type), max_size=5)
        case msgspec.inspect.DictType():
            return st.dictionaries(_fitting(kind.key_type).map(str), _fitting(kind.value_type), max_size=4)
        case msgspec.inspect.StructType():
            return st.fixed_dictionaries({}, optional={f.encode_name: _fitting(f.type) for f in kind.fields})
        case _:
            return _json


def _bodies(struct: type[msgspec.Struct], right: dict) -> st.SearchStrategy[bytes]:
    """`right` with some fields changed, added or taken away; now and then damaged as bytes, too."""
    fields = {f.encode_name: _fitting(f.type) for f in msgspec.inspect.type_info(struct).fields}
    fields |= {name: shape for name, shape in SHAPES.items() if name in right or name in fields}
    changes = st.lists(
        st.sampled_from(sorted(fields)).flatmap(lambda name: st.tuples(st.just(name), fields[name])), max_size=4
    ).map(dict)
    others = st.dictionaries(st.sampled_from(sorted(fields)) | _texts, _json, max_size=2)
    nearly = st.builds(lambda changed, other: {**right, **other, **changed}, changes, st.just({}) | others)
    gone = st.sets(st.sampled_from(sorted(right)))
    fewer = st.builds(lambda body, gone: {k: v for k, v in body.items() if k not in gone}, nearly, gone)
    return st.one_of(nearly, nearly, nearly, fewer, _json).map(_encoded).flatmap(_perhaps_damaged)


def _encoded(body) -> bytes:
    return json.dumps(body).encode()


def _perhaps_damaged(body: bytes) -> st.SearchStrategy[bytes]:
    place = st.integers(0, len(body))
    cut = st.builds(lambda at: body[:at], place)
    hit = st.builds(lambda at, noise: body[:at] + noise + body[at + 1 :], place, st.binary(max_size=3))
    return st.one_of(*[st.just(body)] * 8, cut, hit)


@dataclass
class Fuzzed:
    """A server that lives in an event loop of its own, so that many examples may be sent to it."""

    runner: asyncio.Runner
    server: Server
    session: aiohttp.ClientSession

    def post(self, path: str, body: bytes) -> None:
        self.runner.run(self._post(path, body))

    def send(self, lines: list[bytes]) -> None:
        self.runner.run(self._send(lines))

    async def _post(self, path: str, body: bytes) -> None:
        async with asyncio.timeout(HANG_GUARD_S):
            async with self.session.post(self.server.url + path, data=body) as response:
                headers = {name.lower(): value for name, value in response.headers.items()}
                reply = Reply(response.status, headers, await response.read())
            if reply.status != 200:
                assert reply.status < 500, reply.body
                reply.refused(reply.status)
            elif headers["content-type"].startswith("text/event-stream"):
                stream = parse_sse(reply.body, has_done=path != "/completion")
                assert all("error" not in chunk for chunk in stream.chunks)
            else:
                strict_json(reply.body)
        await self._idle()

    async def _send(self, lines: list[bytes]) -> None:
        async with asyncio.timeout(HANG_GUARD_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.server.jsonl_port)
            writer.write(b"".join(line + b"\n" for line in lines))
            writer.write_eof()
            answer = await reader.read()
            writer.close()
            for line in filter(None, answer.split(b"\n")):
                event = strict_json(line)
                msgspec.json.decode(line, type=SocketEvent)
                assert event["event"] != "error" or event["error"]["type"] != "server_error", event
        await self._idle()

    async def _idle(self) -> None:
        engine = self.server._serving.get().engine
        await until(lambda: engine.num_running == engine.num_waiting == 0)
        assert {slot.state for slot in engine.slots()} == {"idle"}


def _fakes(settings: ServeSettings) -> Loaded:
    tokenizer = ByteTokenizer()
    scheduler = Scheduler(
        n_slots=SLOTS, max_len=CONTEXT, prefill_chunk=8, max_queue=settings.max_queue, eos_ids=tokenizer.eos_ids
    )
    template = ChatTemplate(CHATML, bos_token="", eos_token="<|im_end|>", special_tokens=ByteTokenizer.specials)
    return Loaded(scheduler, FakeBackend(next_token=mixed), tokenizer, template, CONTEXT, "fp_fake")


@pytest.fixture(scope="module", params=["fakes", "model"])
def fuzzed(request, tmp_path_factory):
    """Over the fakes, and over a model with its real tokenizer, template and sampler."""
    path = write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", n_layers=1)
    given = ServeSettings(
        model=path, port=0, jsonl_port=0, slots=SLOTS, context=CONTEXT, max_queue=32, kernels="reference"
    )

    async def start(stack: AsyncExitStack) -> tuple[Server, aiohttp.ClientSession]:
        server = await stack.enter_async_context(Server(given))
        await server.start(_fakes if request.param == "fakes" else load)
        return server, await stack.enter_async_context(aiohttp.ClientSession())

    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        stack = AsyncExitStack()
        yield Fuzzed(runner, *runner.run(start(stack)))
        runner.run(stack.aclose())


bounded = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("struct", CALLS, ids=lambda struct: struct.__name__)
def test_every_body_is_answered_or_refused_and_leaves_nothing(fuzzed, struct):
    path, right = CALLS[struct]

    @bounded
    @given(_bodies(struct, right))
    def check(body):
        fuzzed.post(path, body)

    check()


@pytest.mark.parametrize("struct", LINES, ids=lambda struct: struct.__name__)
def test_every_line_is_answered_or_refused_and_leaves_nothing(fuzzed, struct):
    @bounded
    @given(st.lists(_bodies(struct, LINES[struct]), min_size=1, max_size=3))
    def check(lines):
        fuzzed.send(lines)

    check()


def test_every_request_struct_is_fuzzed():
    names = [f"{wire.__name__}.{module.name}" for module in pkgutil.iter_modules(wire.__path__)]
    modules = [importlib.import_module(name) for name in names]
    structs = {value for module in modules for name, value in vars(module).items() if name.endswith("Request")}
    assert structs == set(CALLS)
