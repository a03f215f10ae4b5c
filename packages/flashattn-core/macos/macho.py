"""Reads which symbols a Mach-O file imports and exports."""

from collections import defaultdict
from pathlib import Path

import lief

# The library_ordinal of a symbol that the file itself defines. A positive ordinal is a library's number. A negative
# ordinal means any library.
SELF = 0
ANY = "any loaded library"


def read(path: Path) -> lief.MachO.Binary:
    """Reads the file. If it has several architectures, returns the first."""
    binaries = lief.MachO.parse(path)
    binary = binaries.at(0) if binaries else None
    if binary is None:
        raise ValueError(f"{path} is not a Mach-O file")
    return binary


def imports(binary: lief.MachO.Binary) -> dict[str, set[str]]:
    """Maps each library (or ANY) to the symbols that the file needs from it."""
    wanted = defaultdict(set)
    for binding in binary.bindings:
        if binding.symbol and binding.library_ordinal != SELF:
            wanted[str(binding.library.name) if binding.library else ANY].add(str(binding.symbol.name))
    return dict(wanted)


def exports(binary: lief.MachO.Binary) -> set[str]:
    """Symbols that other files can bind to."""
    table = binary.dyld_exports_trie or binary.dyld_info
    return {str(entry.symbol.name) for entry in table.exports if entry.symbol} if table else set()
