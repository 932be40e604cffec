"""The kernel sets, by name."""

from engine.errors import ParamError
from engine.kernels.protocol import KernelSet

NAMES = ("auto", "reference", "reference-int8", "compiled")


def kernel_set(name: str) -> KernelSet:
    """The kernels called `name`, or for "auto" the fastest there are. Raises `ParamError` for another name."""
    # Imported here, so that one set's libraries cost nothing where the other one runs.
    if name == "compiled":
        from engine.kernels.compiled import CompiledKernels

        return CompiledKernels()
    from engine.kernels.reference import ReferenceKernels

    match name:
        case "auto" | "reference":
            return ReferenceKernels()
        case "reference-int8":
            return ReferenceKernels(activations="int8")
    raise ParamError("kernels", f"kernels must be one of {', '.join(NAMES)}, got {name!r}")
