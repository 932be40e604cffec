"""The CPU paths: which instruction sums four byte products, and what else a path can rely on.

Every path computes the same integers. Floats differ between paths only where a CPU has no fused multiply-add.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from llvmlite import binding as llvm
from llvmlite import ir

from engine.kernels.compiled.lang import F16, F32, I8, I16, I32, Function, I32x16, Value, vector

I32x8, I32x4, I8x16 = vector(I32, 8), vector(I32, 4), vector(I8, 16)


def _dot4_vpdpbusd_512(f: Function, total: Value, codes: Value, x: Value, _bits: int) -> Value:
    """AVX512-VNNI: one instruction, 64 products."""
    return f.intrinsic("llvm.x86.avx512.vpdpbusd.512", I32x16, total, codes.bitcast(I32x16), x.splat())


def _dot4_vpdpbusd_256(f: Function, total: Value, codes: Value, x: Value, _bits: int) -> Value:
    """AVX-VNNI: the same in two halves of eight rows."""
    name, words, x8 = "llvm.x86.avx512.vpdpbusd.256", codes.bitcast(I32x16), x.splat(8)
    low, high = (
        f.intrinsic(name, I32x8, total.shuffle(half), words.shuffle(half), x8) for half in (range(8), range(8, 16))
    )
    return low.concatenate(high)


def _dot4_pmaddwd(f: Function, total: Value, codes: Value, x: Value, _bits: int) -> Value:
    """AVX2: even and odd bytes widened to 16 bits, so that no sum of two products saturates, as in `pmaddubsw`."""
    words, x_words = codes.bitcast(vector(I16, 32)), x.splat().bitcast(vector(I16, 32))
    even, odd = words & 0xFF, words >> 8
    x_even, x_odd = (x_words << 8).arithmetic_shift_right(8), x_words.arithmetic_shift_right(8)
    for a, b in ((even, x_even), (odd, x_odd)):
        halves = [
            f.intrinsic("llvm.x86.avx2.pmadd.wd", I32x8, a.shuffle(half), b.shuffle(half))
            for half in (range(16), range(16, 32))
        ]
        total = total + halves[0].concatenate(halves[1])
    return total


def _dot4_sdot(f: Function, total: Value, codes: Value, x: Value, bits: int) -> Value:
    """NEON dot product, which is signed: an 8-bit code c becomes c - 128, and 128 x is added back as 64 x + 64 x."""
    name, x16 = "llvm.aarch64.neon.sdot.v4i32.v16i8", x.splat(4).bitcast(I8x16)
    parts = []
    for quarter in range(4):
        part = total.shuffle(range(4 * quarter, 4 * quarter + 4))
        signed = codes.shuffle(range(16 * quarter, 16 * quarter + 16))
        if bits == 8:
            signed = signed ^ 0x80
            offset = f.constant(I8x16, 64)
            part = f.intrinsic(name, I32x4, f.intrinsic(name, I32x4, part, offset, x16), offset, x16)
        parts.append(f.intrinsic(name, I32x4, part, signed, x16))
    return parts[0].concatenate(parts[1]).concatenate(parts[2].concatenate(parts[3]))


def _dot4_plain(_f: Function, total: Value, codes: Value, x: Value, _bits: int) -> Value:
    """Shifts and multiplications any CPU has."""
    words = codes.bitcast(I32x16)
    for byte in range(4):
        code = (words >> (8 * byte)) & 0xFF
        total = total + code * (x << (24 - 8 * byte)).arithmetic_shift_right(24).splat()
    return total


Dot4 = Callable[[Function, Value, Value, Value, int], Value]
"""(function, total int32 x 16, codes uint8 x 64, x int32 of four int8, bits of a code) -> total plus, for each of 16
rows, the sum of its four code * x."""


@dataclass(frozen=True)
class CPUPath:
    """One way to compile every kernel.

    `cpu` and `features` are LLVM's; `has_float16` and `has_fma` say that the conversion and the fused multiply-add are
    instructions.
    """

    name: str
    triple: str
    cpu: str
    features: str
    dot4: Dot4
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

    dot4: Dot4
    needs: tuple[str, ...]
    oldest: str
    architecture: str
    is_plain: bool = False


_KINDS = {  # the fastest first
    "avx512-vnni": _Kind(_dot4_vpdpbusd_512, ("avx512vnni", "avx512bw", "avx512vl"), "icelake-server", "x86_64"),
    "avx-vnni": _Kind(_dot4_vpdpbusd_256, ("avxvnni", "fma", "f16c"), "alderlake", "x86_64"),
    "avx2": _Kind(_dot4_pmaddwd, ("avx2", "fma", "f16c"), "haswell", "x86_64"),
    "neon-dot": _Kind(_dot4_sdot, ("dotprod",), "neoverse-n1", "aarch64"),
    "plain": _Kind(_dot4_plain, (), "", "", is_plain=True),
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
    return CPUPath(name, triple, cpu, features, kind.dot4, not kind.is_plain, not kind.is_plain)


@functools.cache
def _host_features() -> llvm.FeatureMap:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.get_host_cpu_features()
