"""The CPU paths: which instruction sums four byte products, and what else a path can rely on.

Every path computes the same integers. Floats differ between paths only where a CPU has no fused multiply-add.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

from llvmlite import binding as llvm
from llvmlite import ir

from engine.kernels.compiled import dots
from engine.kernels.compiled.lang import F16, F32, I16, I32, Function, I32x16, Value, vector


@dataclass(frozen=True)
class CPUPath:
    """One way to compile every kernel.

    `cpu` and `features` are LLVM's; `registers` vectors of 16 lanes fit into the CPU's; `rows_together` activation rows
    go through `dots` side by side; `has_float16` and `has_fma` say that the conversion and the fused multiply-add are
    instructions.
    """

    name: str
    triple: str
    cpu: str
    features: str
    registers: int
    dots: dots.Dots
    rows_together: int
    has_float16: bool = True
    has_fma: bool = True

    def fma(self, f: Function, a: Value, b: Value, c: Value) -> Value:
        """Return a * b + c, rounded once where the CPU can."""
        if not self.has_fma:
            return a * b + c
        vectors = [v if isinstance(v.type, ir.VectorType) else v.splat() for v in (a, b, c)]
        return f.intrinsic("llvm.fma.v16f32", vectors[2].type, *vectors)

    def load_float16(self, pointer: Value) -> Value:
        """Sixteen float16 at `pointer` as float32."""
        if self.has_float16:
            return pointer.load(vector(F16)).to(F32)
        # The float16's exponent and fraction, moved into a float32's place, are the number divided by 2^112.
        bits = pointer.load(vector(I16)).zero_extend(I32)
        magnitude = ((bits & 0x7FFF) << 13).bitcast(vector(F32)) * 2.0**112
        return (magnitude.bitcast(I32x16) | ((bits & 0x8000) << 16)).bitcast(vector(F32))

    def to_float16(self, f: Function, value: Value) -> Value:
        """Sixteen float32 as the bits of float16, rounded to nearest even; what is too large becomes infinite."""
        if self.has_float16:
            return value.to(F16).bitcast(vector(I16))
        bits = value.bitcast(I32x16)
        sign, magnitude = (bits >> 16) & 0x8000, bits & 0x7FFFFFFF
        # Below 2^-14 the float16 is a multiple of 2^-24: adding 1/2 lets the float32 addition round to one.
        small = (magnitude.bitcast(vector(F32)) + 0.5).bitcast(I32x16) - 0x3F000000
        normal = (magnitude - (112 << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13
        infinite = f.constant(I32x16, 0x7C00)
        rounded = (magnitude < (113 << 23)).select(small, normal)
        rounded = (magnitude >= 0x477FF000).select(infinite, rounded)
        return (rounded | sign).to(I16)

    def target_machine(self) -> llvm.TargetMachine:
        """LLVM's code generator for this path."""
        _host_features()
        if not self.triple.startswith(llvm.get_process_triple().split("-", maxsplit=1)[0]):
            llvm.initialize_all_targets()
            llvm.initialize_all_asmprinters()
        target = llvm.Target.from_triple(self.triple)
        return target.create_target_machine(cpu=self.cpu, features=self.features, opt=3, jit=True)


class _Kind(NamedTuple):
    """A path before it is known for which CPU: what it needs, and the oldest CPU that has it."""

    registers: int
    dots: dots.Dots
    rows_together: int
    needs: tuple[str, ...]
    oldest: str
    architecture: str
    is_plain: bool = False


_KINDS = {  # the fastest first
    "avx512-vnni": _Kind(32, dots.vpdpbusd_512, 8, ("avx512vnni", "avx512bw", "avx512vl"), "icelake-server", "x86_64"),
    "avx-vnni": _Kind(8, dots.vpdpbusd_256, 4, ("avxvnni", "fma", "f16c"), "alderlake", "x86_64"),
    "avx2": _Kind(8, dots.pmaddubsw, 4, ("avx2", "fma", "f16c"), "haswell", "x86_64"),
    "neon-dot": _Kind(8, dots.sdot, 1, ("dotprod",), "neoverse-n1", "aarch64"),
    "plain": _Kind(4, dots.plain, 1, (), "", "", is_plain=True),
}
NAMES = tuple(_KINDS)


def can_run(name: str) -> bool:
    """Whether this CPU has what path `name` needs."""
    return all(_host_features().get(feature, False) for feature in _KINDS[name].needs)


def detect() -> CPUPath:
    """The fastest path this CPU has, compiled for this very CPU."""
    name = next(name for name in NAMES if can_run(name))
    return _path(name, llvm.get_process_triple(), llvm.get_host_cpu_name(), _host_features().flatten())


def named(name: str) -> CPUPath:
    """Path `name` for the oldest CPU that has it, whether or not this one does; one of `NAMES`."""
    kind, triple = _KINDS[name], llvm.get_process_triple()
    if kind.architecture and not triple.startswith(kind.architecture):
        triple = f"{kind.architecture}-unknown-linux-gnu"
    # The oldest x86-64 has a name of its own; elsewhere LLVM's default is the oldest.
    oldest = kind.oldest or ("x86-64" if triple.startswith("x86_64") else "")
    return _path(name, triple, oldest, "")


def _path(name: str, triple: str, cpu: str, features: str) -> CPUPath:
    kind = _KINDS[name]
    is_modern = not kind.is_plain
    return CPUPath(name, triple, cpu, features, kind.registers, kind.dots, kind.rows_together, is_modern, is_modern)


@functools.cache
def _host_features() -> llvm.FeatureMap:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.get_host_cpu_features()
