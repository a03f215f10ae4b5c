"""embed.py makes one text of a kernel and its includes, or names the line that it cannot take."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "packages/flashattn-core/csrc"


@pytest.fixture
def embed(tmp_path):
    """A function that runs gpu/embed.py on the kernel file a.metal and its headers."""

    def run(kernel: bytes, **headers: bytes):
        folder = tmp_path / "metal/kernels"
        folder.mkdir(parents=True)
        for name, text in {"a.metal": kernel, **{f"{name}.h": text for name, text in headers.items()}}.items():
            (folder / name).write_bytes(text)
        command = [sys.executable, CSRC / "gpu/embed.py", tmp_path, "metal", tmp_path / "a.cpp", tmp_path / "a.d"]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    return run


def test_includes_come_once_and_are_what_the_build_depends_on(embed, tmp_path):
    of_c = b'#include "b.h"\nint c;\n'
    done = embed(b'#include "b.h"\n#include "c.h"\nint a;\n', b=b"#pragma once\nint b;\n", c=of_c)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "a.cpp").read_text()
    assert re.findall(r"^(?:int .;|#pragma once)", text, re.M) == ["int b;", "int c;", "int a;"]
    assert '#line 1 "metal/kernels/b.h"' in text
    assert {Path(path).name for path in (tmp_path / "a.d").read_text().split()[1:]} == {"a.metal", "b.h", "c.h"}


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
