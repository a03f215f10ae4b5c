"""Compiles kernels with NVRTC from the package nvidia-cuda-nvrtc. NVRTC compiles for any GPU, and needs none itself."""

import ctypes
import importlib.metadata
import re
import sys
from functools import cache
from typing import NamedTuple

import pytest

from tests.demanded import lacking


class Compiled(NamedTuple):
    spilled: int  # bytes per thread
    warnings: str


@cache
def _library() -> ctypes.CDLL:
    if sys.platform != "linux":
        pytest.skip("NVIDIA has no NVRTC for macOS")
    try:
        files = importlib.metadata.files("nvidia-cuda-nvrtc") or []
    except importlib.metadata.PackageNotFoundError:
        lacking("no NVRTC: uv sync --all-groups")
    *_, library = [  # libnvrtc-builtins comes first, because libnvrtc looks for it among the loaded libraries
        ctypes.CDLL(str(file.locate()))
        for pattern in (r"libnvrtc-builtins\.so\..*", r"libnvrtc\.so\.\d+")
        for file in files
        if re.fullmatch(pattern, file.name)
    ]
    return library


@cache
def compiled(text: str, architecture: str) -> Compiled:
    """Compiles the source of one kernel. If NVRTC reports an error, the assertion shows the compiler's log.

    The code must be the code that csrc/cuda/driver.cpp compiles, so no option may change it, except the architecture.
    """
    nvrtc, program, size = _library(), ctypes.c_void_p(), ctypes.c_size_t()
    # Without --no-cache, NVRTC may take the code from its cache, and then it writes no log.
    asked = (f"--gpu-architecture={architecture}", "--ptxas-options=-v", "--no-cache")
    options = (ctypes.c_char_p * len(asked))(*(option.encode() for option in asked))
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
    failed = nvrtc.nvrtcCompileProgram(program, len(options), options)
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    said = log.value.decode()
    assert not failed, said
    spilled, *_ = re.findall(r"(\d+) bytes spill stores", said)
    return Compiled(int(spilled), "".join(re.findall(r".*warning.*\n", said)))
