"""Runs the CPU backend under libFuzzer (fuzz/fuzz.cpp), with earlier findings and with a short search for new ones.

`make fuzz` searches longer.
"""

import shutil
from pathlib import Path

import pytest

from tests.core.programs import each_sanitized_set, only, run, sets_here
from tests.demanded import lacking

pytestmark = pytest.mark.nightly("another build of the kernels, by clang")
FUZZ = Path(__file__).parent / "fuzz"
CORPUS = FUZZ / "corpus"


@pytest.fixture(scope="module")
def fuzzer(build, everything):
    if shutil.which("clang++-19") is None:
        lacking("no clang 19: apt-get install clang-19 libclang-rt-19-dev")
    sets = only(sets_here() if everything else sets_here()[:1])
    options = ["-DCMAKE_CXX_COMPILER=clang++-19", "-DINSTRUMENT_KERNELS=OFF", sets]
    return build(FUZZ, *options, build_type="Debug") / "fuzz"


def test_the_corpus_is_small():
    files = list(CORPUS.iterdir())
    assert 10 <= len(files) <= 100
    assert max(file.stat().st_size for file in files) <= 128


@each_sanitized_set
@pytest.mark.parametrize("threads", ["1", "3"])
def test_the_corpus(fuzzer, name, threads):
    run(fuzzer, *sorted(CORPUS.iterdir()), FLASHATTN_CPU_ISA=name, FLASHATTN_NUM_THREADS=threads)


def test_a_short_search(fuzzer, everything, tmp_path):
    found = tmp_path / "found"
    found.mkdir()
    seconds = 20 if everything else 3
    run(fuzzer, f"-max_total_time={seconds}", "-max_len=96", f"-artifact_prefix={tmp_path}/", found, CORPUS)
