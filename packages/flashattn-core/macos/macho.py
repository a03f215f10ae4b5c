"""What a Mach-O file asks of other libraries, and what it offers them."""

from collections import defaultdict
from pathlib import Path

import lief

SELF = 0  # where other numbers count the libraries from 1 on, or are negative: any library, in some order
ANY = "any loaded library"


def read(path: Path) -> lief.MachO.Binary:
    """The one architecture of `path`."""
    binaries = lief.MachO.parse(path)
    binary = binaries.at(0) if binaries else None
    if binary is None:
        raise ValueError(f"{path} is not a Mach-O file")
    return binary


def imports(binary: lief.MachO.Binary) -> dict[str, set[str]]:
    """Symbols that are bound when the file is loaded, by the library that they are expected in."""
    wanted = defaultdict(set)
    for binding in binary.bindings:
        if binding.symbol and binding.library_ordinal != SELF:
            wanted[str(binding.library.name) if binding.library else ANY].add(str(binding.symbol.name))
    return dict(wanted)


def exports(binary: lief.MachO.Binary) -> set[str]:
    """Symbols that other files can bind to."""
    table = binary.dyld_exports_trie or binary.dyld_info
    return {str(entry.symbol.name) for entry in table.exports if entry.symbol} if table else set()
