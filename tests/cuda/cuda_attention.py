"""The functions of metal_attention.py for the CUDA kernels, run on the CPU."""

import functools

from tests.emulators.cuda_on_cpu import CudaProgram
from tests.metal import metal_attention


def on_cpu(launch, source: str):
    return CudaProgram(launch, source), {name: number for number, name in enumerate(launch["buffers"])}, {}


run = functools.partial(metal_attention.run, device="cuda", prepared=on_cpu)
flash_attention = functools.partial(metal_attention.flash_attention, device="cuda", prepared=on_cpu)
