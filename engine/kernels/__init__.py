"""The kernel sets, by name."""

from engine.errors import ParamError
from engine.kernels.protocol import KernelSet

NAMES = ("auto", "compiled", "reference", "reference-int8")
WEIGHTS = ("auto", "f32")
"""What becomes of a file's float weights: whatever the kernels like best, or nothing."""


def kernel_set(name: str, *, threads: int | None = None, weights: str = "auto") -> KernelSet:
    """The kernels called `name`, or for "auto" the fastest there are.

    `threads` is how many the compiled kernels use, None for one a physical core; the reference's products run on one.
    `weights` "f32" lets the compiled kernels keep float weights, which the reference's always do.
    Raises `ParamError` for another name, other `weights` than `WEIGHTS`, or fewer than one thread.
    """
    if weights not in WEIGHTS:
        raise ParamError("weights", f"weights must be one of {', '.join(WEIGHTS)}, got {weights!r}")
    if threads is not None and threads < 1:
        raise ParamError("threads", f"threads must be at least 1, got {threads}")
    # Imported here, so that one set's libraries cost nothing where the other one runs.
    if name in {"auto", "compiled"}:
        from engine.kernels.compiled import CompiledKernels

        return CompiledKernels(threads, rounds_floats=weights != "f32")
    from engine.kernels.reference import ReferenceKernels

    match name:
        case "reference":
            return ReferenceKernels()
        case "reference-int8":
            return ReferenceKernels(activations="int8")
    raise ParamError("kernels", f"kernels must be one of {', '.join(NAMES)}, got {name!r}")
