"""Versions of functions in metal_attention.py and metal_backward.py. They run the CUDA kernels on the CPU."""

import functools

from tests.metal import metal_attention, metal_backward

run = functools.partial(metal_attention.run, device="cuda")
run_backward = functools.partial(metal_backward.run, device="cuda")
flash_attention = functools.partial(metal_attention.flash_attention, device="cuda")
