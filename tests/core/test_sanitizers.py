"""The CPU backend alone under the compiler's sanitizers: memory, undefined behaviour, races between threads.

Each report ends the program with an error, and so do wrong results. Instruction set: the best that the machine runs.
"""

import pytest
from test_instruction_sets import run

CASES = 50
SANITIZERS = {"memory and undefined behaviour": "address,undefined", "races": "thread"}


@pytest.fixture(scope="module", params=SANITIZERS)
def sanitized_drivers(build_drivers, request):
    flags = f"-O1 -g1 -fsanitize={SANITIZERS[request.param]} -fno-sanitize-recover=all"
    return build_drivers(f"-DCMAKE_CXX_FLAGS={flags}", build_type="Debug", target="over_the_options")


@pytest.mark.parametrize("program", ["forward", "backward"])
def test_no_report(sanitized_drivers, program):
    by_threads = {n: run(sanitized_drivers / program, CASES, FLASHATTN_NUM_THREADS=n) for n in ("1", "4")}
    results = {n: output.split(": ", 1)[1] for n, output in by_threads.items()}
    assert results["1"].startswith(f"{CASES} cases, ")
    assert results["1"] == results["4"]
