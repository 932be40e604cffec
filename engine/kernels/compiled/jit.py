"""From LLVM IR to callable machine code, kept on disk between runs.

The folder's name holds a hash of every source file of this package, the CPU path and the llvmlite version: an object
file found there is the one that would be made. Files appear whole (written aside, then renamed), so that processes
may share the folder. Each begins with a digest of the rest: a file that a power cut or a bad disk has spoilt would
crash the process, or, worse, compute something else.
"""

import hashlib
import logging
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import llvmlite
from llvmlite import binding as llvm
from llvmlite import ir

from engine.cache_folder import cache_folder
from engine.kernels.compiled.isa import CPUPath

DIGEST_BYTES = 32
KEPT_FOLDERS = 8
"""So many versions' code stays on disk, the newest."""
_log = logging.getLogger("lockstep.kernels")
_FOLDER_NAME = re.compile(r".+-[0-9a-f]{16}")


class Library:
    """Machine code for one CPU path, compiled module by module as it is asked for.

    `build` functions get an empty module and fill it; the name of a module must say everything its code depends on.
    """

    def __init__(self, path: CPUPath, folder: Path | None = None) -> None:
        self.path = path
        self.num_compiled = 0
        self._folder = (folder or cache_folder() / "kernels") / _fingerprint(path)
        self._machine = path.target_machine()
        empty = llvm.parse_assembly("")
        empty.triple = path.triple
        self._engine = llvm.create_mcjit_compiler(empty, self._machine)
        self._loaded: set[str] = set()
        self._addresses: dict[tuple[str, str], int] = {}

    def address(self, module: str, function: str, build: Callable[[ir.Module], object]) -> int:
        """Where `function` of `module` is in memory; the module is compiled if neither memory nor disk has it."""
        known = self._addresses.get((module, function))
        if known is not None:
            return known
        if module not in self._loaded:
            code = self._cached(module) or self._compile(module, build)
            self._engine.add_object_file(code)
            self._engine.finalize_object()
            self._loaded.add(module)
        address = int(self._engine.get_function_address(f"{module}.{function}"))
        assert address, f"{module} has no function {function}"
        self._addresses[module, function] = address
        return address

    def assembly(self, module: str, build: Callable[[ir.Module], object]) -> str:
        """The module as assembly text, for people and for tests of paths this CPU cannot run."""
        return str(self._machine.emit_assembly(self._optimized(module, build)))

    def _cached(self, module: str) -> llvm.ObjectFileRef | None:
        try:
            content = (self._folder / f"{module}.o").read_bytes()
        except OSError:
            return None
        digest, code = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
        return llvm.ObjectFileRef.from_data(code) if digest == _digest(code) else None

    def _compile(self, module: str, build: Callable[[ir.Module], object]) -> llvm.ObjectFileRef:
        _log.info("compiling kernels for this CPU, once: %s", module)
        code = bytes(self._machine.emit_object(self._optimized(module, build)))
        self.num_compiled += 1
        try:
            if not self._folder.exists():
                self._folder.mkdir(parents=True, exist_ok=True)
                _remove_stale(self._folder.parent)
            _write_whole(self._folder / f"{module}.o", _digest(code) + code)
        except OSError:
            pass  # a cache that cannot be written costs time at the next start, nothing else
        return llvm.ObjectFileRef.from_data(code)

    def _optimized(self, module: str, build: Callable[[ir.Module], object]) -> llvm.ModuleRef:
        source = ir.Module(name=module)
        source.triple = self.path.triple
        source.data_layout = str(self._machine.target_data)
        build(source)
        parsed = llvm.parse_assembly(str(source))
        parsed.verify()
        # Kernels are vectorised by hand; LLVM's own vectorisers and unroller would only cost compile time.
        options = llvm.create_pipeline_tuning_options(speed_level=2)
        options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
        passes = llvm.create_pass_builder(self._machine, options)
        passes.getModulePassManager().run(parsed, passes)
        return parsed


def _digest(code: bytes) -> bytes:
    return hashlib.sha256(code).digest()


def _write_whole(path: Path, content: bytes) -> None:
    """Write `content` aside and rename it. Raises `OSError`. If it fails, nothing is left of it."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as aside:
        try:
            aside.write(content)
            aside.flush()
            Path(aside.name).replace(path)
        except BaseException:
            Path(aside.name).unlink(missing_ok=True)
            raise


def _remove_stale(parent: Path) -> None:
    """Remove the oldest folders. A process that still uses one has its code in memory, or compiles it again."""
    folders = [path for path in parent.iterdir() if _FOLDER_NAME.fullmatch(path.name)]
    for path in sorted(folders, key=_modified, reverse=True)[KEPT_FOLDERS:]:
        shutil.rmtree(path, ignore_errors=True)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another process has removed it
        return 0


def _fingerprint(path: CPUPath) -> str:
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    digest.update(repr((path.triple, path.cpu, path.features, llvmlite.__version__, llvm.llvm_version_info)).encode())
    return f"{path.name}-{digest.hexdigest()[:16]}"
