"""Describes the launches of a call on a GPU as plain data. module.cpp does this, and needs no GPU.

Each launch is a dict:

- `function`; `source`, the text that Metal or NVRTC compiles; `constants`.
- `grid`, in threadgroups; `threadgroup`, in threads; `split`: (first_key, chunk_len, num_chunks).
- `buffers`, by name. An input is a pair: its bytes, and the byte offset of its element at index 0. This offset is not
  0 if a stride is negative. An array that the launches write is given by its size in bytes, and a struct by its bytes.
  All launches of the call share an array of this name.
- `numbers`: maps a buffer's name to the index by which the kernel finds the buffer.
- `outputs`: the buffers that MLX treats as written. `scratch`: the call's buffers for intermediate results.
"""

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import nanobind

from tests.builds import built, contents
from tests.core.programs import cmake

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


OF_THE_MODULE = ("sources", "forward", "backward", "block_map", "append", "sinks_gradient", "selected", "programs")


def __getattr__(name: str) -> Any:
    """Builds the module when a test first needs it, and not when pytest collects tests."""
    if name in OF_THE_MODULE:
        return getattr(_load(), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def form(kernel: str) -> tuple[str, dict[str, str], contextlib.AbstractContextManager[None]]:
    """Returns the kernel's name without suffixes, arguments for its call, and a context that sets the GPU. The suffix
    "_hopper" means compute capability 9.0, and "_rounded" means that the probabilities are rounded."""
    name = kernel.removesuffix("_rounded")
    given = {"precision": "input"} if name != kernel else {}
    is_hopper = name.endswith("_hopper")
    return name.removesuffix("_hopper"), given, shared_memory(227, 90) if is_hopper else contextlib.nullcontext()


@contextlib.contextmanager
def shared_memory(kilobytes: int, compute_capability: int = 0) -> Iterator[None]:
    """In this context, launches are for an NVIDIA GPU with `kilobytes` KiB of shared memory per block and this compute
    capability (90 for 9.0; 0: unknown). Outside of the context, a block has an H100's 227 KiB."""
    before = _load().exchange_gpu(kilobytes * 1024, compute_capability)
    try:
        yield
    finally:
        _load().exchange_gpu(*before)
