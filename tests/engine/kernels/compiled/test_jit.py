import os
import resource
import shutil

import numpy as np
import pytest

from engine.kernels.compiled import isa
from engine.kernels.compiled.jit import KEPT_FOLDERS, Library
from engine.kernels.compiled.lang import I64, PTR, Function
from tests.engine.kernels.compiled.native import call


def build(module):
    f = Function(module, f"{module.name}.answer", [("out", PTR)], exported=True)
    f["out"].store(f.constant(I64, 42))
    f.finish()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "kernels"


def answer(library):
    out = np.zeros(1, np.int64)
    call(library.address("m", "answer", build), out)
    return int(out[0])


def test_a_module_is_compiled_once_for_memory_and_for_the_disk(folder):
    first, second = Library(isa.detect(), folder), Library(isa.detect(), folder)
    assert [answer(first), answer(first), first.num_compiled] == [42, 42, 1]
    assert [answer(second), second.num_compiled] == [42, 0]


def test_another_cpu_path_does_not_find_it(folder):
    answer(Library(isa.detect(), folder))
    other = Library(isa.named("plain"), folder)
    assert [answer(other), other.num_compiled] == [42, 1]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda _: b"",
        lambda _: b"not an object file",
        lambda code: code[: len(code) // 2],
        lambda code: bytes(len(code)),
        lambda code: code[:100] + bytes(len(code) - 100),
        lambda code: code.replace((42).to_bytes(4, "little"), (43).to_bytes(4, "little")),
    ],
    ids=["empty", "another kind", "cut", "zeros", "zeros behind its head", "another number in its code"],
)
def test_a_spoilt_file_is_compiled_again_and_replaced(folder, spoil):
    answer(Library(isa.detect(), folder))
    [file] = folder.glob("*/m.o")
    whole = file.read_bytes()
    file.write_bytes(spoil(whole))
    assert file.read_bytes() != whole
    again = Library(isa.detect(), folder)
    assert [answer(again), again.num_compiled] == [42, 1]
    assert file.read_bytes() == whole


def test_a_full_disk_costs_only_time_and_keeps_no_half_of_a_file(folder):
    library = Library(isa.detect(), folder)
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, allowed[1]))
    try:
        assert [answer(library), library.num_compiled] == [42, 1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)
    assert list(folder.glob("*/*")) == []


def test_a_new_version_removes_the_oldest_and_nothing_that_is_not_ours(folder):
    (folder / "my own folder").mkdir(parents=True)
    for i in range(KEPT_FOLDERS + 2):
        old = folder / f"plain-{i:016x}"
        old.mkdir()
        (old / "m.o").touch()
        os.utime(old, (i, i))
    answer(Library(isa.detect(), folder))
    kept = {path.name for path in folder.iterdir()}
    assert {"my own folder", "plain-0000000000000003"} < kept
    assert "plain-0000000000000002" not in kept
    assert len(kept) == 1 + KEPT_FOLDERS


def test_code_removed_while_it_is_in_use_is_compiled_again(folder):
    library = Library(isa.detect(), folder)
    answer(library)
    shutil.rmtree(next(folder.iterdir()))
    library.address("other", "answer", build)
    assert [answer(library), library.num_compiled] == [42, 2]
    assert [file.name for file in folder.glob("*/*")] == ["other.o"]


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path):
    blocked = tmp_path / "a file, not a folder"
    blocked.write_text("")
    library = Library(isa.detect(), blocked)
    assert [answer(library), library.num_compiled] == [42, 1]
