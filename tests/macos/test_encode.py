"""What the Metal backend tells MLX's command encoder, on a recorder in place of a GPU."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import launches
import mlx.core as mx
import pytest
from builds import built, contents
from flashattn_core.attention import lowered

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "packages/flashattn-core/csrc"
MLX = Path(mx.__file__).parent
NUMBERS = launches.buffers()
QUERY, KEY, VALUE, OUT, LSE, ROW_STATS, PARAMS, SINKS, SPLIT = (
    NUMBERS[name] for name in ("query", "key", "value", "out", "lse", "row_stats", "params", "sinks", "split")
)
GROUPS = {NUMBERS[name] for name in ("key_scales", "key_biases", "value_scales", "value_biases")}
PARTIALS = {NUMBERS[name] for name in ("partial_out", "partial_max", "partial_sum")}
DOUT, DLSE, DELTA, DQ, DK, DV, BACKWARD = (
    NUMBERS[name] for name in ("dout", "dlse", "delta", "dq", "dk", "dv", "backward")
)
CONSTANTS = list(launches.forward(lowered(*[mx.zeros((1, 1, 9, 8), stream=mx.cpu)] * 3))[0]["constants"])

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="libmlx has the real classes there")


@pytest.fixture(scope="session")
def recorder():
    """The backend's own files and a GPU that prints; a function that runs it and returns what was printed."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("c++ is missing: apt-get install g++")
    own = [CSRC / "metal" / name for name in ("encode.cpp", "launch.cpp", "sources.cpp")]
    own += [CSRC / "gpu/launch.cpp", CSRC / "call/kernel_table.cpp"]
    here = Path(__file__).parent / "recorder"

    def compile_it(folder):
        generated = folder / "kernel_sources.cpp"
        subprocess.run([sys.executable, CSRC / "gpu/embed.py", CSRC, "metal", generated, folder / "d"], check=True)
        command = [compiler, "-std=c++20", "-Wall", "-Wextra", "-Werror", '-DFLASHATTN_VERSION="1.2"', f"-I{here}"]
        command += [f"-I{CSRC}", f"-I{CSRC / 'metal'}", "-isystem", MLX / "include", here / "main.cpp", *own, generated]
        command += [f"-L{MLX / 'lib'}", "-lmlx", f"-Wl,-rpath,{MLX / 'lib'}", "-o", folder / "recorder"]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    texts = contents(CSRC, here), Path(__file__).read_bytes(), (MLX / "include/mlx/version.h").read_bytes()
    folder = built(compile_it, "recorder", str(MLX), version, *texts)

    def run(kernel, query_len, key_len, repeats=1, limit=1024, bits=0):
        arguments = [folder / "recorder", kernel, query_len, key_len, repeats, limit, bits]
        return subprocess.run(list(map(str, arguments)), capture_output=True, text=True, check=False)

    return run


def lines(done, first_word):
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.split()[0] == first_word]


def constants_in(text):
    """By name. MLX is told their positions."""
    return {CONSTANTS[int(index)]: value for index, value in re.findall(r"^constant (\d+) (\S+)", text, re.M)}


def by_binding(done, kind):
    return {int(line.split()[1]): line.split()[3] for line in lines(done, kind)}


ONE_LAUNCH = ["metal_rowwise", "metal_prefill_tg", "metal_prefill_reg"]


@pytest.mark.parametrize("kernel", ONE_LAUNCH)
def test_one_launch(recorder, kernel):
    done = recorder(kernel, 40, 50)
    assert by_binding(done, "input").keys() == {QUERY, KEY, VALUE, SINKS}
    assert by_binding(done, "output").keys() == {OUT, LSE, ROW_STATS}
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
    assert by_binding(done, "output").keys() == {OUT, LSE, ROW_STATS, *PARTIALS}
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
    constants = constants_in(done.stdout)
    assert list(constants) == CONSTANTS
    assert name == "_".join([function, *(numbers.get(value, value) for value in constants.values())])


# --- Quantised keys and values ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "lengths"),
    [
        ("metal_decode_fast", (1, 50)),
        ("metal_decode_parallel", (1, 500)),
        ("metal_decode_split", (2, 4000)),
        ("metal_prefill_reg", (40, 50)),
        ("metal_rowwise", (40, 50)),
    ],
)
def test_scales_and_biases_are_bound_where_keys_are_read(recorder, kernel, lengths):
    done = recorder(kernel, *lengths, bits=4)
    first, *merge = launches_of(done)
    assert buffers(first, "input").keys() - {SINKS} == {QUERY, KEY, VALUE, *GROUPS}
    assert f"use {kernel}_half_64_64" in first
    assert re.search(r"^use \S*_quantised_", first, re.M)
    specialise = re.findall(r"^specialise \S+_quantised of .*\n((?:constant .*\n)*)", done.stdout, re.M)
    (constants,) = map(constants_in, specialise)
    of_groups = ("has_key_scales", "quant_bits", "group_size", "group_dtype")
    assert [constants[name] for name in of_groups] == ["true", "4", "64", "1"]
    for launch in merge:
        assert not buffers(launch, "input").keys() & {KEY, VALUE, *GROUPS}
        assert "quantised" not in launch


def test_quantised_inputs_are_read_where_they_are(recorder):
    done = recorder("metal_prefill_reg", 40, 50, bits=4)
    assert f"input {KEY} buffer 1 offset {50 * 8 * 4}" in done.stdout
    for binding in GROUPS:
        assert re.search(rf"^input {binding} buffer \d+ offset {50 * 2}$", done.stdout, re.M)


# --- The gradient ----------------------------------------------------------------------------------------


def launches_of(done):
    """What is printed for each launch, its dispatch included."""
    assert done.returncode == 0, done.stderr
    return re.findall(r"use .*?dispatch [^\n]*", done.stdout, re.S)


def buffers(launch, kind):
    return {int(binding): int(buffer) for binding, buffer in re.findall(rf"^{kind} (\d+) buffer (\d+)", launch, re.M)}


def test_what_each_launch_of_the_gradient_takes(recorder):
    delta, dq, dkv = launches_of(recorder("backward", 100, 70))
    assert "use metal_backward_delta_half_8_" in delta
    assert buffers(delta, "input").keys() == {OUT, DOUT, DLSE}
    assert buffers(delta, "output").keys() == {DELTA}
    for launch, name, outputs in ((dq, "dq", {DQ}), (dkv, "dkv", {DK, DV})):
        assert f"use metal_backward_{name}_half_64_64_" in launch
        # No sinks: row_stats has them. No out: delta has it.
        assert buffers(launch, "input").keys() == {QUERY, KEY, VALUE, ROW_STATS, DOUT, DELTA}
        assert buffers(launch, "output").keys() == outputs
    for launch in (delta, dq, dkv):
        assert {int(binding) for binding in re.findall(r"^bytes (\d+)", launch, re.M)} == {PARAMS, BACKWARD}


def test_the_grids_of_the_gradient(recorder):
    grids = [re.search(r"dispatch (.*)", launch)[1] for launch in launches_of(recorder("backward", 100, 70))]
    # 8 rows a threadgroup; 64 rows; 64 keys of a key/value head.
    assert grids == ["13 4 1 of 256 1 1", "2 4 1 of 256 1 1", "2 2 1 of 256 1 1"]


def test_delta_is_written_before_it_is_read_and_nothing_else_waits(recorder):
    """dq and dkv run side by side: no second barrier. Delta is an output of the primitive, which MLX keeps alive."""
    done = recorder("backward", 100, 70)
    delta, dq, dkv = launches_of(done)
    assert buffers(delta, "output")[DELTA] == buffers(dq, "input")[DELTA] == buffers(dkv, "input")[DELTA]
    assert ["barrier" in launch for launch in (delta, dq, dkv)] == [False, True, False]
    assert f"output {DELTA} buffer {buffers(delta, 'output')[DELTA]} bytes {4 * 100 * 4}" in done.stdout
    assert lines(done, "keep") == []


def test_inputs_of_the_gradient_are_read_where_they_are(recorder):
    _, dq, dkv = launches_of(recorder("backward", 100, 70))
    for launch in (dq, dkv):
        keys, dout = buffers(launch, "input")[KEY], buffers(launch, "input")[DOUT]
        assert f"input {KEY} buffer {keys} offset {70 * 64 * 2}" in launch
        assert f"input {VALUE} buffer {keys} offset {70 * 64 * 2}" in launch
        assert f"input {DOUT} buffer {dout} offset {100 * 64 * 2}" in launch
    written = [buffers(launch, "output") for launch in (dq, dkv)]
    assert len({*written[0].values(), *written[1].values()} - set(buffers(dq, "input").values())) == 3


def test_constants_of_the_gradient(recorder):
    """Whole tiles of rows and of keys are another pipeline."""
    for lengths, expected in (((100, 70), ("false", "false")), ((128, 96), ("true", "true"))):
        each = re.findall(r"^specialise .*\n((?:constant .*\n)*)", recorder("backward", *lengths).stdout, re.M)
        delta, dq, dkv = map(constants_in, each)
        assert delta["has_dlse"] == dq["has_dlse"] == dkv["has_dlse"] == "true"
        assert (dq["whole_rows"], dq["whole_keys"]) == expected
    assert (dkv["whole_rows"], dkv["whole_keys"]) == ("true", "false")  # 96 keys in 64s


@pytest.mark.parametrize(("lengths", "names"), [((0, 5), ["dkv"]), ((5, 0), ["delta", "dq"]), ((0, 0), [])], ids=str)
def test_a_launch_that_writes_nothing_is_left_out(recorder, lengths, names):
    used = re.findall(r"^use metal_backward_([a-z]+)", recorder("backward", *lengths).stdout, re.M)
    assert used == names


# --- What the GPU refuses --------------------------------------------------------------------------------


def test_a_threadgroup_too_large_for_the_gpu(recorder):
    done = recorder("metal_rowwise", 40, 50, limit=512)
    assert done.returncode == 1
    assert "Maximum threads per threadgroup is 512 but requested 1024 for kernel metal_rowwise" in done.stderr
