"""The functions of metal_attention.py for the CUDA kernels, run on the CPU."""

import functools

import metal_attention
from cuda_on_cpu import CudaProgram


def on_cpu(launch, source: str):
    return CudaProgram(launch, source), {name: number for number, name in enumerate(launch["buffers"])}, {}


run = functools.partial(metal_attention.run, device="cuda", prepared=on_cpu)
flash_attention = functools.partial(metal_attention.flash_attention, device="cuda", prepared=on_cpu)
