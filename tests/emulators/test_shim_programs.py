"""Programs and the results of launches are cached by their content. Error messages name lines of the source."""

import numpy as np
import pytest

from tests.emulators.metal_on_cpu import CompileError, OutOfBoundsError, Program
from tests.emulators.small_kernels import compile_text, run_text

ONES = np.ones(64, np.int32)


def test_a_program_is_kept_by_its_content(tmp_path):
    def folder(text="", **options):
        return Program(f"kernel void k(device int* a [[buffer(0)]]) {{}}{text}", **options).folder

    (tmp_path / "other.h").write_text("int other;\n")
    changed = [{"text": " "}, {"include_dirs": [tmp_path]}]
    assert len({folder(), folder(), *(folder(**change) for change in changed)}) == 1 + len(changed)


ADD = """constant int n [[function_constant(0)]];
    kernel void k(device int* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]],
                  uint group [[threadgroup_position_in_grid]]) { out[32 * group + i] += n; }
    kernel void twice(device int* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) { out[i] += 2 * n; }"""


@pytest.mark.parametrize(
    "change",
    [
        {"kernel": "twice"},
        {"buffers": {0: 2 * ONES}},
        {"buffers": {0: np.ones(65, np.int32)}},
        {"constants": {0: 4}},
        {"grid": (2, 1, 1)},
        {"schedule": "reverse"},
    ],
    ids=str,
)
def test_a_launch_is_known_by_all_that_it_is_made_of(monkeypatch, change):
    def launch(**change):
        before = Program.runs["executed"]
        call = {"buffers": {0: ONES}, "outputs": {0}, "constants": {0: 3}, **change}
        return run_text(ADD, **call).buffers[0], Program.runs["executed"] - before

    monkeypatch.setattr(Program, "remembers", False)
    first, executed = zip(launch(), launch(**change), strict=True)
    assert executed == (1, 1)
    monkeypatch.setattr(Program, "remembers", True)
    again, executed = zip(launch(), launch(**change), strict=True)
    assert executed == (0, 0)
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)


LINES = """kernel void k(device int* out [[buffer(0)]],
                  uint i [[thread_index_in_threadgroup]]) {
    #line 77 "row_max.h"
      out[i + 64] = 0;
    }"""


@pytest.mark.parametrize("remembers", [False, True])
def test_an_error_names_the_line(monkeypatch, remembers):
    monkeypatch.setattr(Program, "remembers", remembers)
    with pytest.raises(OutOfBoundsError, match=r"row_max\.h:77"):
        run_text(LINES, buffers={0: ONES})


def test_an_error_of_the_compiler_names_the_line():
    with pytest.raises(CompileError, match=r"row_max\.h:77:\d+: error: use of undeclared identifier 'scroe'"):
        compile_text(LINES.replace("= 0", "= scroe"))
    with pytest.raises(CompileError, match=r"kernels\.metal:2:\d+: error"):
        Program("#include <metal_stdlib>\nkernel void k() { scroe(); }")
