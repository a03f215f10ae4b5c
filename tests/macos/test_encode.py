"""What the Metal backend tells MLX's command encoder, on a recorder in place of a GPU."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "packages/flashattn-core/csrc"
MLX = Path(mx.__file__).parent
BINDINGS = re.search(r"enum Binding : int \{(.*?)\}", (CSRC / "metal/launch.h").read_text(), re.S)[1]
NAMES = re.findall(r"^\s*(k\w+),", BINDINGS, re.M)
QUERY, KEY, VALUE, OUT, LSE, PARAMS, SINKS, SPLIT = (
    NAMES.index(f"k{name}") for name in ("Query", "Key", "Value", "Out", "Lse", "Params", "Sinks", "SplitParams")
)
PARTIALS = {NAMES.index(f"kPartial{name}") for name in ("Out", "Max", "Sum")}

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="libmlx has the real classes there")


@pytest.fixture(scope="session")
def recorder(tmp_path_factory):
    """The backend's own files and a GPU that prints; a function that runs it and returns what was printed."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("c++ is missing: apt-get install g++")
    folder = tmp_path_factory.mktemp("recorder")
    generated = folder / "kernel_sources.cpp"
    subprocess.run([sys.executable, CSRC / "metal/embed.py", CSRC, generated, folder / "d"], check=True)
    own = [CSRC / "metal" / name for name in ("encode.cpp", "launch.cpp", "sources.cpp")] + [CSRC / "dispatch.cpp"]
    here = Path(__file__).parent / "recorder"
    command = [compiler, "-std=c++20", "-Wall", "-Wextra", "-Werror", '-DFLASHATTN_VERSION="1.2"', f"-I{here}"]
    command += [f"-I{CSRC}", f"-I{CSRC / 'metal'}", "-isystem", MLX / "include", here / "main.cpp", *own, generated]
    command += [f"-L{MLX / 'lib'}", "-lmlx", f"-Wl,-rpath,{MLX / 'lib'}", "-o", folder / "recorder"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    def run(kernel, query_len, key_len, repeats=1, limit=1024):
        arguments = [folder / "recorder", kernel, query_len, key_len, repeats, limit]
        return subprocess.run(list(map(str, arguments)), capture_output=True, text=True, check=False)

    return run


def lines(done, first_word):
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.split()[0] == first_word]


def by_binding(done, kind):
    return {int(line.split()[1]): line.split()[3] for line in lines(done, kind)}


ONE_LAUNCH = ["metal_rowwise", "metal_prefill_tg", "metal_prefill_reg"]


@pytest.mark.parametrize("kernel", ONE_LAUNCH)
def test_one_launch(recorder, kernel):
    done = recorder(kernel, 40, 50)
    assert by_binding(done, "input").keys() == {QUERY, KEY, VALUE, SINKS}
    assert by_binding(done, "output").keys() == {OUT, LSE}
    assert [int(line.split()[1]) for line in lines(done, "bytes")] == [PARAMS]
    assert len(lines(done, "dispatch")) == 1
    assert lines(done, "barrier") == lines(done, "keep") == []


def test_inputs_are_read_where_they_are(recorder):
    """Keys that begin in the middle of a buffer are bound there; nothing is copied."""
    done = recorder("metal_prefill_reg", 40, 50)
    assert f"input {KEY} buffer 1 offset {50 * 64 * 2}" in done.stdout
    assert f"input {VALUE} buffer 1 offset {50 * 64 * 2}" in done.stdout


def test_two_launches_share_scratch_with_a_barrier_between(recorder):
    done = recorder("metal_decode_split", 2, 4000)
    first, second = done.stdout.split("dispatch", 1)
    written = dict(re.findall(r"output (\d+) buffer (\d+)", first))
    read = dict(re.findall(r"input (\d+) buffer (\d+)", second))
    partials = {str(binding) for binding in PARTIALS}
    assert written.keys() == partials
    assert written == {binding: buffer for binding, buffer in read.items() if binding in partials}
    assert by_binding(done, "output").keys() == {OUT, LSE, *PARTIALS}
    out_bytes, max_bytes, sum_bytes = map(int, re.findall(r"bytes (\d+)$", first, re.M)[:3])
    assert out_bytes == 64 * max_bytes == 64 * sum_bytes
    assert {line.split()[2] for line in lines(done, "keep")} == set(written.values())
    assert "barrier" not in first
    assert "barrier" in second
    for launch in (first, second):
        assert {int(binding) for binding in re.findall(r"^bytes (\d+)", launch, re.M)} == {PARAMS, SPLIT}


def test_compiles_and_specialises_once(recorder):
    once, twice = recorder("metal_decode_split", 2, 4000), recorder("metal_decode_split", 2, 4000, repeats=2)
    for what in ("compile", "specialise", "constant"):
        assert lines(once, what) == lines(twice, what)
    assert len(lines(once, "compile")) == 2
    assert len(lines(twice, "dispatch")) == 2 * len(lines(once, "dispatch"))


def test_names_tell_every_constant(recorder):
    done = recorder("metal_prefill_reg", 40, 50)
    (specialise,) = lines(done, "specialise")
    function, library, name = re.fullmatch(r"specialise (\S+) of (\S+) as (\S+)", specialise).groups()
    assert library == f"flashattn_core_1.2_{function}"
    numbers = {"true": "1", "false": "0"}
    constants = [line.split()[1:] for line in lines(done, "constant")]
    assert constants
    assert name == function + "".join(f"_{index}_{numbers.get(value, value)}" for index, value in constants)


def test_a_threadgroup_too_large_for_the_gpu(recorder):
    done = recorder("metal_rowwise", 40, 50, limit=512)
    assert done.returncode == 1
    assert "Maximum threads per threadgroup is 512 but requested 1024 for kernel metal_rowwise" in done.stderr
