"""Compiles Metal kernels for this machine's CPU and runs them. A GPU thread is a fiber. Every access is checked."""

from .address_spaces import check_address_spaces
from .counts import Counts
from .errors import (
    AddressSpaceError,
    BindingError,
    CompileError,
    DivergenceError,
    LimitError,
    MetalError,
    OutOfBoundsError,
    RaceError,
    UninitialisedError,
)
from .program import Program, Result, Undefined, View
from .toolchain import MISSING

__all__ = [
    "MISSING",
    "AddressSpaceError",
    "BindingError",
    "CompileError",
    "Counts",
    "DivergenceError",
    "LimitError",
    "MetalError",
    "OutOfBoundsError",
    "Program",
    "RaceError",
    "Result",
    "Undefined",
    "UninitialisedError",
    "View",
    "check_address_spaces",
]
