from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from tests.scheduler.serve import rig


@pytest.fixture
async def serve() -> AsyncIterator[rig.Serve]:
    """Start servers; they are stopped when the test ends."""
    async with AsyncExitStack() as stack:

        async def start(*args, **options) -> rig.Rig:
            return await stack.enter_async_context(rig.serve(*args, **options))

        yield start


@pytest.fixture
async def server(serve: rig.Serve) -> rig.Rig:
    """A server as it is by default."""
    return await serve()
