"""What the tests of the whole server share."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from clients.pull import DEFAULT_MODEL, DownloadError, resolve

collect_ignore = ["real_clients"]  # `make test-clients` runs them, by the clients' own interpreters

REAL_MODEL = {Path(__file__).parent / folder for folder in ("e2e", "cases")}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What stands in the folders of the real model is marked `e2e`."""
    for item in items:
        if REAL_MODEL & set(item.path.parents):
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The default model's file, fetched once into the user's cache folder as `lockstep pull` does."""
    try:
        return resolve(DEFAULT_MODEL)
    except DownloadError as error:
        pytest.skip(f"the default model cannot be downloaded here: {error}")


@pytest.fixture
def untouched_logging() -> Iterator[None]:
    """What a test configures of logging is undone."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
