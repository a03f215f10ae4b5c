"""Measures the memory of MLX's arrays, and what a process holds."""

import os
from pathlib import Path

import mlx.core as mx


def peak_beyond(run):
    """The peak memory of MLX's arrays during run(), in bytes, beyond what they took before."""
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(run())
    return mx.get_peak_memory() - before


def held():
    """This process's threads and open files, and the bytes that it and MLX's arrays and cache hold. Needs Linux."""
    mx.synchronize()
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return {
        "resident": (resident - shared) * os.sysconf("SC_PAGESIZE"),
        "active": mx.get_active_memory(),
        "cache": mx.get_cache_memory(),
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
    }
