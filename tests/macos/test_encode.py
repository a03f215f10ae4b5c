"""What the Metal backend tells MLX's command encoder, on a recorder in place of a GPU."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from builds import built, contents

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "packages/flashattn-core/csrc"
MLX = Path(mx.__file__).parent
SOURCES = [
    *("call/kernel_table.cpp", "gpu/arguments.cpp", "gpu/launch.cpp", "metal/encode.cpp", "metal/launch.cpp"),
    *("metal/sources.cpp", "op/arguments.cpp", "op/gpu_call.cpp", "op/strides.cpp"),
]
OF_GROUPS = {"key_scales", "key_biases", "value_scales", "value_biases"}
PARTIALS = {"partial_out", "partial_max", "partial_sum"}

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="libmlx has the real classes there")


@pytest.fixture(scope="session")
def recorder():
    """The backend's own files and a GPU that prints; a function that runs it and returns what was printed."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("c++ is missing: apt-get install g++")
    here = Path(__file__).parent / "recorder"

    def compile_it(folder):
        generated = folder / "kernel_sources.cpp"
        subprocess.run([sys.executable, CSRC / "gpu/embed.py", CSRC, "metal", generated, folder / "d"], check=True)
        command = [compiler, "-std=c++20", "-Wall", "-Wextra", "-Werror", '-DFLASHATTN_VERSION="1.2"', f"-I{here}"]
        command += [f"-I{CSRC}", f"-I{CSRC / 'metal'}", "-isystem", MLX / "include", here / "main.cpp"]
        command += [*(CSRC / name for name in SOURCES), generated]
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


class Launch:
    """What is told for one launch: a function's name and constants, buffers by their names, and the grid."""

    def __init__(self, text, names, constants):
        self.name = re.search(r"^use (\S+)", text, re.M)[1]
        self.constants = constants[self.name]
        inputs = found(r"input (\d+) buffer (\d+) offset (\d+)", text)
        self.inputs = {names[index]: (buffer, int(offset)) for index, buffer, offset in inputs}
        outputs = found(r"output (\d+) buffer (\d+) bytes (\d+)", text)
        self.outputs = {names[index]: (buffer, int(size)) for index, buffer, size in outputs}
        self.structs = {names[index] for index in found(r"bytes (\d+) \d+", text)}
        self.waits = "\nbarrier\n" in text
        self.grid, self.threadgroup = found(r"dispatch ([\d ]+) of ([\d ]+)", text)[0]


def found(pattern, text):
    return re.findall(f"^{pattern}$", text, re.M)


def kept(done):
    return set(found(r"keep buffer (\d+)", done.stdout))


def launches(done):
    assert done.returncode == 0, done.stderr
    names, constants = (dict(found(rf"{kind} (\d+) (\w+)", done.stdout)) for kind in ("binding", "named"))
    specialised = re.findall(r"^specialise .* as (\S+)\n((?:constant .*\n)*)", done.stdout, re.M)
    values = {
        name: {constants[index]: value for index, value in found(r"constant (\d+) (\S+)", text)}
        for name, text in specialised
    }
    return [Launch(text, names, values) for text in re.findall(r"use .*?dispatch [^\n]*\n", done.stdout, re.S)]


ONE_LAUNCH = ["metal_rowwise", "metal_prefill_tg", "metal_prefill_reg"]


@pytest.mark.parametrize("kernel", ONE_LAUNCH)
def test_one_launch(recorder, kernel):
    done = recorder(kernel, 40, 50)
    [launch] = launches(done)
    assert not kept(done)
    assert launch.inputs.keys() == {"query", "key", "value", "sinks"}
    assert launch.outputs.keys() == {"out", "lse", "row_stats"}
    assert launch.structs == {"params"}
    assert not launch.waits


def test_inputs_are_read_where_they_are(recorder):
    """Keys that begin in the middle of a buffer are bound there; nothing is copied."""
    [launch] = launches(recorder("metal_prefill_reg", 40, 50))
    assert launch.inputs["key"] == launch.inputs["value"]
    assert launch.inputs["key"][1] == 50 * 64 * 2
    [quantised] = launches(recorder("metal_prefill_reg", 40, 50, bits=4))
    assert quantised.inputs["key"][1] == 50 * 8 * 4
    assert {quantised.inputs[binding][1] for binding in OF_GROUPS} == {50 * 2}
    for launch in launches(recorder("backward", 100, 70))[1:]:
        assert launch.inputs["key"][1] == 70 * 64 * 2
        assert launch.inputs["dout"][1] == 100 * 64 * 2


def test_two_launches_share_scratch_with_a_barrier_between(recorder):
    done = recorder("metal_decode_split", 2, 4000)
    first, second = launches(done)
    assert first.outputs.keys() == PARTIALS
    assert second.outputs.keys() == {"out", "lse", "row_stats"}
    assert {binding: second.inputs[binding][0] for binding in PARTIALS} == {
        binding: buffer for binding, (buffer, _) in first.outputs.items()
    }
    sizes = sorted(size for _, size in first.outputs.values())
    assert sizes == [sizes[0], sizes[0], 64 * sizes[0]]
    assert kept(done) == {buffer for buffer, _ in first.outputs.values()}
    assert (first.waits, second.waits) == (False, True)
    assert first.structs == second.structs == {"params", "split"}


def test_compiles_and_specialises_once(recorder):
    once, twice = recorder("metal_decode_split", 2, 4000), recorder("metal_decode_split", 2, 4000, repeats=2)
    for what in ("compile", "specialise", "constant"):
        assert found(f"{what} .*", once.stdout) == found(f"{what} .*", twice.stdout)
    assert len(found("compile .*", once.stdout)) == 2
    assert len(launches(twice)) == 2 * len(launches(once))


def test_names_tell_every_constant(recorder):
    done = recorder("metal_prefill_reg", 40, 50)
    [(function, library, name)] = found(r"specialise (\S+) of (\S+) as (\S+)", done.stdout)
    assert library == f"flashattn_core_1.2_{function}"
    [launch] = launches(done)
    numbers = {"true": "1", "false": "0"}
    assert launch.constants
    assert name == function + "".join(f"_{numbers.get(value, value)}" for value in launch.constants.values())


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
    first, *merge = launches(recorder(kernel, *lengths, bits=4))
    assert first.inputs.keys() - {"sinks"} == {"query", "key", "value", *OF_GROUPS}
    assert re.match(rf"{kernel}_half_64_64\S*_quantised_", first.name)
    names = ["has_key_scales", "quant_bits", "group_size", "group_dtype"]
    assert [first.constants[name] for name in names] == ["true", "4", "64", "1"]
    for launch in merge:
        assert not launch.inputs.keys() & {"key", "value", *OF_GROUPS}
        assert "quantised" not in launch.name


# --- The gradient ----------------------------------------------------------------------------------------


def test_what_each_launch_of_the_gradient_takes(recorder):
    delta, dq, dkv = launches(recorder("backward", 100, 70))
    assert delta.name.startswith("metal_backward_delta_half_8_")
    assert delta.inputs.keys() == {"out", "dout", "dlse"}
    assert delta.outputs.keys() == {"delta"}
    for launch, name, outputs in ((dq, "dq", {"dq"}), (dkv, "dkv", {"dk", "dv"})):
        assert launch.name.startswith(f"metal_backward_{name}_half_64_64_")
        # No sinks: lse has them. No out: delta has it.
        assert launch.inputs.keys() == {"query", "key", "value", "row_stats", "dout", "delta"}
        assert launch.outputs.keys() == outputs
    assert delta.structs == dq.structs == dkv.structs == {"params", "backward"}


def test_the_grids_of_the_gradient(recorder):
    done = launches(recorder("backward", 100, 70))
    # 8 rows a threadgroup; 64 rows; 64 keys of a key/value head.
    assert [launch.grid for launch in done] == ["13 4 1", "2 4 1", "2 2 1"]
    assert {launch.threadgroup for launch in done} == {"256 1 1"}


def test_delta_is_written_before_it_is_read_and_nothing_else_waits(recorder):
    """dq and dkv run side by side: no second barrier. Delta is an output of the primitive, which MLX keeps alive."""
    done = recorder("backward", 100, 70)
    delta, dq, dkv = launches(done)
    assert delta.outputs["delta"] == (dq.inputs["delta"][0], 4 * 100 * 4)
    assert dq.inputs["delta"] == dkv.inputs["delta"]
    assert [launch.waits for launch in (delta, dq, dkv)] == [False, True, False]
    assert not kept(done)


def test_what_the_gradient_writes_is_nothing_that_it_reads(recorder):
    _, dq, dkv = launches(recorder("backward", 100, 70))
    written = {buffer for launch in (dq, dkv) for buffer, _ in launch.outputs.values()}
    assert len(written - {buffer for buffer, _ in dq.inputs.values()}) == 3


@pytest.mark.parametrize(
    ("lengths", "dq_tiles", "dkv_tiles"),
    [((100, 70), ("false", "false"), ("false", "false")), ((128, 96), ("true", "true"), ("true", "false"))],
    ids=str,
)
def test_constants_of_the_gradient(recorder, lengths, dq_tiles, dkv_tiles):
    """Whole tiles of rows and of keys, 32 in dq and 64 in dkv, are another pipeline; dlse is known in the last one."""
    delta, dq, dkv = launches(recorder("backward", *lengths))
    assert {launch.constants["has_dlse"] for launch in (delta, dq, dkv)} == {"true"}
    assert (dq.constants["whole_rows"], dq.constants["whole_keys"]) == dq_tiles
    assert (dkv.constants["whole_rows"], dkv.constants["whole_keys"]) == dkv_tiles


@pytest.mark.parametrize(("lengths", "names"), [((0, 5), ["dkv"]), ((5, 0), ["delta", "dq"]), ((0, 0), [])], ids=str)
def test_a_launch_that_writes_nothing_is_left_out(recorder, lengths, names):
    done = launches(recorder("backward", *lengths))
    assert [launch.name.removeprefix("metal_backward_").partition("_")[0] for launch in done] == names


def test_a_threadgroup_too_large_for_the_gpu(recorder):
    done = recorder("metal_rowwise", 40, 50, limit=512)
    assert done.returncode == 1
    assert "Maximum threads per threadgroup is 512 but requested 1024 for kernel metal_rowwise" in done.stderr
