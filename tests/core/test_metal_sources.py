"""The module embeds the Metal kernels as text that Metal can compile unchanged. #line directives name the files."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import launches

CSRC = Path(__file__).parents[2] / "packages/flashattn-core/csrc"
KERNELS = CSRC / "metal/kernels"
NAMES = sorted(path.stem for path in KERNELS.glob("*.metal"))


@pytest.mark.parametrize("name", NAMES)
def test_text(name):
    text = launches.sources()[name]
    assert text.isascii()
    assert "#pragma once" not in text
    assert re.findall(r'^\s*#\s*include\s*"', text, re.M) == []
    assert "#include <metal_stdlib>" in text
    files = re.findall(r'^#line 1 "(.*)"', text, re.M)
    assert files[0] == f"metal/kernels/{name}.metal"
    assert len(files) == len(set(files))


@pytest.fixture
def embed(tmp_path):
    """A function that runs gpu/embed.py on the kernel file a.metal, its headers, and files in other folders."""

    def run(kernel: bytes, elsewhere: dict[str, bytes] | None = None, **headers: bytes):
        files = {"a.metal": kernel, **{f"{name}.h": text for name, text in headers.items()}}
        files = {f"metal/kernels/{name}": text for name, text in files.items()} | (elsewhere or {})
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(text)
        command = [sys.executable, CSRC / "gpu/embed.py", tmp_path, "metal", tmp_path / "a.cpp", tmp_path / "a.d"]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    return run


def test_includes_come_once_and_are_what_the_build_depends_on(embed, tmp_path):
    done = embed(b'#include "b.h"\n#include "c.h"\nint a;\n', b=b"int b;\n", c=b'#include "b.h"\nint c;\n')
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^int .;", (tmp_path / "a.cpp").read_text(), re.M) == ["int b;", "int c;", "int a;"]
    assert {Path(path).name for path in (tmp_path / "a.d").read_text().split()[1:]} == {"a.metal", "b.h", "c.h"}


def test_where_includes_are_looked_for(embed, tmp_path):
    elsewhere = {
        "gpu/kernels/rule.h": b'#include "near.h"\n#include "dialect.h"\n#include "call/params.h"\nint rule;\n',
        "gpu/kernels/near.h": b"int beside_the_file;\n",
        "call/params.h": b"int params;\n",
        "rule.h": b"int never;\n",
        "dialect.h": b"int never;\n",
    }
    done = embed(b'#include "rule.h"\n', elsewhere, near=b"int never;\n", dialect=b"int of_the_backend;\n")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "a.cpp").read_text()
    assert re.findall(r"^int (.*);", text, re.M) == ["beside_the_file", "of_the_backend", "params", "rule"]
    assert '#line 1 "call/params.h"' in text


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"// \xce\xb1", "a byte that is not ASCII"),
        (b'#include "missing.h"', "missing.h does not exist"),
        (b'#ifdef X\n#include "b.h"\n#endif', "b.h is included under a condition"),
        (b'auto a = R"KERNEL(b)KERNEL";', "would end the string"),
        (b"#if 1", "#if and #endif do not pair"),
    ],
)
def test_what_cannot_be_embedded(embed, line, reason):
    done = embed(b"int a;\n" + line, b=b"")
    assert done.returncode == 1
    assert re.search(rf"metal/kernels/a\.metal:[23]: error: .*{reason}", done.stderr)
