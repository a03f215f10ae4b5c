"""The Metal backend passes the described launches to MLX's command encoder. Here a fake encoder prints what it gets."""

import inspect
import os
import re
import shutil
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from tests.builds import built, contents
from tests.core.programs import finished, run

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "packages/flashattn-core/csrc"
MLX = Path(mx.__file__).parent
SOURCES = {
    "call": ["choose"],
    "gpu": ["disk_cache", "instance", "launch"],
    "metal": ["encode", "launch"],
    "cuda": ["launch", "no_cuda"],
    "request": ["arguments", "strides"],
    "dispatch": ["gpu_call"],
}
pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="libmlx has the real classes there")


@pytest.fixture(scope="session")
def recorder():
    """Builds the Metal backend with the fake encoder. Returns a function that runs the built program."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("c++ is missing: apt-get install g++")
    here = Path(__file__).parent / "recorder"

    def compile_it(folder):
        generated = [folder / f"{backend}.cpp" for backend in ("metal", "cuda")]
        for text in generated:
            run(sys.executable, CSRC / "gpu/embed.py", CSRC, text.stem, text, folder / "d")
        command = [compiler, "-std=c++20", "-Wall", "-Wextra", "-Werror", '-DFLASHATTN_VERSION="1.2"']
        command += ['-DFLASHATTN_OLDEST_MLX_WITH_CUDA="1.2"', f"-I{here}", f"-I{CSRC}", f"-I{CSRC / 'metal'}"]
        command += ["-isystem", MLX / "include", here / "main.cpp", *generated]
        command += [CSRC / part / f"{name}.cpp" for part, names in SOURCES.items() for name in names]
        run(*command, f"-L{MLX / 'lib'}", "-lmlx", f"-Wl,-rpath,{MLX / 'lib'}", "-o", folder / "recorder")

    how = inspect.getsource(compile_it) + mx.__version__ + str(MLX)
    folder = built(compile_it, "recorder", how, run(compiler, "--version"), contents(CSRC, here))

    def record(kernel, query_len, key_len, repeats=1, limit=1024, bits=0, exit_code=0):
        arguments = (kernel, query_len, key_len, repeats, limit, bits)
        done = finished(folder / "recorder", *arguments, exit_code=exit_code)
        return done.stdout + done.stderr

    return record


def found(pattern, text):
    return re.findall(f"^{pattern}$", text, re.M)


def described(printed):
    """The printed description of each launch: (function, role of each binding, constants, grid)."""
    return [
        (function, {n: role for role, n in found(r"takes (\w+) (\d+) \w+", text)}, found(r"value (\S+)", text), grid)
        for function, text, grid in re.findall(r"^launch (\S+)\n(.*?)^on ([^\n]*)\n", printed, re.M | re.S)
    ]


def texts(printed):
    """For each launch, the lines that the encoder prints."""
    return re.findall(r"^use .*?^dispatch .*?\n", printed, re.M | re.S)


def told(printed):
    """Returns the tuples of described(), read from the encoder's calls. Constants are set once per pipeline."""
    specialised = re.findall(r"^specialise (\S+) of .* as (\S+)\n((?:constant .*\n)*)", printed, re.M)
    pipelines = {name: (function, found(r"constant (\d+) (\S+)", text)) for function, name, text in specialised}
    result = []
    for text in texts(printed):
        function, constants = pipelines[found(r"use (\S+)", text)[0]]
        assert [int(number) for number, _ in constants] == list(range(len(constants)))
        roles = {number: role for role, number in found(r"(input|output|bytes) (\d+) .*", text)}
        result.append((function, roles, [value for _, value in constants], found(r"dispatch (.*)", text)[0]))
    return result


def arrays(printed, launch, kind):
    """Returns a launch's arrays as {name: (buffer, offset)} if `kind` is "input", or as {name: (buffer, size)}."""
    names = dict(found(r"takes \w+ (\d+) (\w+)", printed))
    lines = found(rf"{kind} (\d+) buffer (\d+) \w+ (\d+)", texts(printed)[launch])
    return {names[number]: (buffer, int(bytes_)) for number, buffer, bytes_ in lines}


def kept(printed):
    return set(found(r"keep buffer (\d+)", printed))


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
    printed = recorder(kernel, *CALLS[kernel], bits=bits)
    assert len(described(printed)) == {"metal_decode_split": 2, "backward": 3}.get(kernel, 1)
    assert told(printed) == described(printed)


@pytest.mark.parametrize(
    ("kernel", "bits", "key_row"), [("metal_prefill_reg", 0, 128), ("metal_prefill_reg", 4, 32), ("backward", 0, 128)]
)
def test_inputs_are_read_where_they_are(recorder, kernel, bits, key_row):
    """An array that begins in the middle of a buffer must be bound with its offset, and not copied."""
    query_len, key_len = CALLS[kernel]
    printed = recorder(kernel, query_len, key_len, bits=bits)
    for launch in (1, 2) if kernel == "backward" else (0,):
        inputs = arrays(printed, launch, "input")
        assert inputs["key"] == inputs["value"]
        assert inputs["key"][1] == key_len * key_row
        of_groups = {offset for name, (_, offset) in inputs.items() if name.endswith(("scales", "biases"))}
        assert of_groups == ({key_len * 2} if bits else set())
        if kernel == "backward":
            assert inputs["dout"][1] == query_len * 128


def test_two_launches_share_scratch_with_a_barrier_between(recorder):
    printed = recorder("metal_decode_split", *CALLS["metal_decode_split"])
    written, read = arrays(printed, 0, "output"), arrays(printed, 1, "input")
    assert written.keys() == {"partials"}
    assert {name: read[name][0] for name in written} == {name: buffer for name, (buffer, _) in written.items()}
    assert kept(printed) == {buffer for buffer, _ in written.values()}
    assert ["\nbarrier\n" in text for text in texts(printed)] == [False, True]


def test_delta_is_written_before_it_is_read_and_nothing_else_waits(recorder):
    """After one barrier, dq and dkv must run concurrently. MLX keeps delta, because the primitive returns it."""
    printed = recorder("backward", *CALLS["backward"])
    delta, query_len = arrays(printed, 0, "output")["delta"], CALLS["backward"][0]
    assert delta[1] == 4 * query_len * 4
    assert {arrays(printed, launch, "input")["delta"][0] for launch in (1, 2)} == {delta[0]}
    assert ["\nbarrier\n" in text for text in texts(printed)] == [False, True, False]
    assert not kept(printed)


def test_compiles_and_specialises_once(recorder):
    once, twice = (recorder("metal_decode_split", 2, 4000, repeats=repeats) for repeats in (1, 2))
    assert len(found("compile .*", once)) == 2
    for what in ("compile", "specialise", "constant"):
        assert found(f"{what} .*", once) == found(f"{what} .*", twice)
    assert len(texts(twice)) == 2 * len(texts(once))


def test_names_tell_every_constant(recorder):
    printed = recorder("metal_prefill_reg", 40, 50)
    [(function, library, name)] = found(r"specialise (\S+) of (\S+) as (\S+)", printed)
    [(_, _, constants, _)] = described(printed)
    assert library == f"flashattn_core_1.2_{function}"
    assert constants
    assert name == "_".join([function, *constants])


def test_a_threadgroup_too_large_for_the_gpu(recorder):
    printed = recorder("metal_rowwise", 40, 50, limit=512, exit_code=1)
    assert "Maximum threads per threadgroup is 512 but requested 1024 for kernel metal_rowwise" in printed
