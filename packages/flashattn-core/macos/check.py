# /// script
# requires-python = ">=3.11"
# dependencies = ["lief==1.0.0", "ziglang==0.17.1"]
# ///
"""Checks on any machine whether a Mac can load a macOS wheel of flashattn-core together with a given MLX.

    uv run packages/flashattn-core/macos/check.py WHEEL --mlx FOLDER

FOLDER is the mlx folder of MLX's macOS wheels, as download.py unpacks them. CPython's symbols are looked up in the
CPython that runs this script. The exit code is 1 if anything is wrong.
"""

import argparse
import ctypes
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import lief
import macho
from signature import SignatureError, verify
from sysroot import LIBCXX, LIBOBJC, LIBSYSTEM, system_symbols

THIS = f"3{sys.version_info.minor}"
TAGS = {  # end of the module's name -> tag of the wheel
    ".abi3.so": "cp311-abi3-macosx_14_0_arm64",
    f".cpython-{THIS}-darwin.so": f"cp{THIS}-cp{THIS}-macosx_14_0_arm64",
}
LIBMLX = "@rpath/libmlx.dylib"
RUN_PATHS = ["@loader_path/../../mlx/lib"]
MINIMUM_MACOS = [14, 0]

Row = tuple[str, str, list[str]]  # name of the check, what it found, errors


def check_name(wheel: Path, module: Path) -> Row:
    tag = "-".join(wheel.stem.split("-")[-3:])
    expected = TAGS.get(module.name.removeprefix("_ext"), f"a module that ends in {' or '.join(TAGS)}")
    return "tag", tag, [] if tag == expected else [f"expected {expected}"]


def check_kind(binary: lief.MachO.Binary) -> Row:
    kind, processor = binary.header.file_type.name.lower(), binary.header.cpu_type.name.lower()
    version = binary.build_version
    if version is None:
        return "file", f"{kind} for {processor}", ["does not say for which system"]
    minimum = list(version.minos[:2])
    platform = version.platform.name.lower()
    wrong = []
    if (kind, processor) != ("bundle", "arm64"):
        wrong.append("expected a bundle for arm64")
    if platform != "macos" or minimum != MINIMUM_MACOS:
        wrong.append("expected macos from 14.0 on")
    return "file", f"{kind} for {processor}, {platform} from {minimum[0]}.{minimum[1]} on", wrong


def check_signature(binary: lief.MachO.Binary, file: bytes) -> Row:
    signature = binary.code_signature
    if signature is None:
        return "signature", "none", ["macOS loads no unsigned code on arm64"]
    try:
        pages = verify(file, signature.data_offset, signature.data_size)
    except SignatureError as error:
        return "signature", "broken", [f"the signature {error}"]
    return "signature", f"ad hoc, {pages} pages", []


def check_libraries(binary: lief.MachO.Binary) -> Row:
    found = [str(library.name) for library in binary.libraries]
    unexpected = set(found) - {LIBMLX, LIBCXX, LIBOBJC, LIBSYSTEM}
    wrong = [f"unexpected: {name}" for name in sorted(unexpected)]
    if LIBMLX not in found:
        wrong.append(f"expected {LIBMLX}")
    return "libraries", ", ".join(Path(name).name for name in found), wrong


def check_run_paths(binary: lief.MachO.Binary) -> Row:
    found = [str(command.path) for command in binary.rpaths]
    return "run paths", ", ".join(found), [] if found == RUN_PATHS else [f"expected {', '.join(RUN_PATHS)}"]


def check_symbols(binary: lief.MachO.Binary, mlx: Path) -> Iterator[Row]:
    """Yields a row for each library: which symbols the file needs from it, and which of these the library lacks."""
    available = {LIBMLX: macho.exports(macho.read(mlx / "lib/libmlx.dylib")), **system_symbols()}
    imports = macho.imports(binary)
    # Symbols that the loader looks for in all libraries: those of Python, and some of C++.
    anywhere = imports.pop(macho.ANY, set())
    python = {name for name in anywhere if hasattr(ctypes.pythonapi, name.removeprefix("_"))}
    everything = set().union(macho.exports(binary), *available.values())
    for library, names in sorted(imports.items()):
        missing = names - available.get(library, set())
        yield symbols_row(Path(library).name, names, missing)
    yield symbols_row("CPython's C API", python, set())
    if others := anywhere - python:
        yield symbols_row("whichever library has them", others, others - everything)


def symbols_row(where: str, names: set[str], missing: set[str]) -> Row:
    wrong = [f"not there: {demangled(name)}" for name in sorted(missing)]
    return "symbols", f"{len(names)} of {where}", wrong


def demangled(name: str) -> str:
    symbol = lief.MachO.Symbol()
    symbol.name = name.removeprefix("_")  # macOS puts an underscore before every name
    return str(symbol.demangled_name)


def check_wheel(wheel: Path, mlx: Path) -> int:
    """Runs the checks and prints a table of their findings. Returns 1 if anything is wrong, else 0."""
    with TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if "/_ext." in name and name.endswith(".so"))
        module = Path(archive.extract(name, folder))
        binary, file = macho.read(module), module.read_bytes()
    rows = [
        check_name(wheel, module),
        check_kind(binary),
        check_signature(binary, file),
        check_libraries(binary),
        check_run_paths(binary),
        *check_symbols(binary, mlx),
    ]
    faults = 0
    for what, found, wrong in rows:
        print(f"{what:<10} {found:<67} {'WRONG' if wrong else 'ok'}")
        for line in wrong:
            print(f"{'':<10} {line}")
        faults += len(wrong)
    print(f"{wheel.name}: " + (f"{faults} wrong" if faults else f"nothing wrong beside {mlx}"))
    return 1 if faults else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--mlx", type=Path, required=True, help="the mlx folder of MLX's macOS wheels")
    arguments = parser.parse_args()
    return check_wheel(arguments.wheel, arguments.mlx)


if __name__ == "__main__":
    sys.exit(main())
