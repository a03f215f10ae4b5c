"""Makes headers and the linker's lists of symbols. They replace Apple's SDK, which may not be copied to Linux.

The Python package of zig has macOS's C and C++ headers, and a list of libSystem's symbols. This module adds two headers
that metal-cpp needs (headers/), lists of the symbols of libc++ (libcxx_symbols.txt) and of libobjc, and Python's
headers as they are on macOS.
"""

import json
import re
import shutil
import sysconfig
from pathlib import Path

import ziglang

LIBCXX = "/usr/lib/libc++.1.dylib"
LIBOBJC = "/usr/lib/libobjc.A.dylib"
LIBSYSTEM = "/usr/lib/libSystem.B.dylib"

ZIG = Path(ziglang.__file__).parent
LIBSYSTEM_TBD = ZIG / "lib/libc/darwin/libSystem.tbd"
HERE = Path(__file__).parent

# All functions of libobjc that metal-cpp calls.
LIBOBJC_SYMBOLS = {"_objc_getProtocol", "_objc_lookUpClass", "_objc_msgSend", "_sel_registerName"}

# Macros of Python's public headers that differ between Linux and macOS on arm64.
MACOS_PYCONFIG = """
#undef HAVE_GCC_ASM_FOR_X87
#undef _POSIX_C_SOURCE
#undef _XOPEN_SOURCE
#undef PTHREAD_KEY_T_IS_COMPATIBLE_WITH_INT
#define _DARWIN_C_SOURCE 1
#undef SIZEOF_FPOS_T
#define SIZEOF_FPOS_T 8
#undef SIZEOF_LONG_DOUBLE
#define SIZEOF_LONG_DOUBLE 8
#undef SIZEOF_PTHREAD_KEY_T
#define SIZEOF_PTHREAD_KEY_T 8
"""


def symbol_list(library: str, symbols: set[str]) -> str:
    """The text of a .tbd file, which a linker reads instead of a library."""
    names = ", ".join(f"'{name}'" for name in sorted(symbols))
    return (
        "--- !tapi-tbd\ntbd-version: 4\ntargets: [ arm64-macos ]\n"
        f"install-name: '{library}'\ncurrent-version: 1\ncompatibility-version: 1\n"
        f"exports:\n  - targets: [ arm64-macos ]\n    symbols: [ {names} ]\n...\n"
    )


def system_symbols() -> dict[str, set[str]]:
    """Maps each system library to the symbols that it has on macOS 14."""
    return {
        LIBCXX: set((HERE / "libcxx_symbols.txt").read_text().split()),
        LIBOBJC: LIBOBJC_SYMBOLS,
        # zig lists the symbols of a newer macOS. The C functions have hardly changed since macOS 14.
        LIBSYSTEM: set(re.findall(r"[\w$]+", LIBSYSTEM_TBD.read_text())),
    }


def python_headers(folder: Path) -> None:
    """Copies the headers of this Python to `folder`, with the macros that they have on macOS."""
    here = Path(sysconfig.get_path("include"))
    shutil.copytree(here, folder, dirs_exist_ok=True)
    # Debian has the real pyconfig.h in a folder for the architecture.
    debian = here.parent / str(sysconfig.get_config_var("MULTIARCH")) / here.name / "pyconfig.h"
    pyconfig = debian if debian.is_file() else here / "pyconfig.h"
    (folder / "pyconfig.h").write_text(pyconfig.read_text() + MACOS_PYCONFIG)


def make_sysroot(folder: Path) -> None:
    """Writes the headers, the lists of symbols and the settings of the SDK to `folder`."""
    shutil.copytree(HERE / "headers", folder / "headers", dirs_exist_ok=True)
    python_headers(folder / "python")
    libraries = folder / "usr/lib"
    libraries.mkdir(parents=True, exist_ok=True)
    symbols = system_symbols()
    (libraries / "libc++.tbd").write_text(symbol_list(LIBCXX, symbols[LIBCXX]))
    (libraries / "libobjc.tbd").write_text(symbol_list(LIBOBJC, symbols[LIBOBJC]))
    # Removes targets that lld 19 does not know, because lld refuses a file that has them.
    (libraries / "libSystem.tbd").write_text(re.sub(r"\barm64e\.x1-\w+\s*,?\s*", "", LIBSYSTEM_TBD.read_text()))
    # clang reads this file of an SDK.
    sdk = {"Version": "14.0", "MaximumDeploymentTarget": "14.0.99"}
    (folder / "SDKSettings.json").write_text(json.dumps(sdk))
