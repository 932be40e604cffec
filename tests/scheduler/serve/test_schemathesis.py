"""Calls made up from our OpenAPI document, right ones and wrong ones: each gets an answer the document describes."""

import asyncio
import threading
from contextlib import AsyncExitStack

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings

from scheduler.serve.http.docs.openapi import openapi_document
from scheduler.serve.http.routes import routing_table
from tests.scheduler.serve import rig

pytestmark = [pytest.mark.schemathesis, pytest.mark.slow]

EXAMPLES_A_PATH = 5
"""Beside those that try each field's limits and types one by one."""


class _ServerThread:
    """A rig in an event loop of its own: schemathesis calls from the test's thread."""

    def __init__(self):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._stack = AsyncExitStack()

    def _run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(rig.HANG_GUARD_S)

    def __enter__(self):
        self._thread.start()
        self.rig = self._run(self._stack.enter_async_context(rig.serve(max_len=64, request_timeout=5)))
        return self

    def __exit__(self, *_):
        self._run(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.rig.port}"


@pytest.fixture(scope="module")
def url():
    with _ServerThread() as server:
        yield server.url


def _schema():
    checks = {
        # What a call may be depends on the model too: which ids are tokens, how long a prompt is.
        "positive_data_acceptance": {"enabled": False},
        "not_a_server_error": {"expected-statuses": ["2xx", "4xx", 501]},
    }
    config = schemathesis.Config.from_dict({"checks": checks})
    schema = schemathesis.openapi.from_dict(openapi_document(routing_table()), config=config)
    return schema.exclude(path="/v1/chat/completions/render")  # takes what a chat completion takes, in the same code


@_schema().parametrize()
@settings(
    max_examples=EXAMPLES_A_PATH,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),  # bodies of sixty fields are large and slow to make up
)
def test_every_call_is_answered_as_the_document_says(case, url):
    case.call_and_validate(base_url=url, timeout=rig.HANG_GUARD_S)
