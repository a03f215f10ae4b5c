"""The Metal backend tells MLX's command encoder the right things. A recorder takes the place of a GPU."""

import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from tests.builds import built, contents

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "packages/flashattn-core/csrc"
MLX = Path(mx.__file__).parent
SOURCES = [
    *("call/kernel_table.cpp", "gpu/arguments.cpp", "gpu/instance.cpp", "gpu/launch.cpp", "metal/encode.cpp"),
    *(
        "gpu/disk_cache.cpp",
        "metal/launch.cpp",
        "cuda/launch.cpp",
        "cuda/no_cuda.cpp",
        "request/arguments.cpp",
        "dispatch/gpu_call.cpp",
        "request/strides.cpp",
    ),
]
pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="libmlx has the real classes there")


@pytest.fixture(scope="session")
def recorder():
    """Builds the backend's files with a GPU that prints. Returns a function that runs the program."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("c++ is missing: apt-get install g++")
    here = Path(__file__).parent / "recorder"

    def compile_it(folder):
        generated = [folder / f"{backend}.cpp" for backend in ("metal", "cuda")]
        for text in generated:
            subprocess.run([sys.executable, CSRC / "gpu/embed.py", CSRC, text.stem, text, folder / "d"], check=True)
        command = [compiler, "-std=c++20", "-Wall", "-Wextra", "-Werror", '-DFLASHATTN_VERSION="1.2"', f"-I{here}"]
        command += ['-DFLASHATTN_OLDEST_MLX_WITH_CUDA="1.2"']
        command += [f"-I{CSRC}", f"-I{CSRC / 'metal'}", "-isystem", MLX / "include", here / "main.cpp"]
        command += [*(CSRC / name for name in SOURCES), *generated]
        command += [f"-L{MLX / 'lib'}", "-lmlx", f"-Wl,-rpath,{MLX / 'lib'}", "-o", folder / "recorder"]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    how = inspect.getsource(compile_it) + mx.__version__ + str(MLX)
    folder = built(compile_it, "recorder", how, version, contents(CSRC, here))

    def run(kernel, query_len, key_len, repeats=1, limit=1024, bits=0):
        arguments = [folder / "recorder", kernel, query_len, key_len, repeats, limit, bits]
        return subprocess.run(list(map(str, arguments)), capture_output=True, text=True, check=False)

    return run


def found(pattern, text):
    return re.findall(f"^{pattern}$", text, re.M)


def described(done):
    """For each launch, its description: function, role of each binding, constants and grid."""
    assert done.returncode == 0, done.stderr
    return [
        (function, {n: role for role, n in found(r"takes (\w+) (\d+) \w+", text)}, found(r"value (\S+)", text), grid)
        for function, text, grid in re.findall(r"^launch (\S+)\n(.*?)^on ([^\n]*)\n", done.stdout, re.M | re.S)
    ]


def texts(done):
    """For each launch, the lines that the encoder prints."""
    return re.findall(r"^use .*?^dispatch .*?\n", done.stdout, re.M | re.S)


def told(done):
    """Like described(), but from what the encoder is told. Constants are told once for each pipeline, by number."""
    specialised = re.findall(r"^specialise (\S+) of .* as (\S+)\n((?:constant .*\n)*)", done.stdout, re.M)
    pipelines = {name: (function, found(r"constant (\d+) (\S+)", text)) for function, name, text in specialised}
    result = []
    for text in texts(done):
        function, constants = pipelines[found(r"use (\S+)", text)[0]]
        assert [int(number) for number, _ in constants] == list(range(len(constants)))
        roles = {number: role for role, number in found(r"(input|output|bytes) (\d+) .*", text)}
        result.append((function, roles, [value for _, value in constants], found(r"dispatch (.*)", text)[0]))
    return result


def arrays(done, launch, kind):
    """A launch's inputs or outputs by name: the buffer, and an input's offset or output's size in bytes."""
    names = dict(found(r"takes \w+ (\d+) (\w+)", done.stdout))
    lines = found(rf"{kind} (\d+) buffer (\d+) \w+ (\d+)", texts(done)[launch])
    return {names[number]: (buffer, int(bytes_)) for number, buffer, bytes_ in lines}


def kept(done):
    return set(found(r"keep buffer (\d+)", done.stdout))


CALLS = {
    "metal_decode_fast": (1, 50),
    "metal_decode_parallel": (1, 500),
    "metal_decode_split": (2, 4000),
    "metal_prefill_tg": (40, 50),
    "metal_prefill_reg": (40, 50),
    "metal_rowwise": (40, 50),
    "backward": (100, 70),
}


@pytest.mark.parametrize(
    ("kernel", "bits"),
    [*((name, 0) for name in CALLS), *((name, 4) for name in CALLS if name not in ("metal_prefill_tg", "backward"))],
)
def test_each_launch_is_told_as_it_is_described(recorder, kernel, bits):
    done = recorder(kernel, *CALLS[kernel], bits=bits)
    assert len(described(done)) == {"metal_decode_split": 2, "backward": 3}.get(kernel, 1)
    assert told(done) == described(done)


@pytest.mark.parametrize(
    ("kernel", "bits", "key_row"), [("metal_prefill_reg", 0, 128), ("metal_prefill_reg", 4, 32), ("backward", 0, 128)]
)
def test_inputs_are_read_where_they_are(recorder, kernel, bits, key_row):
    """Arrays that begin in the middle of a buffer must be bound with that offset, and not copied."""
    done = recorder(kernel, *CALLS[kernel], bits=bits)
    query_len, key_len = CALLS[kernel]
    for launch in (1, 2) if kernel == "backward" else (0,):
        inputs = arrays(done, launch, "input")
        assert inputs["key"] == inputs["value"]
        assert inputs["key"][1] == key_len * key_row
        assert {inputs[name][1] for name in inputs if name[-6:] in ("scales", "biases")} == (
            {key_len * 2} if bits else set()
        )
        if kernel == "backward":
            assert inputs["dout"][1] == query_len * 128


def test_two_launches_share_scratch_with_a_barrier_between(recorder):
    done = recorder("metal_decode_split", *CALLS["metal_decode_split"])
    written, read = arrays(done, 0, "output"), arrays(done, 1, "input")
    assert written.keys() == {"partials"}
    assert {name: read[name][0] for name in written} == {name: buffer for name, (buffer, _) in written.items()}
    assert kept(done) == {buffer for buffer, _ in written.values()}
    assert ["\nbarrier\n" in text for text in texts(done)] == [False, True]


def test_delta_is_written_before_it_is_read_and_nothing_else_waits(recorder):
    """dq and dkv must run concurrently, without a second barrier. delta is an output of the primitive: MLX keeps it."""
    done = recorder("backward", *CALLS["backward"])
    delta, query_len = arrays(done, 0, "output")["delta"], CALLS["backward"][0]
    assert delta[1] == 4 * query_len * 4
    assert {arrays(done, launch, "input")["delta"][0] for launch in (1, 2)} == {delta[0]}
    assert ["\nbarrier\n" in text for text in texts(done)] == [False, True, False]
    assert not kept(done)


def test_compiles_and_specialises_once(recorder):
    once, twice = (recorder("metal_decode_split", 2, 4000, repeats=repeats) for repeats in (1, 2))
    assert len(found("compile .*", once.stdout)) == 2
    for what in ("compile", "specialise", "constant"):
        assert found(f"{what} .*", once.stdout) == found(f"{what} .*", twice.stdout)
    assert len(texts(twice)) == 2 * len(texts(once))


def test_names_tell_every_constant(recorder):
    done = recorder("metal_prefill_reg", 40, 50)
    [(function, library, name)] = found(r"specialise (\S+) of (\S+) as (\S+)", done.stdout)
    [(_, _, constants, _)] = described(done)
    assert library == f"flashattn_core_1.2_{function}"
    assert constants
    assert name == "_".join([function, *constants])


def test_a_threadgroup_too_large_for_the_gpu(recorder):
    done = recorder("metal_rowwise", 40, 50, limit=512)
    assert done.returncode == 1
    assert "Maximum threads per threadgroup is 512 but requested 1024 for kernel metal_rowwise" in done.stderr
