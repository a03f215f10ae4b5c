"""Measures the memory of MLX's arrays."""

import mlx.core as mx


def peak_beyond(run):
    """The peak memory of MLX's arrays during run(), in bytes, beyond what they took before."""
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(run())
    return mx.get_peak_memory() - before
