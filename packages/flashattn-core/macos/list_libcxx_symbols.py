# /// script
# requires-python = ">=3.11"
# dependencies = ["lief==1.0.0", "ziglang==0.17.1"]
# ///
"""Writes libcxx_symbols.txt, a list of symbols that macOS 14's libc++ has. Wheels for macOS 14 import these symbols.

    uv run packages/flashattn-core/macos/list_libcxx_symbols.py

Run this if the linker misses a symbol that macOS 14's libc++ has. First add to WHEELS a wheel that imports the symbol.
"""

import re
from pathlib import Path
from tempfile import TemporaryDirectory

import macho
from download import download
from sysroot import LIBCXX

WHEELS = ["mlx==0.32.4", "mlx-metal==0.32.4", "pyarrow==26.0.1", "onnxruntime==1.23.2"]

# The loader looks for these symbols in all libraries: operator new and delete, which programs may replace, and the
# types of the standard exceptions.
REPLACEABLE = re.compile(r"__Z(n[aw]|d[al]|TISt)")

# A constructor or destructor has two symbols: one for complete objects (1) and one for base classes (2). A library has
# both or none.
CONSTRUCTOR = re.compile(r"([CD])[12]E")

# libc++ has always exported this symbol, see __string/extern_template_lists.h in its sources. No published wheel
# imports it, because Apple's headers inline less than zig's.
KNOWN = {
    "__ZNSt3__112basic_stringIcNS_11char_traitsIcEENS_9allocatorIcEEE21__grow_by_and_replaceEmmmmmmPKc",
}


def libcxx_symbols(folder: Path) -> set[str]:
    """The symbols of libc++ that binaries in `folder` import."""
    found: set[str] = set()
    for path in [*folder.rglob("*.so"), *folder.rglob("*.dylib")]:
        imports = macho.imports(macho.read(path))
        found |= imports.get(LIBCXX, set())
        found |= {name for name in imports.get(macho.ANY, set()) if REPLACEABLE.match(name)}
    return found | {CONSTRUCTOR.sub(rf"\g<1>{form}E", name) for name in found for form in (1, 2)}


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        download(Path(folder), *WHEELS)
        symbols = libcxx_symbols(Path(folder)) | KNOWN
    (Path(__file__).parent / "libcxx_symbols.txt").write_text("\n".join(sorted(symbols)) + "\n")
