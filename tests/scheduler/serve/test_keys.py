"""Keys from a file that changes, and what is said where it is none."""

import pytest

from scheduler.serve.keys import ApiKeys, KeyFileError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys"


def test_without_keys_none_is_needed():
    assert not ApiKeys().are_needed
    assert ApiKeys(["k"]).are_needed


def test_keys_are_bytes(path):
    path.write_bytes(b"\xff\xfe\n")
    keys = ApiKeys(["s\u00e9cret"], path)
    assert keys.allow("s\u00e9cret".encode())
    assert keys.allow(b"\xff\xfe")
    assert not keys.allow(b"secret")
    assert not keys.allow(b"")


def test_a_reload_replaces_the_files_keys_and_leaves_the_given_ones(path):
    path.write_text("old\n")
    keys = ApiKeys(["given"], path)
    path.write_text("new\n")
    assert keys.allow(b"old")
    keys.reload()
    assert [keys.allow(key) for key in (b"old", b"new", b"given")] == [False, True, True]


@pytest.mark.parametrize("content", ["", "# only this\n\n", "a key\n", None])
def test_a_file_without_keys_is_refused_and_never_opens_the_door(path, content):
    path.write_text("old\n")
    keys = ApiKeys([], path)
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(KeyFileError, match="keys: ") as refusal:
        keys.reload()
    assert "a key" not in str(refusal.value)
    assert keys.allow(b"old")
    assert not keys.allow(b"")
    with pytest.raises(KeyFileError):
        ApiKeys([], path)


def test_keys_are_not_to_be_seen(path):
    path.write_text("filed-secret\n")
    keys = ApiKeys(["given-secret"], path)
    assert "secret" not in repr(vars(keys))
