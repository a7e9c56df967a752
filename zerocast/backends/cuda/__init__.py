"""The CUDA backend: one launch of our own kernels for any number of weights.

    backend      operations -> rows, cuts, arguments
    delayed      delayed scaling by a function of the caller's
    tiling       which tiles a launch visits
    prepared     tables and launches
    launcher     the interface through which kernels run
    device       that interface on a GPU: CuPy's driver calls, torch's stream
    compiler     sources -> machine code, by NVRTC, kept on disk

The kernels are in ``cuda_src/cuda``, their arithmetic in ``cuda_src/arithmetic``. Nothing
here imports CuPy before a GPU is used.
"""

from zerocast.backends.cuda.cuda_backend import CudaBackend
from zerocast.backends.cuda.launcher import Kernel, KernelArguments, Launcher

__all__ = ["CudaBackend", "Kernel", "KernelArguments", "Launcher"]
