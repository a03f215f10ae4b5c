"""The Metal kernels travel in the module as text that Metal can compile as it is, and that names its own lines."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from flashattn_core import _ext

CSRC = Path(__file__).parents[2] / "packages/flashattn-core/csrc"
KERNELS = CSRC / "metal/kernels"


def test_every_kernel_is_there():
    assert _ext.metal_sources().keys() == {path.stem for path in KERNELS.glob("*.metal")}


@pytest.mark.parametrize("name", _ext.metal_sources())
def test_text(name):
    text = _ext.metal_sources()[name]
    assert text.isascii()
    assert "#pragma once" not in text
    assert re.findall(r'^\s*#\s*include\s*"', text, re.M) == []
    assert "#include <metal_stdlib>" in text
    files = re.findall(r'^#line 1 "(.*)"', text, re.M)
    assert files[0] == f"metal/kernels/{name}.metal"
    assert len(files) == len(set(files))


@pytest.mark.parametrize("name", _ext.metal_sources())
def test_line_directives(name):
    """Each line stands in the file, and at the number, that the directive before it says."""
    for chunk in re.split(r"^(?=#line )", _ext.metal_sources()[name], flags=re.M)[1:]:
        directive, *lines = chunk.splitlines()
        number, file = re.fullmatch(r'#line (\d+) "(.*)"', directive).groups()
        for embedded, original in zip(lines, (CSRC / file).read_text().splitlines()[int(number) - 1 :], strict=False):
            assert embedded == original or (embedded == "" and re.match(r'#pragma once|#include "', original))


@pytest.fixture
def embed(tmp_path):
    """Runs the script that embeds kernels, on a kernel called a.metal and other files."""

    def run(kernel: bytes, **headers: bytes) -> subprocess.CompletedProcess[str]:
        folder = tmp_path / "metal/kernels"
        folder.mkdir(parents=True)
        (folder / "a.metal").write_bytes(kernel)
        for name, text in headers.items():
            (folder / f"{name}.h").write_bytes(text)
        command = [sys.executable, CSRC / "metal/embed.py", tmp_path, tmp_path / "a.cpp", tmp_path / "a.d"]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    return run


def test_includes_come_once_and_are_what_the_build_depends_on(embed, tmp_path):
    done = embed(b'#include "b.h"\n#include "c.h"\nint a;\n', b=b"int b;\n", c=b'#include "b.h"\nint c;\n')
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "a.cpp").read_text()
    assert re.findall(r"^int .;", text, re.M) == ["int b;", "int c;", "int a;"]
    assert {Path(path).name for path in (tmp_path / "a.d").read_text().split()[1:]} == {"a.metal", "b.h", "c.h"}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"// \xce\xb1", "a byte that is not ASCII"),
        (b'#include "missing.h"', "missing.h does not exist"),
        (b'#ifdef X\n#include "b.h"\n#endif', "b.h is included under a condition"),
        (b'auto a = R"METAL(b)METAL";', "would end the string"),
        (b"#if 1", "#if and #endif do not pair"),
    ],
)
def test_what_cannot_be_embedded(embed, line, reason):
    done = embed(b"int a;\n" + line, b=b"")
    assert done.returncode == 1
    assert re.search(rf"metal/kernels/a\.metal:[23]: error: .*{reason}", done.stderr)
