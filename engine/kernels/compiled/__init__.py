from engine.kernels.compiled.kernel_set import CompiledKernels

__all__ = ["CompiledKernels"]
