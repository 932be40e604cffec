from pathlib import Path

from engine.cache_folder import cache_folder
from engine.kernels.compiled import isa
from engine.kernels.compiled.jit import Library
from tests.engine.kernels.compiled.test_jit import answer


def test_the_folder_can_be_chosen_and_is_the_users_otherwise(monkeypatch, tmp_path):
    monkeypatch.delenv("LOCKSTEP_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "lockstep"
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.setenv("LOCKSTEP_CACHE", "")
    assert cache_folder() == tmp_path / "lockstep"


def test_compiled_kernels_are_kept_there(monkeypatch, tmp_path):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    answer(Library(isa.detect()))
    assert [file.name for file in Path(tmp_path).glob("kernels/*/*")] == ["m.o"]
