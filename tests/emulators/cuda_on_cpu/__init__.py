"""Runs CUDA kernels on this machine's CPU, in the runtime that also runs Metal kernels (tests/emulators/README.md)."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.emulators.metal_on_cpu import Program, toolchain

from .translate import translate

HERE = Path(__file__).parent


class CudaProgram(Program):
    """A compiled program for one launch. `launch` describes the launch (see tests/launches)."""

    def __init__(self, launch: Mapping[str, Any], source: str) -> None:
        def translated():
            return translate(toolchain.preprocess(source, defines=["-D__CUDACC_RTC__=1"]), launch)

        shared, names = str(launch["dynamic_shared"]), ",".join(launch["buffers"])
        self.folder = toolchain.program(translated, (HERE,), source, shared, names)
        self.kernels, self.constants = pickle.loads((self.folder / "translation").read_bytes())
