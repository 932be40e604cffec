"""What the tests of the whole server share."""

from pathlib import Path

import pytest

from clients.pull import DEFAULT_MODEL, DownloadError, resolve


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The default model's file, fetched once into the user's cache folder as `lockstep pull` does."""
    try:
        return resolve(DEFAULT_MODEL)
    except DownloadError as error:
        pytest.skip(f"the default model cannot be downloaded here: {error}")
