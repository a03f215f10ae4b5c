# Types of the extension module _ext; csrc/python/bindings.cpp documents its functions.
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import mlx.core as mx

class NoKernelError(ValueError): ...

class Arguments:
    # **call: the optional inputs and options of csrc/call/inputs.def, scale, kernel and rounds.
    def __init__(
        self,
        query: mx.array,
        key: mx.array,
        value: mx.array,
        **call: mx.array | float | str | bool | None,
    ) -> None: ...
    @property
    def call(self) -> Call: ...

class LoweredMask:
    # **mask: the masks of csrc/call/inputs.def, causal and window.
    def __init__(self, **mask: mx.array | bool | int | None) -> None: ...

Where = mx.Stream | mx.Device | mx.DeviceType | None

def attention(
    arguments: Arguments,
    return_lse: bool,
    stream: Where,
    mlx: Callable[..., Any] | None = None,
    mlx_mask: object = None,
) -> Any: ...
def unchecked_attention(
    arguments: Arguments, variant: Variant, return_lse: bool, stream: Where, return_exact_out: bool = False
) -> Any: ...
def quick(
    query: object,
    key: object,
    value: object,
    scale: object,
    mask: object,
    sinks: object,
    rounds: bool,
    mlx: Callable[..., Any] | None = None,
    mlx_mask: object = None,
    group_size: int = 0,
    bits: int = 0,
) -> mx.array | None: ...

# These, down to checked_sharing, are in csrc/python/calls.cpp.
class Kernel(Enum):
    cpu_prefill = ...
    cpu_backward = ...
    cuda_prefill = ...  # and the others of csrc/call/choose.h

class Variant:
    def __init__(self, kernel: Kernel, rounds: bool = False, small_blocks: bool = False) -> None: ...
    kernel: Kernel
    rounds: bool  # whether the precision is "input"
    small_blocks: bool

class Device:
    def __init__(
        self, backend: str, compute_capability: int = 0, multiprocessors: int = 132, costs: str = ""
    ) -> None: ...
    compute_capability: int

class Call:
    def __init__(
        self,
        dtype: mx.Dtype,
        head_dim: int,
        value_dim: int | None = None,
        heads: int = 1,
        kv_heads: int = 1,
        query_len: int = 1,
        key_len: int = 1,
        batch_size: int = 1,
        window: int = 0,
        given: dict[str, mx.Dtype | None] = {},
        bits: int = 0,
        group_size: int = 0,
        rounds: bool = False,
        is_traced: bool = False,
    ) -> None: ...
    dtype: mx.Dtype
    head_dim: int
    value_dim: int
    heads: int
    kv_heads: int
    query_len: int
    key_len: int
    batch_size: int
    window: int
    given: dict[str, mx.Dtype | None]
    bits: int
    group_size: int
    rounds: bool
    is_traced: bool
    def with_lengths(self, query_len: int, key_len: int) -> Call: ...
    def usual_next(self) -> list[Call]: ...

class Estimate:
    pairs: float
    cost: float
    source: str

class Choice:
    variant: Variant
    why: str
    ours: Estimate
    mlx: Estimate | None
    is_left: bool

def choose(call: Call, device: Device, kernel: Kernel | None = None) -> Choice: ...
def plan(arguments: Arguments, device: str) -> Choice: ...
def backward_variant(call: Call, device: Device) -> Variant | None: ...
def device_of(device: mx.Device) -> Device: ...
def saves_exact_out(call: Call, backend: str) -> bool: ...
def programs(call: Call, variant: Variant, device: Device) -> list[str]: ...
def compile(call: Call, variant: Variant, device: mx.Device, all: bool) -> None: ...
def software(device: mx.Device) -> str: ...
def cost_of(kernel: Kernel, device: Device) -> tuple[float, str]: ...
def stats() -> dict[str, int]: ...
def reset_stats() -> None: ...
def left_calls() -> dict[str, int]: ...
def reset_left_calls() -> None: ...
def cache_folder() -> str: ...
def keep(folder: str, key: str, text: str) -> str: ...
def read_kept(folder: str, key: str) -> str: ...
def costs_file(device: mx.Device) -> str: ...
def max_exact_queries(backend: str) -> int: ...

checked_lengths: list[tuple[int, int]]
checked_sharing: tuple[int, int]

def backend_of(device: mx.Device) -> str: ...
def max_head_dim(device: str, gradient: bool, quantised: bool) -> int: ...
def describe_cpu() -> str: ...
def describe_cuda() -> str: ...
def peak_flops() -> float: ...
def read_bandwidth() -> float: ...
def release_scratch() -> int: ...
def is_tracing(a: mx.array) -> bool: ...
def array_id(a: mx.array) -> int: ...
def append_rows(
    keys: Sequence[mx.array],  # a tuple or list
    values: Sequence[mx.array],
    new_keys: mx.array,
    new_values: mx.array,
    offset: int,
    group_size: int,
    bits: int,
) -> tuple[tuple[mx.array, ...], tuple[mx.array, ...]] | None: ...
def pack_tree(visible: mx.array) -> mx.array: ...
def is_unevaluated(a: mx.array) -> bool: ...
def block_map(arguments: Arguments) -> mx.array | None: ...
def keep_block_maps(mask: mx.array) -> int: ...
def forget_block_maps(mask_id: int) -> None: ...
