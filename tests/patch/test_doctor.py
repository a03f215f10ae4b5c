"""mlxlm-flash doctor prints each finding with its cure on one line, and exits with 1 when something is broken."""

import importlib.metadata
import json
import math
import re
import sys
from functools import partial
from unittest.mock import Mock

import flashattn_core
import mlx.core as mx
import mlxlm_flash_patch as flash
import pytest
from click.testing import CliRunner
from flashattn_core import _ext
from flashattn_core.check import survey
from mlxlm_flash_patch import blas, coverage, doctor, tune
from mlxlm_flash_patch.cli import cli
from mlxlm_flash_patch.patch_points import POINTS
from release_table import releases

from tests.core.programs import ANOTHER_MLX, library
from tests.patch.model_configs import config
from tests.promises import promise


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    """Hides the machine's own faults from doctor, so that doctor finds only the faults that a test adds."""
    for name in ("MLXLM_FLASH", *doctor.CPU_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FLASHATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(blas, "blas", lambda: "openblas")
    monkeypatch.setattr("os.cpu_count", lambda: 1)


def examined(*arguments):
    """Runs doctor. Returns its lines and its exit code."""
    done = CliRunner().invoke(cli, ["doctor", *arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.output.splitlines(), done.exit_code


def found(line, *arguments):
    """Runs doctor, and returns its lines. One of them must begin with `line`.

    If `line` begins with ✗, it must be the only such line, and the exit code must be 1. Otherwise the code must be 0.
    """
    lines, code = examined(*arguments)
    assert any(each.startswith(line) for each in lines), lines
    assert code == sum(each.startswith("✗ ") for each in lines) == int(line.startswith("✗ "))
    return lines


@pytest.fixture
def examined_with(command, light):
    """examined_with(env): runs doctor in a new process with these variables. Returns its lines and its exit code."""

    def run(env):
        done = command("mlxlm-flash", "doctor", env={**light, **env}, timeout=180)
        assert done.stderr == ""
        return done.stdout.splitlines(), done.returncode

    return run


def test_nothing_to_find():
    lines, code = examined()
    assert code == 0
    assert lines[0] == f"environment: {sys.prefix}, Python {sys.version.split()[0]}"
    findings = lines[2:-2]
    assert all(line.startswith("✓ ") for line in findings)
    assert all("cure" not in line for line in findings)
    for package, number in flash.status().versions.items():
        assert f"✓ versions: {package} {number}" in findings
    for backend, description in flashattn_core.backends().items():
        assert f"✓ {backend}: {description}" in findings
    late = "(functions of mlx-lm's gemma2, phi3small and gear follow when a program imports them)"
    assert f"✓ attention: the patch replaces {len(POINTS)} functions {late}" in findings
    for rest in ("MLXLM_FLASH: not set", "BLAS: openblas", "self-test: "):
        assert any(line.startswith(f"✓ {rest}") for line in findings), rest
    assert lines[-1] == "broken: 0 · could be better: 0"


OLDEST, *_, NEWEST = (release.mlx for release in releases())
MLX = "mlx[cpu]" if sys.platform == "linux" else "mlx"  # on Linux, this extra installs libmlx
OTHER_MLX = f"✗ versions: found mlx 0.1, expected {OLDEST} to {NEWEST} · cure: pip install"


@promise("mlxlm-flash doctor names the cure for another version")
@pytest.mark.parametrize(
    ("package", "number", "line"),
    [
        ("mlx", "0.1", f"{OTHER_MLX} '{MLX}=={NEWEST}'"),
        *(("mlx", release.mlx, f"✓ versions: mlx {release.mlx}") for release in releases()),
        (
            "mlx-lm",
            "0.1",
            "✗ versions: found mlx-lm 0.1, expected 0.31.3 or later · cure: pip install 'mlx-lm>=0.31.3'",
        ),
        *(("mlx-lm", number, f"✓ versions: mlx-lm {number}") for number in ("0.31.3", "0.32.10", "1.0")),
        ("mlx", None, f"✗ versions: mlx is not installed · cure: pip install '{MLX}=={NEWEST}'"),
        ("mlx-lm", None, "! versions: mlx-lm is not installed, so the patch replaces only MLX's own function · cure: "),
        ("flashattn-core", None, "✗ versions: flashattn-core is not installed · cure: pip install flashattn-core"),
    ],
)
def test_another_version(monkeypatch, package, number, line):
    """With None as its number, the package is missing."""

    def version(name, ask=importlib.metadata.version):
        if name == package and number is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return number if name == package and ask is importlib.metadata.version else ask(name)

    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setattr(doctor, "requires", partial(version, ask=importlib.metadata.requires))
    found(line)


@promise("mlxlm-flash doctor names what an NVIDIA GPU lacks")
def test_an_nvidia_gpu_that_is_not_used(monkeypatch):
    """With MLX's CPU build, doctor warns and goes on. With MLX's CUDA build, doctor stops at the unusable GPU."""
    backends = {"cpu": "AVX2, 2 threads", "metal": "not in this MLX build", "cuda": "NVRTC is not there: reinstall it"}
    monkeypatch.setattr(flashattn_core, "backends", lambda: backends)
    lines = found("! cuda: NVRTC is not there · cure: reinstall it")
    assert lines[-3].startswith("✓ attention: ")
    monkeypatch.setattr("mlx.core.cuda.is_available", lambda: True)
    lines = found("✗ cuda: NVRTC is not there · cure: reinstall it")
    assert lines[-3].startswith("✗ cuda: ")


@pytest.mark.parametrize("value", ["", "on"])
def test_a_variable_that_means_nothing(monkeypatch, value):
    monkeypatch.setenv("MLXLM_FLASH", value)
    found(f"✗ MLXLM_FLASH: {value!r} is not a valid value · cure: unset MLXLM_FLASH, or set one of 0, 1, strict")


@pytest.mark.slow("2 seconds")
@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD; run this test on Linux")
def test_an_extension_made_for_another_mlx(command, light, examined_with, tmp_path):
    """doctor runs although the extension does not load. Other commands fail, and print the reason in one line."""
    env = {**light, "LD_PRELOAD": library(tmp_path / "other.so", ANOTHER_MLX)}

    lines, code = examined_with(env)
    assert code == 1
    built_for = importlib.metadata.version("mlx")
    why = f"flashattn_core was built for mlx {built_for}, but found mlx 0.99.1."
    [line] = [line for line in lines if line.startswith("✗ ")]
    assert line.startswith(f"✗ extension: {why}")
    install = re.escape(f"pip install '{MLX}=={built_for}'")
    assert re.search(rf" · cure: {install}(, or .*)?$", line)

    for arguments in (["run", "mlx_lm.generate"], ["status"]):
        done = command("mlxlm-flash", *arguments, env=env)
        assert done.returncode == 1
        assert done.stderr.startswith(f"Error: {why}")
        assert done.stderr.count("\n") == 1
    done = command("python", "-c", "import mlxlm_flash_patch as flash; flash.enable()", env=env)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: {why}")


def test_two_versions_of_nanobind_s_abi(monkeypatch):
    """nanobind then refuses MLX's arrays as objects of an unknown type."""
    monkeypatch.setattr(flashattn_core, "array_id", Mock(side_effect=TypeError("incompatible function arguments")))
    lines = found("✗ extension: flashattn_core and mlx use different nanobind ABIs · cure: pip install --")
    assert not any("self-test" in line for line in lines)  # doctor skips the self-test, which might crash


@pytest.mark.rotate(1, default=2)
@pytest.mark.parametrize("name", doctor.CPU_VARIABLES)
def test_nonsense_in_the_environment(examined_with, name):
    lines, code = examined_with({name: "nonsense"})
    assert code == 1
    [line] = [line for line in lines if line.startswith("✗ ")]
    assert line.startswith(f"✗ cpu: {name} is 'nonsense', expected ")
    assert line.endswith(f" · cure: unset {name}")


def test_a_process_that_may_not_use_all_cores(monkeypatch):
    threads = int(flashattn_core.backends()["cpu"].split()[-2])
    monkeypatch.setattr("os.cpu_count", lambda: threads + 1)
    found(f"! threads: flash attention uses {threads} of {threads + 1} cores")
    monkeypatch.setenv("FLASHATTN_NUM_THREADS", str(threads))
    assert not any("threads:" in line for line in examined()[0])


@pytest.mark.parametrize(
    ("library", "cure"),
    [
        (None, "apt-get install libopenblas0-pthread, then pass --blas auto to `mlxlm-flash run` or flash-eval"),
        ("libx.so", "pass --blas auto to `mlxlm-flash run` or flash-eval, or set LD_PRELOAD=libx.so"),
    ],
)
def test_the_reference_blas(monkeypatch, library, cure):
    monkeypatch.setattr(blas, "blas", lambda: "reference")
    monkeypatch.setattr(blas, "openblas", lambda: library)
    [line] = [line for line in found("! BLAS: MLX uses the slow reference BLAS") if "BLAS" in line]
    assert f" · cure: {cure}" in line


@promise("mlxlm-flash doctor finds wrong numbers")
@pytest.mark.parametrize(("error", "said"), [(0.01, "1.0e-02"), (math.nan, "nan")])
@pytest.mark.parametrize("length", [20, 1])
def test_wrong_numbers(monkeypatch, error, said, length):
    right = flashattn_core.flash_attention

    def wrong(query, *args, **kwargs):
        return right(query, *args, **kwargs) + (error if query.shape[2] == length else 0)

    monkeypatch.setattr(flashattn_core, "flash_attention", wrong)
    found(f"✗ self-test: flash attention differs from the reference by {said} · cure: please report")


def test_a_call_that_raises(monkeypatch):
    refuses = Mock(side_effect=flashattn_core.NoKernelError("the driver's\n own words"))
    monkeypatch.setattr(flashattn_core, "flash_attention", refuses)
    found("✗ self-test: NoKernelError: the driver's own words · cure: pip install --force-reinstall flashattn-core")


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (config("qwen2"), "✓ model: all 2 attention calls of a prompt use flash attention"),
        (config("gemma2"), "✓ model: all 2 attention calls of a prompt use flash attention"),
        (config("gemma3_text"), "✓ model: all 2 attention calls of a prompt use flash attention"),
        ({"model_type": "none"}, "✗ model: mlx-lm cannot build a model from "),
        ({"model_type": ""}, "✗ model: "),
        ({**config("qwen2"), "vocab_size": 0}, "✗ model: mlx-lm cannot build a model from "),
        ({**config("qwen2"), "num_hidden_layers": 0}, "✗ model: a model built from "),
    ],
)
def test_a_model(tmp_path, settings, line):
    """doctor --model builds the model and lets it read a short prompt. It does not look the type up in a table."""
    (tmp_path / "config.json").write_text(json.dumps(settings))
    lines = found(line, "--model", str(tmp_path))
    assert lines[-1] == f"broken: {line.count('✗')} · could be better: 0"


def test_a_model_without_flash_attention(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({**config("llama"), "head_dim": 600}))
    model = ("--model", str(tmp_path))
    found("! model: 0 attention calls of a prompt use flash attention; others do not: head_dim over 512 2", *model)
    monkeypatch.setattr(coverage, "attention_of", lambda name: ([], 0, {}))
    found("! model: no attention call of a prompt uses flash attention", *model)
    monkeypatch.setattr(coverage, "attention_of", lambda name: ([None] * 3, 1, {}))
    left = "1 are left to MLX's own attention, which is estimated to be faster"
    found(f"✓ model: 2 attention calls of a prompt use flash attention, {left}", *model)


def test_a_model_in_the_local_hub_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    not_there = "me/it is not a folder, and the local hub cache does not hold its config.json"
    found(f"✗ model: {not_there} · cure: ", "--model", "me/it")
    ref, snapshot = (tmp_path / "models--me--it" / part for part in ("refs", "snapshots/0"))
    for folder, file, text in ((ref, "main", "0"), (snapshot, "config.json", json.dumps(config("qwen2")))):
        folder.mkdir(parents=True)
        (folder / file).write_text(text)
    found("✓ model: all 2 attention calls of a prompt use flash attention", "--model", "me/it")


def test_a_model_that_brings_its_own_code(tmp_path):
    """doctor does not run the model's code."""
    (tmp_path / "config.json").write_text(json.dumps({**config("qwen2"), "model_file": "own.py"}))
    (tmp_path / "own.py").write_text("raise SystemExit('it was run')")
    found(f"! model: {tmp_path} brings its own code, own.py, ", "--model", str(tmp_path))


def test_a_kernel_that_is_wrong_on_this_machine(monkeypatch):
    monkeypatch.setattr(flashattn_core._ext, "backend_of", lambda device: "cuda")
    wrong = "77 queries: out is wrong"
    monkeypatch.setattr(survey, "of_backend", lambda backend: [("cuda_decode", 3, ""), ("cuda_prefill", 2, wrong)])
    lines = found(f"✗ kernels: cuda_prefill: {wrong} · cure: report this, and leave FLASHATTN_CHECK unset", "--kernels")
    assert "✓ kernels: cuda_decode is right in 3 kinds of calls" in lines


def test_how_long_kernels_take(monkeypatch):
    def measured():
        yield tune.Measured("a kernel", 0.67, "a kernel: 2.0 µs, MLX's own 3.0 µs")
        raise RuntimeError("the GPU is gone")

    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(tune, "measured", measured)
    monkeypatch.setattr(tune, "costs", lambda found: f"{len(found)} line\n")
    assert list(map(str, doctor.times())) == [
        "✓ tune: a kernel: 2.0 µs, MLX's own 3.0 µs",
        "✗ tune: the GPU is gone · cure: please report this finding",
        "✓ tune: 1 line",
    ]


def test_on_a_cpu_there_is_nothing_to_compare_or_to_time():
    lines = found("✓ kernels: nothing to compare", "--kernels")
    assert lines[-1] == "broken: 0 · could be better: 0"
    found("✓ tune: on a CPU there is nothing to time", "--tune")


def test_what_another_library_or_the_environment_changes(monkeypatch):
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", lambda *arrays, **options: arrays[0])
    found("! mlx-lm: mx.fast.scaled_dot_product_attention was not replaced: another library's function, ")
    with pytest.warns(flash.FlashFallbackWarning), flash.enabled():  # as a sitecustomize.py may do
        found("! mlx-lm: another library has replaced mx.fast.scaled_dot_product_attention with ")
    monkeypatch.setenv("FLASHATTN_CPU_ISA", "baseline")
    found("! cpu: FLASHATTN_CPU_ISA=baseline is set, which may make the CPU backend slower · cure: unset FLASHATTN_CPU")


def test_checks_before():
    for number in range(3):
        _ext.keep("checked", f"a GPU, mlx 1\npipeline {number}\n", "passed")
    file = _ext.keep("failed", "cuda_decode is wrong", "")
    lines = found("✓ checked: 3 programs passed their check on a GPU, mlx 1")
    cure = f"send us {file}; delete that file once it is out of date"
    assert f"! checked: this kernel is not used: cuda_decode is wrong · cure: {cure}" in lines


def test_all_of_it_in_a_file(tmp_path):
    lines = found("✓ cpu: ", "--json", str(tmp_path / "doctor.json"))
    result = json.loads((tmp_path / "doctor.json").read_text())
    assert result["command"] == "mlxlm-flash doctor"
    assert result["broken"] == 0
    assert [f"{finding['subject']}: {finding['what']}" for finding in result["findings"]] == [
        line[2:].partition(" · cure: ")[0] for line in lines if line[:2] in ("✓ ", "! ", "✗ ")
    ]


@pytest.mark.parametrize("end", [KeyboardInterrupt, RuntimeError])
def test_whatever_ends_it_writes_what_was_found(monkeypatch, tmp_path, end):
    monkeypatch.setattr(doctor, "kernels", Mock(side_effect=end))
    CliRunner().invoke(cli, ["doctor", "--kernels", "--json", str(tmp_path / "doctor.json")])
    assert len(json.loads((tmp_path / "doctor.json").read_text())["findings"]) > 5


def test_a_file_that_cannot_be_written_is_said_first(tmp_path):
    lines, code = examined("--json", str(tmp_path / "no" / "doctor.json"))
    assert code == 2
    assert "No such file or directory" in lines[-1]
    assert not any(line.startswith("✓") for line in lines)
