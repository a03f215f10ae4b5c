# Types of the extension module, see csrc/bindings.cpp.
from typing import TypedDict

import mlx.core as mx

class NoKernelError(ValueError): ...

class Arguments:
    def __init__(
        self,
        query: mx.array,
        key: mx.array,
        value: mx.array,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        causal: bool = False,
        window: int = 0,
        key_start: mx.array | None = None,
        key_stop: mx.array | None = None,
        tree: mx.array | None = None,
        visible: mx.array | None = None,
        bias: mx.array | None = None,
        sinks: mx.array | None = None,
        alibi_slopes: mx.array | None = None,
        key_scales: mx.array | None = None,
        key_biases: mx.array | None = None,
        value_scales: mx.array | None = None,
        value_biases: mx.array | None = None,
        bits: int = 0,
        group_size: int = 0,
        kernel: str = "auto",
    ) -> None: ...

def attention(arguments: Arguments, stream: mx.Stream | mx.Device | None) -> tuple[mx.array, mx.array]: ...
def plan(arguments: Arguments, metal: bool) -> tuple[str | None, str]: ...
def stats() -> dict[str, int]: ...
def reset_stats() -> None: ...
def describe_cpu() -> str: ...
def peak_flops() -> float: ...
def read_bandwidth() -> float: ...
def is_tracing(a: mx.array) -> bool: ...

# For tests.

class MetalLaunch(TypedDict):
    source: str  # the text that Metal compiles
    function: str
    constants: dict[int, bool | int]
    grid: tuple[int, int, int]  # in threadgroups
    threadgroup: tuple[int, int, int]  # in threads
    # By binding. An input: its memory, and where in it the element at index 0 is, in bytes (strides may be negative or
    # 0). An output or scratch: its size in bytes; all launches of a call share them. A struct: its bytes.
    buffers: dict[int, tuple[bytes, int] | int | bytes]
    split: tuple[int, int, int]  # first_key, chunk_len, num_chunks
    partial_rows: int  # of scratch

def metal_sources() -> dict[str, str]: ...
def metal_launches(arguments: Arguments) -> list[MetalLaunch]: ...
def metal_backward_launches(
    arguments: Arguments,
    out: mx.array,
    lse: mx.array,
    out_gradient: mx.array,
    lse_gradient: mx.array | None,
) -> list[MetalLaunch]: ...
