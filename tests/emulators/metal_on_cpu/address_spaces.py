"""Checks the address spaces of a source's pointers with clang, which reads the source as C++ for OpenCL."""

from __future__ import annotations

import re
from pathlib import Path

from tests.builds import built

from . import toolchain
from .errors import AddressSpaceError
from .translate import (
    FUNCTION_CONSTANT,
    INSTANTIATION,
    construct_vectors,
    instantiated,
    share_threadgroup_variables,
    take_kernel_arguments,
)

FLAGS = [
    "-x", "cl", "-cl-std=clc++2021", "-cl-no-stdinc", "-fsyntax-only", "-target", "x86_64-linux-gnu",
    "-ferror-limit=20", "-DMSL_CHECK_ADDRESS_SPACES", "-Wno-invalid-constexpr",
    "-Wno-null-dereference",  # _local_variable() replaces threadgroup variables by references to address 0
    *toolchain.WARNINGS,
]  # fmt: skip


def check_address_spaces(source: str) -> None:
    """Raises AddressSpaceError if a pointer leads to the wrong address space, or is declared without one."""

    def make(folder: Path) -> None:
        text = _translate(toolchain.preprocess(source))
        path = folder / "kernels.cl"
        path.write_text(f'#include "shim.h"\n{text}')
        flags = [*FLAGS, "-I", toolchain.HERE / "shim", path]
        checked = toolchain.clang(flags)
        wrong = checked.stderr if checked.returncode else ""
        if not wrong:  # clang accepts a pointer without an address space, and assumes __generic
            tree = toolchain.clang([*flags, "-w", "-Xclang", "-ast-dump", "-fno-color-diagnostics"])
            places = dict.fromkeys(_generic_pointers(tree.stdout, str(folder)))
            wrong = "\n".join(f"{place}: a pointer without an address space" for place in places)
        (folder / "wrong").write_text(wrong)

    folder = built(make, "address spaces", toolchain.harness(), Path(__file__).read_bytes(), source)
    if wrong := (folder / "wrong").read_text():
        raise AddressSpaceError(wrong)


def _translate(text: str) -> str:
    def instantiate(match: re.Match[str]) -> str:
        found = instantiated(match[2])
        lines = "\n" * match[0].count("\n")
        return f"template decltype({found[1]}) {found[1]};{lines}" if found else match[0]

    _, _, text = take_kernel_arguments(INSTANTIATION.sub(instantiate, text))
    text = FUNCTION_CONSTANT.sub(r"constant \1 \2 = \1();", text)
    text = re.sub(r"(\)\s*(?:const\s*)?)thread\b", r"\1", text)  # methods need no qualifier, as objects are private
    text = share_threadgroup_variables(text, _local_variable)
    return construct_vectors(text)


def _local_variable(type_: str, name: str, dimensions: str) -> str:
    return f"{type_} __local (&{name}){dimensions} = *({type_} __local (*){dimensions})0; "


def _generic_pointers(tree: str, folder: str) -> list[str]:
    """Returns the places (file:line) outside of the shim that declare pointers to __generic.

    tree: clang's syntax tree. It names a declaration's file only if the previous declaration is in another file.
    """
    found = []
    file = line = ""
    for text in tree.splitlines():
        location = re.search(r"<[^>]*>", text)
        for new_file, new_line, other_line in re.findall(r"([\w./-]+\.\w+):(\d+):\d+|\bline:(\d+):\d+", text):
            file = new_file or file
            line = new_line or other_line
        # Only named declarations count, because the parameters of implicit copy constructors have no names.
        is_pointer = re.search(
            r"\b(?:Parm)?(?:Var|Field)Decl\b.* (?!used |referenced )[A-Za-z_]\w* '[^']*__generic [\w<>:, ]*[*&](?!&)",
            text,
        )
        if location and is_pointer and str(toolchain.HERE) not in file and folder not in file:
            found.append(f"{file}:{line}")
    return found
