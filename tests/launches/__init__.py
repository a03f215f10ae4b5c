"""What a call would run on a GPU, as plain data and on any machine, by a module that is built for tests alone.

Each launch is a dict. `kernel`: whose it is, if of a forward pass. `source`: the text that Metal compiles. `function`,
`outputs` (those that MLX takes for written), `scratch` (of all of the call's launches, kept for the next call),
`constants`, `grid` (in threadgroups), `threadgroup` (in threads), `split` (first_key, chunk_len, num_chunks).
`buffers`, by name. An input: its memory, and where in it the element at index 0 is, in bytes (strides may be negative
or 0). What launches write: its size in bytes; all launches of a call share it. A struct: its bytes. `numbers`: where
the kernel finds each of them.
"""

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import nanobind
from builds import built, contents
from flashattn_core import _ext, decide
from programs import cmake

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "packages/flashattn-core/csrc"


def _make(folder: Path) -> None:
    cmake(HERE, folder, "-DCMAKE_BUILD_TYPE=MinSizeRel", f"-DPython_EXECUTABLE={sys.executable}")


@functools.cache
def _load() -> ModuleType:
    texts = contents(
        HERE, CSRC, patterns=("**/*.h", "**/*.cpp", "**/*.def", "**/*.metal", "**/*.cu", "**/*.txt", "**/embed.py")
    )
    versions = f"{mx.__version__} {nanobind.__version__} {sys.version_info[:2]}"
    folder = built(_make, "launches", texts, versions, str(HERE), sys.executable)
    (file,) = folder.glob("flashattn_launches*.so")
    spec = importlib.util.spec_from_file_location("flashattn_launches", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


OF_THE_MODULE = (
    *("sources", "forward", "backward", "realign", "block_map", "sinks_gradient"),
    *("settle", "looked_up", "with_other_lengths", "left_calls", "reset_left_calls"),
)


def __getattr__(name: str) -> Any:
    """The module is built when a test first needs it, and not when pytest collects tests."""
    if name in OF_THE_MODULE:
        return getattr(_load(), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def decision(
    arguments,
    device="cuda",
    *,
    refuses=False,
    driver="a driver",
    check=lambda kernel: "",
    times=lambda names: {},
    mlx_is_fused=True,
):
    """What decide.py settles for a call on a GPU, and the functions that it wants of NVRTC and the driver for that.

    refuses: these do. check: gets a kernel's name, and says what is wrong with it. times: gets the contestants' names,
    of which MLX's own attention is one where it is fused.
    """
    there = SimpleNamespace(device=mx.Device(mx.gpu))
    stand_ins = {name: getattr(_load(), name) for name in ("candidates", "backward_kernel", "pipelines", "compile")}
    stand_ins |= {"backend_of": lambda device_of_stream: device, "software": lambda device_of_stream: driver}
    _load().set_refuses(refuses)
    _load().wanted()
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(decide, "_ext", SimpleNamespace(**{**vars(_ext), **stand_ins})))
        stack.enter_context(patch.object(decide.check, "of_call", lambda call, kernel, stream: check(kernel)))
        stack.enter_context(patch.object(decide.contest, "mlx_is_fused", lambda call, stream: mlx_is_fused))
        stack.enter_context(patch.object(decide.contest, "times", lambda call, names, stream: times(names)))
        return decide.decision_for(arguments, there), _load().wanted()


def form(kernel: str) -> tuple[str, dict[str, str], contextlib.AbstractContextManager[None]]:
    """The forms of cuda_prefill have names in tests: the kernel, what else its call is given, and the GPU of which its
    launches are asked. "_hopper" is compute capability 9.0's, "_rounded" rounds probabilities once."""
    name = kernel.removesuffix("_rounded")
    given = {"precision": "input"} if name != kernel else {}
    is_hopper = name.endswith("_hopper")
    return name.removesuffix("_hopper"), given, shared_memory(227, 90) if is_hopper else contextlib.nullcontext()


@contextlib.contextmanager
def shared_memory(kilobytes: int, compute_capability: int = 0) -> Iterator[None]:
    """Within, launches are asked of an NVIDIA GPU whose blocks can have so much, of this capability (90 for 9.0; 0: not
    known); without, of an H100's 227 kilobytes."""
    before = _load().shared_memory(), _load().compute_capability()
    _load().set_shared_memory(kilobytes * 1024)
    _load().set_compute_capability(compute_capability)
    try:
        yield
    finally:
        _load().set_shared_memory(before[0])
        _load().set_compute_capability(before[1])
