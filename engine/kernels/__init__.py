"""The kernel sets, by name."""

from engine.errors import ParamError
from engine.kernels.protocol import KernelSet

NAMES = ("auto", "compiled", "reference", "reference-int8")


def kernel_set(name: str, *, threads: int | None = None) -> KernelSet:
    """The kernels called `name`, or for "auto" the fastest there are.

    `threads` is how many the compiled kernels use, None for one a physical core; the reference's products run on one.
    Raises `ParamError` for another name or fewer than one thread.
    """
    if threads is not None and threads < 1:
        raise ParamError("threads", f"threads must be at least 1, got {threads}")
    # Imported here, so that one set's libraries cost nothing where the other one runs.
    if name in {"auto", "compiled"}:
        from engine.kernels.compiled import CompiledKernels

        return CompiledKernels(threads)
    from engine.kernels.reference import ReferenceKernels

    match name:
        case "reference":
            return ReferenceKernels()
        case "reference-int8":
            return ReferenceKernels(activations="int8")
    raise ParamError("kernels", f"kernels must be one of {', '.join(NAMES)}, got {name!r}")
