import hashlib
import os
import re
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from struct import pack
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ModelFileError
from engine.gguf import GGUFFile, TensorInfo
from tests.gguf_writer import ARRAY, BOOL, STRING, RawTensor, Typed, gguf_bytes, text, write_gguf
from tests.tiny_model import write_tiny_llama

WEIGHTS = np.arange(64, dtype=np.float32).reshape(2, 32)


def refusal(path: Path, content: bytes | None = None) -> ModelFileError:
    """What opening `path` raises; its message is one line that names the file."""
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelFileError) as caught:
        GGUFFile.open(path)
    error = caught.value
    assert error.path == str(path)
    assert str(path) in str(error)
    assert error.reason in str(error)
    assert "\n" not in str(error)
    return error


def with_tensors(*tensors: tuple[str, Any]) -> bytes:
    return gguf_bytes((), tensors)


# --- files that are read


def test_everything_the_gguf_package_writes_is_read_as_it_was_meant(tmp_path):
    path = tmp_path / "oracle.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    numbers = {
        "u1": 200,
        "i1": -3,
        "u2": 40000,
        "i2": -300,
        "u4": 2**32 - 1,
        "i4": -(2**31),
        "u8": 2**64 - 1,
        "i8": -(2**63),
    }
    writer.add_uint8("u1", numbers["u1"])
    writer.add_int8("i1", numbers["i1"])
    writer.add_uint16("u2", numbers["u2"])
    writer.add_int16("i2", numbers["i2"])
    writer.add_uint32("u4", numbers["u4"])
    writer.add_int32("i4", numbers["i4"])
    writer.add_uint64("u8", numbers["u8"])
    writer.add_int64("i8", numbers["i8"])
    writer.add_float32("f4", 0.5)
    writer.add_float64("f8", 0.1)
    writer.add_bool("yes", True)
    writer.add_bool("no", False)
    writer.add_string("text", "Grüße, 世界 \U0001f600\n")
    writer.add_array("strings", ["", "a", "é"])
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("floats", [0.5, -1.5])
    writer.add_array("bools", [True, False])
    plain = np.random.default_rng(0).normal(size=(3, 5, 32)).astype(np.float32)
    quantized = gguf.quants.quantize(plain, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("plain", plain)
    writer.add_tensor("quantized", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with GGUFFile.open(path) as file:
        assert file.version == 3
        assert file.path == path
        assert {key: file.metadata[key] for key in numbers} == numbers
        assert (file.metadata["f4"], file.metadata["f8"]) == (0.5, 0.1)
        assert file.metadata["yes"] is True
        assert file.metadata["no"] is False
        assert file.metadata["text"] == "Grüße, 世界 \U0001f600\n"
        assert file.metadata["strings"] == ["", "a", "é"]
        assert file.metadata["ints"].tolist() == [1, -2, 3]
        assert file.metadata["floats"].tolist() == [0.5, -1.5]
        assert file.metadata["bools"].tolist() == [True, False]
        assert file.metadata["bools"].dtype == np.bool_
        assert {name: (info.type_id, info.shape) for name, info in file.tensors.items()} == {
            "plain": (0, (3, 5, 32)),
            "quantized": (8, (3, 5, 32)),
        }
        assert file.data("plain").tobytes() == plain.tobytes()
        assert file.data("quantized").tobytes() == quantized.tobytes()


def test_a_whole_model_reads_as_the_gguf_package_reads_it(tmp_path):
    path = write_tiny_llama(tmp_path / "tiny.gguf", quant="Q5_1")
    oracle = gguf.GGUFReader(path)

    with GGUFFile.open(path) as file:
        keys = [key for key in oracle.fields if not key.startswith("GGUF.")]
        assert list(file.metadata) == keys
        for key in keys:
            expected = oracle.fields[key].contents()
            value = file.metadata[key]
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == expected
        assert file.tensors == {
            tensor.name: TensorInfo(
                tensor.name,
                int(tensor.tensor_type),
                tuple(tensor.shape.tolist()[::-1]),
                tensor.data_offset,
                tensor.n_bytes,
            )
            for tensor in oracle.tensors
        }
        assert all(file.data(tensor.name).tobytes() == tensor.data.tobytes() for tensor in oracle.tensors)


@pytest.mark.parametrize("version", [2, 3])
def test_versions_2_and_3_are_read(tmp_path, version):
    path = write_gguf(tmp_path / "x.gguf", {"key": "value"}, {"w": WEIGHTS}, version=version)

    file = GGUFFile.open(path)

    assert (file.version, file.metadata["key"]) == (version, "value")
    assert file.data("w").view(np.float32).tolist() == WEIGHTS.ravel().tolist()


@pytest.mark.parametrize("alignment", [8, 16, 32, 64, 4096])
def test_tensor_data_is_found_at_the_file_s_own_alignment(tmp_path, alignment):
    tensors = {"a": WEIGHTS[:, :7], "b": WEIGHTS}
    path = write_gguf(tmp_path / "x.gguf", {"general.alignment": alignment}, tensors)

    file = GGUFFile.open(path)

    assert all(info.offset % alignment == 0 for info in file.tensors.values())
    for name, weights in tensors.items():
        assert file.data(name).tobytes() == weights.tobytes()


def test_a_header_alone_is_a_valid_file(tmp_path):
    file = GGUFFile.open(write_gguf(tmp_path / "x.gguf"))

    assert (dict(file.metadata), dict(file.tensors)) == ({}, {})


def test_the_last_tensor_needs_no_padding_behind_it(tmp_path):
    content = with_tensors(("w", WEIGHTS[:, :7]))
    path = tmp_path / "x.gguf"
    path.write_bytes(content[:-8])

    assert GGUFFile.open(path).data("w").size == 56


def test_arrays_of_arrays_are_tuples_and_empty_arrays_are_empty(tmp_path):
    nested = Typed(
        ARRAY, pack("<IQ", ARRAY, 2) + pack("<IQ", STRING, 1) + text("a") + pack("<IQ", 4, 2) + pack("<II", 7, 8)
    )
    empty = Typed(ARRAY, pack("<IQ", 6, 0))

    metadata = GGUFFile.open(write_gguf(tmp_path / "x.gguf", {"nested": nested, "none": empty, "no_text": []})).metadata

    strings, numbers = metadata["nested"]
    assert (strings, numbers.tolist()) == (["a"], [7, 8])
    assert metadata["none"].size == 0
    assert metadata["no_text"] == []


def test_one_shard_of_one_is_a_whole_model(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", {"split.no": np.uint16(0), "split.count": np.uint16(1)}, {"w": WEIGHTS})

    assert "w" in GGUFFile.open(path).tensors


# --- asking an open file


@pytest.fixture
def file(tmp_path) -> Iterable[GGUFFile]:
    metadata = {
        "int": 3,
        "float": 0.5,
        "bool": True,
        "text": "a",
        "strings": ["a"],
        "numbers": np.arange(3, dtype=np.int32),
    }
    with GGUFFile.open(write_gguf(tmp_path / "x.gguf", metadata, {"w": WEIGHTS})) as opened:
        yield opened


def test_require_returns_a_value_of_the_kind_asked_for(file):
    assert file.require("int", int) == 3
    assert file.require("float", float) == 0.5
    assert file.require("bool", bool) is True
    assert file.require("text", str) == "a"
    assert file.require("strings", list) == ["a"]
    assert file.require("numbers", np.ndarray).tolist() == [0, 1, 2]
    assert file.get("int", int, 7) == 3
    assert file.get("absent", int, 7) == 7


def test_a_missing_key_is_named(file):
    with pytest.raises(ModelFileError, match="no such metadata key") as caught:
        file.require("llama.block_count", int)

    assert caught.value.subject == "llama.block_count"


@pytest.mark.parametrize(
    ("key", "kind"),
    [("int", float), ("float", int), ("bool", int), ("int", bool), ("text", int), ("text", list), ("strings", str),
     ("strings", np.ndarray), ("numbers", list), ("numbers", int)],
)  # fmt: skip
@pytest.mark.parametrize("ask", [GGUFFile.require, lambda file, key, kind: file.get(key, kind, None)])
def test_a_value_of_another_kind_is_refused_naming_the_key(file, key, kind, ask):
    with pytest.raises(ModelFileError, match=r"must be an? .*, and is an? ") as caught:
        ask(file, key, kind)

    assert caught.value.subject == key


def test_a_missing_tensor_is_named(file):
    with pytest.raises(ModelFileError, match="no such tensor") as caught:
        file.data("output.weight")

    assert caught.value.subject == "output.weight"


def test_data_is_a_view_that_cannot_be_written_and_outlives_the_file(file):
    data = file.data("w")

    assert not data.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        data[0] = 1
    file.close()
    assert data.tobytes() == WEIGHTS.tobytes()
    with pytest.raises(ValueError, match="is closed"):
        file.data("w")


def test_the_digest_is_of_every_byte_and_of_an_open_file(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", {}, {"w": WEIGHTS})
    with GGUFFile.open(path) as file:
        assert file.digest() == hashlib.blake2b(path.read_bytes()).digest()
    with pytest.raises(ValueError, match="is closed"):
        file.digest()


def test_metadata_and_tensors_cannot_be_changed(file):
    with pytest.raises(TypeError):
        file.metadata["int"] = 4
    with pytest.raises(TypeError):
        del file.tensors["w"]


# --- files that are refused


def test_a_path_that_is_no_readable_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").touch()

    assert refusal(tmp_path).reason == "is a directory, not a .gguf file"
    assert "no such file (`lockstep pull NAME`" in refusal(tmp_path / "absent.gguf").reason
    assert "not a regular file" in refusal(tmp_path / "pipe").reason
    assert "not a regular file" in refusal(Path("/dev/zero")).reason
    assert "cannot be opened" in refusal(tmp_path / "loop").reason
    assert "cannot be opened" in refusal(tmp_path / "file" / "x.gguf").reason
    assert "cannot be opened" in refusal(tmp_path / "null\0byte").reason
    assert "is empty" in refusal(tmp_path / "file").reason


def test_a_file_without_permission_is_refused(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "x.gguf")

    def denied(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")  # root, who may run these tests, is denied nothing

    monkeypatch.setattr(Path, "open", denied)

    assert "Permission denied" in refusal(path).reason


@pytest.mark.parametrize(
    "content",
    [b"GGML" + bytes(40), b"GGJT" + bytes(40), b"FUGG" + bytes(40), b"<!DOCTYPE html><html></html>", b"version https://git-lfs",
     b"PK\x03\x04", b"gguf" + bytes(40), b"G", b"\0" * 24, b"\n\n\n\n"],
)  # fmt: skip
def test_a_file_of_another_format_is_refused_with_its_first_bytes(tmp_path, content):
    error = refusal(tmp_path / "x.gguf", content)

    assert "not a GGUF file" in error.reason
    assert repr(content[:4]) in error.reason


@pytest.mark.parametrize("version", [0, 1, 4, 99, 2**32 - 1])
def test_another_version_is_refused(tmp_path, version):
    assert f"version {version};" in refusal(tmp_path / "x.gguf", gguf_bytes(version=version)).reason


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_big_endian_file_is_called_that(tmp_path, version):
    content = b"GGUF" + pack(">IQQ", version, 0, 0)

    assert "big-endian" in refusal(tmp_path / "x.gguf", content).reason


def test_a_big_endian_file_of_the_gguf_package_is_called_that(tmp_path):
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()

    assert "big-endian" in refusal(path).reason


@pytest.mark.parametrize("count", [1, 2, 1000, 2**31, 2**32, 2**63, 2**64 - 1])
def test_absurd_counts_are_refused(tmp_path, count):
    path = tmp_path / "x.gguf"
    array = Typed(ARRAY, pack("<IQ", 12, count))
    strings = Typed(ARRAY, pack("<IQ", STRING, count))
    arrays = Typed(ARRAY, pack("<IQ", ARRAY, count))

    assert f"{count} metadata keys" in refusal(path, gguf_bytes(n_keys=count)).reason
    assert f"{count} tensors" in refusal(path, gguf_bytes(n_tensors=count)).reason
    for value in (array, strings, arrays):
        error = refusal(path, gguf_bytes({"some.key": value})[: 24 + 8 + 8 + 4 + 12])
        assert f"{count} array elements" in error.reason
        assert error.subject == "some.key"


@pytest.mark.parametrize("length", [100, 2**31, 2**63, 2**64 - 1])
def test_a_string_that_leaves_the_file_is_refused_with_bytes_needed_and_present(tmp_path, length):
    path = tmp_path / "x.gguf"
    value = Typed(STRING, pack("<Q", length) + b"abc")
    element = Typed(ARRAY, pack("<IQ", STRING, 2) + text("a") + pack("<Q", length))
    key = b"GGUF" + pack("<IQQ", 3, 0, 1) + pack("<Q", length) + bytes(20)

    for content, subject in [
        (gguf_bytes({"k": value}), "k"),
        (gguf_bytes({"k": element}), "k"),
        (key, "metadata key 0"),
    ]:
        error = refusal(path, content)
        needed, present = map(int, re.search(r"needs (\d+) bytes up to here, has (\d+)", error.reason).groups())
        assert present == len(content)
        assert needed > length
        assert error.subject == subject


def test_absurd_numbers_cost_no_memory(tmp_path):
    path = tmp_path / "x.gguf"
    count = 10**9
    contents = [
        gguf_bytes(n_keys=count),
        gguf_bytes(n_tensors=count),
        gguf_bytes({"k": Typed(ARRAY, pack("<IQ", STRING, count))}),
        gguf_bytes({"k": Typed(ARRAY, pack("<IQ", 0, count))}),
        gguf_bytes({"k": Typed(STRING, pack("<Q", count))}),
        with_tensors(("w", RawTensor(0, (count,), b""))),
        with_tensors(("w", RawTensor(0, (32,), b"", offset=32 * count))),
    ]
    refusal(path, contents[0])

    tracemalloc.start()
    for content in contents:
        refusal(path, content)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 1 << 20


def test_keys_must_have_a_name_that_occurs_once_and_can_be_printed(tmp_path):
    path = tmp_path / "x.gguf"

    assert "name of 0 bytes" in refusal(path, gguf_bytes([("", 1)])).reason
    assert "name of 65536 bytes" in refusal(path, gguf_bytes([("k" * 65536, 1)])).reason
    assert "UTF-8" in refusal(path, gguf_bytes([(b"\xff\xfe", 1)])).reason
    assert "cannot be printed" in refusal(path, gguf_bytes([("a\nb", 1)])).reason
    assert "cannot be printed" in refusal(path, gguf_bytes([("a\0", 1)])).reason
    twice = refusal(path, gguf_bytes([("a.b", 1), ("c", 2), ("a.b", 1)]))
    assert ("twice" in twice.reason, twice.subject) == (True, "a.b")


@pytest.mark.parametrize("type_id", [13, 14, 255, 2**32 - 1])
def test_unknown_value_types_are_refused(tmp_path, type_id):
    for value in (Typed(type_id, bytes(8)), Typed(ARRAY, pack("<IQ", type_id, 0))):
        error = refusal(tmp_path / "x.gguf", gguf_bytes({"some.key": value}))
        assert f"unknown value type {type_id}" in error.reason
        assert error.subject == "some.key"


@pytest.mark.parametrize(
    "value",
    [b"\xff", b"caf\xe9", b"\xed\xa0\x80", [b"fine", b"\xc3"]],
    ids=["no start byte", "latin-1", "surrogate", "cut character in an array"],
)
def test_text_that_is_not_utf_8_is_refused(tmp_path, value):
    error = refusal(tmp_path / "x.gguf", gguf_bytes({"some.key": value}))

    assert "not UTF-8" in error.reason
    assert error.subject == "some.key"


@pytest.mark.parametrize("value", [Typed(BOOL, b"\x02"), Typed(ARRAY, pack("<IQ", BOOL, 3) + b"\x00\x01\xff")])
def test_a_boolean_that_is_neither_0_nor_1_is_refused(tmp_path, value):
    error = refusal(tmp_path / "x.gguf", gguf_bytes({"some.key": value}))

    assert "must be 0 or 1" in error.reason
    assert error.subject == "some.key"


@pytest.mark.parametrize("depth", [5, 100, 100_000])
def test_deeply_nested_arrays_are_refused(tmp_path, depth):
    error = refusal(tmp_path / "x.gguf", gguf_bytes({"some.key": Typed(ARRAY, pack("<IQ", ARRAY, 1) * depth)}))

    assert "nested more than 4 deep" in error.reason
    assert error.subject == "some.key"


@pytest.mark.parametrize("alignment", [0, 1, 3, 4, 24, 2**31, 2**33, -32, "32", 32.0, True, np.arange(3)])
def test_an_alignment_that_cannot_be_is_refused(tmp_path, alignment):
    path = tmp_path / "x.gguf"
    for tensors in ({}, {"w": WEIGHTS}):
        error = refusal(path, gguf_bytes({"general.alignment": alignment}, tensors))
        assert error.subject == "general.alignment"


@pytest.mark.parametrize("count", [2, 100, np.uint16(3), -1, "2", np.arange(2)])
def test_a_shard_of_a_split_model_is_refused(tmp_path, count):
    error = refusal(tmp_path / "x.gguf", gguf_bytes({"split.count": count}, {"w": WEIGHTS}))

    assert error.subject == "split.count"


@pytest.mark.parametrize("type_id", [39, 4, 5, 9, 15, 16, 24, 28, 31, 36, 2**32 - 1])
def test_a_tensor_type_that_is_not_read_is_named_with_the_tensor(tmp_path, type_id):
    error = refusal(
        tmp_path / "x.gguf",
        with_tensors(("w", WEIGHTS), ("blk.0.attn_q.weight", RawTensor(type_id, (256,), bytes(1024)))),
    )

    assert f"tensor type {type_id}," in error.reason
    assert error.subject == "blk.0.attn_q.weight"


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((), "has 0 dimensions"),
        ((1, 1, 1, 1, 1), "has 5 dimensions"),
        ((0,), "dimension of 0"),
        ((32, 0), "dimension of 0"),
        ((0, 32), "dimension of 0"),
        ((2**64 - 1,), "more than"),
        ((2**63,), "more than"),
        ((2**32, 2**32), "more than"),
        ((2**16, 2**16, 2**16, 2**16), "more than"),
        ((2**62,), "truncated"),
    ],
)
def test_impossible_dimensions_are_refused(tmp_path, shape, reason):
    error = refusal(tmp_path / "x.gguf", with_tensors(("w", RawTensor(0, shape, bytes(32)))))

    assert reason in error.reason
    assert error.subject == "w"


def test_an_absurd_number_of_dimensions_is_refused(tmp_path):
    content = b"GGUF" + pack("<IQQ", 3, 1, 0) + text("w") + pack("<I", 2**32 - 1) + bytes(64)

    assert "has 4294967295 dimensions" in refusal(tmp_path / "x.gguf", content).reason


@pytest.mark.parametrize(("type_id", "width"), [(2, 31), (8, 33), (8, 1), (12, 128), (14, 257)])
def test_rows_that_are_no_whole_number_of_blocks_are_refused(tmp_path, type_id, width):
    error = refusal(tmp_path / "x.gguf", with_tensors(("w", RawTensor(type_id, (256, width), bytes(1 << 17)))))

    assert f"rows of {width}" in error.reason
    assert error.subject == "w"


def test_tensors_must_have_a_name_that_occurs_once_and_can_be_printed(tmp_path):
    path = tmp_path / "x.gguf"

    assert "name of 0 bytes" in refusal(path, with_tensors(("", WEIGHTS))).reason
    assert "name of 65 bytes" in refusal(path, with_tensors(("w" * 65, WEIGHTS))).reason
    assert "UTF-8" in refusal(path, with_tensors((b"\xff", WEIGHTS))).reason
    assert "cannot be printed" in refusal(path, with_tensors(("w\r\n", WEIGHTS))).reason
    twice = refusal(path, with_tensors(("w", WEIGHTS), ("v", WEIGHTS), ("w", WEIGHTS)))
    assert ("twice" in twice.reason, twice.subject) == (True, "w")


@pytest.mark.parametrize("offset", [1, 4, 31, 33, 2**64 - 1])
def test_an_unaligned_offset_is_refused(tmp_path, offset):
    error = refusal(tmp_path / "x.gguf", with_tensors(("w", RawTensor(0, (2,), bytes(64), offset))))

    assert f"offset {offset}" in error.reason
    assert error.subject == "w"


@pytest.mark.parametrize("offset", [64, 2**32, 2**64 - 32])
def test_an_offset_outside_the_file_is_refused_with_bytes_needed_and_present(tmp_path, offset):
    content = with_tensors(("w", RawTensor(0, (2,), bytes(64), offset)))
    error = refusal(tmp_path / "x.gguf", content)

    assert f"needs {len(content) - 64 + offset + 8} bytes, has {len(content)}" in error.reason
    assert error.subject == "w"


@pytest.mark.parametrize("offset", [0, 32, 96])
def test_tensors_that_overlap_are_refused(tmp_path, offset):
    first = RawTensor(0, (32,), bytes(128), offset=0)
    second = RawTensor(0, (8,), bytes(128), offset=offset)
    for tensors in ([("a", first), ("b", second)], [("b", second), ("a", first)]):
        error = refusal(tmp_path / "x.gguf", with_tensors(*tensors))
        assert "overlaps" in error.reason
        assert error.subject in ("a", "b")


@pytest.mark.parametrize("missing", [1, 100, 255])
def test_truncated_tensor_data_is_refused_with_bytes_needed_and_present(tmp_path, missing):
    content = with_tensors(("first", WEIGHTS), ("last", WEIGHTS))
    error = refusal(tmp_path / "x.gguf", content[:-missing])

    assert f"needs {len(content)} bytes, has {len(content) - missing}" in error.reason
    assert error.subject == "last"


# --- whatever the bytes are

WHOLE = gguf_bytes(
    {"general.architecture": "llama", "tokens": ["a", "b"], "n": 3, "x": np.arange(3.0), "yes": True},
    {"w": WEIGHTS, "q": RawTensor(8, (2, 32), bytes(68))},
)


def test_a_file_cut_anywhere_is_refused(tmp_path):
    padding = 28
    for length in range(1, len(WHOLE) - padding):
        refusal(tmp_path / "x.gguf", WHOLE[:length])


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_damaged_header_is_read_or_refused_and_nothing_else_happens(tmp_path_factory, data):
    content = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(4, len(WHOLE) - 1))
        damage = data.draw(st.sampled_from([b"\0", b"\x01", b"\x7f", b"\xff", b"\xff" * 8, b"\0" * 8]))
        content[position : position + len(damage)] = damage
    path = tmp_path_factory.mktemp("damaged") / "x.gguf"
    path.write_bytes(content)

    try:
        file = GGUFFile.open(path)
    except ModelFileError:
        return
    assert all(file.data(name).size == info.n_bytes for name, info in file.tensors.items())
