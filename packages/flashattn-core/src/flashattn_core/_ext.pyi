# Types of the extension module, see csrc/bindings.cpp.
import mlx.core as mx

class NoKernelError(ValueError): ...

def attention(
    query: mx.array,
    key: mx.array,
    value: mx.array,
    scale: float | None,
    softcap: float,
    causal: bool,
    window: int,
    key_start: mx.array | None,
    key_stop: mx.array | None,
    tree: mx.array | None,
    visible: mx.array | None,
    bias: mx.array | None,
    sinks: mx.array | None,
    alibi_slopes: mx.array | None,
    kernel: str,
    stream: mx.Stream | mx.Device | None,
) -> tuple[mx.array, mx.array]: ...
def plan(
    query: mx.array,
    key: mx.array,
    value: mx.array,
    scale: float | None,
    softcap: float,
    causal: bool,
    window: int,
    key_start: mx.array | None,
    key_stop: mx.array | None,
    tree: mx.array | None,
    visible: mx.array | None,
    bias: mx.array | None,
    sinks: mx.array | None,
    alibi_slopes: mx.array | None,
    kernel: str,
    metal: bool,
) -> tuple[str | None, str]: ...
def stats() -> dict[str, int]: ...
def reset_stats() -> None: ...
def describe_cpu() -> str: ...
def peak_flops() -> float: ...
def read_bandwidth() -> float: ...
def is_tracing(a: mx.array) -> bool: ...
