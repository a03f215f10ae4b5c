"""mlxlm-flash doctor: each finding, made to happen, with its cure on its line; exit code 1 when something is broken."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import flashattn_core
import mlxlm_flash_patch as flash
import pytest
from click.testing import CliRunner
from mlx_lm.models import base, llama
from mlxlm_flash_patch import blas, doctor, hook
from mlxlm_flash_patch.cli import cli

SEAM = "scaled_dot_product_attention"


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    """A machine on which doctor has nothing to say: what a test changes is what it finds."""
    for name in ("MLXLM_FLASH", *doctor.CPU_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hook, "path", lambda: tmp_path / hook.NAME)
    monkeypatch.setattr(blas, "blas", lambda: "openblas")


def examined(*arguments):
    """All lines, and the exit code."""
    done = CliRunner().invoke(cli, ["doctor", *arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.output.splitlines(), done.exit_code


def found(line, *arguments, broken):
    """Among the findings is one that begins like this."""
    lines, code = examined(*arguments)
    assert any(each.startswith(line) for each in lines), lines
    assert code == int(broken)
    assert sum(each.startswith("✗ ") for each in lines) == int(broken)
    return lines


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
    for rest in ("hook: not installed", "MLXLM_FLASH: not set", "BLAS: openblas", "self-test: ", "mlx-lm: "):
        assert any(line.startswith(f"✓ {rest}") for line in findings), rest
    assert lines[-1] == "broken: 0 · could be better: 0"


MLX = "mlx[cpu]" if sys.platform == "linux" else "mlx"  # on Linux the extra brings libmlx


@pytest.mark.parametrize(("package", "pin", "wanted"), [("mlx", "0.32.4", MLX), ("mlx-lm", "0.32.2", "mlx-lm")])
def test_another_version(monkeypatch, package, pin, wanted):
    monkeypatch.setattr(doctor, "version", lambda name: "0.1" if name == package else importlib.metadata.version(name))
    found(f"✗ versions: {package} 0.1, made for {pin} · cure: pip install '{wanted}=={pin}'", broken=True)


@pytest.mark.parametrize(
    ("libmlx", "extra"), [("mlx-cpu", "cpu"), ("mlx-cuda-12", "cuda12"), ("mlx-cuda-13", "cuda13")]
)
def test_the_cure_for_another_mlx_keeps_its_libmlx(monkeypatch, libmlx, extra):
    monkeypatch.setattr(doctor, "distributions", lambda: [SimpleNamespace(name="mlx"), SimpleNamespace(name=libmlx)])
    monkeypatch.setattr(doctor, "version", lambda name: "0.1" if name == "mlx" else importlib.metadata.version(name))
    found(f"✗ versions: mlx 0.1, made for 0.32.4 · cure: pip install 'mlx[{extra}]==0.32.4'", broken=True)


@pytest.mark.parametrize(
    ("package", "cure"), [("mlx-lm", "pip install 'mlx-lm==0.32.2'"), ("flashattn-core", "pip install flashattn-core")]
)
def test_a_package_is_missing(monkeypatch, package, cure):
    def ask(real):
        def answer(name):
            if name == package:
                raise importlib.metadata.PackageNotFoundError(name)
            return real(name)

        return answer

    monkeypatch.setattr(doctor, "version", ask(importlib.metadata.version))
    monkeypatch.setattr(doctor, "requires", ask(importlib.metadata.requires))
    found(f"✗ versions: {package} is not installed · cure: {cure}", broken=True)


@pytest.mark.parametrize("value", ["", "on"])
def test_a_variable_that_means_nothing(monkeypatch, value):
    monkeypatch.setenv("MLXLM_FLASH", value)
    line = f"✗ MLXLM_FLASH: {value!r} means nothing · cure: unset it, or one of 0, 1, strict"
    found(line, broken=True)


def test_the_hook(monkeypatch):
    monkeypatch.setenv("MLXLM_FLASH", "0")
    found("✓ hook: not installed", broken=False)
    monkeypatch.setenv("MLXLM_FLASH", "1")
    without = (
        "! hook: not installed, so that only `mlxlm-flash run` looks at MLXLM_FLASH · cure: mlxlm-flash hook install"
    )
    found(without, broken=False)
    found("✓ MLXLM_FLASH: 1", broken=False)
    path = hook.install()
    found(f"✓ hook: installed, {path}", broken=False)
    path.write_text("import older\n")
    found(f"! hook: {path} is installed by another version of mlxlm-flash-patch · cure: mlxlm-", broken=False)
    path.write_bytes(b"\xff")
    found(f"! hook: {path} is installed by another version of mlxlm-flash-patch · cure: mlxlm-", broken=False)


def test_a_hook_that_could_not_be(monkeypatch):
    def path():
        raise LookupError("/x holds mlxlm-flash-patch, and is no site-packages folder")

    monkeypatch.setattr(hook, "path", path)
    found("! hook: /x holds mlxlm-flash-patch, and is no site-packages folder · cure: pip install ", broken=False)


@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD; run this test on Linux")
def test_an_extension_made_for_another_mlx(command, monkeypatch, tmp_path):
    """doctor speaks, where nothing else of the package can; and the others say the same in one line."""
    source, library = tmp_path / "other.cpp", tmp_path / "other.so"
    source.write_text('namespace mlx::core { const char* version() { return "0.99.1"; } }')
    subprocess.run(["c++", "-shared", "-fPIC", source, "-o", library], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(library))

    done = command("mlxlm-flash", "doctor", timeout=180)
    assert (done.returncode, done.stderr) == (1, "")
    why = "flashattn_core was built for mlx 0.32.4 and found mlx 0.99.1."
    [line] = [line for line in done.stdout.splitlines() if line.startswith("✗ ")]
    assert line.startswith(f"✗ extension: {why}")
    assert re.search(rf" · cure: pip install '{re.escape(MLX)}==0\.32\.4'(, or .*)?$", line)

    for arguments in (["run", "mlx_lm.generate"], ["status"]):
        done = command("mlxlm-flash", *arguments)
        assert done.returncode == 1
        assert done.stderr.startswith(f"Error: {why}")
        assert done.stderr.count("\n") == 1
    done = command("python", "-c", "import mlxlm_flash_patch as flash; flash.enable()")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: {why}")


def test_no_extension(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashattn_core", None)
    lines = found("✗ extension: import of flashattn_core halted", broken=True)
    assert lines[-3].endswith(" · cure: pip install --force-reinstall --no-deps flashattn-core")


def test_two_versions_of_nanobind_s_abi(monkeypatch):
    monkeypatch.setitem(doctor._interpreter_dict(), "__nb_internals_some_abi_v21_mlx__", None)
    lines = found("✗ extension: two versions of nanobind's ABI: v21, v22 · cure: pip install --force-", broken=True)
    assert not any("self-test" in line for line in lines)  # it might crash


@pytest.mark.parametrize("name", doctor.CPU_VARIABLES)
def test_nonsense_in_the_environment(command, monkeypatch, name):
    monkeypatch.setenv(name, "nonsense")
    done = command("mlxlm-flash", "doctor", timeout=180)
    assert (done.returncode, done.stderr) == (1, "")
    [line] = [line for line in done.stdout.splitlines() if line.startswith("✗ ")]
    assert line.startswith(f"✗ cpu: {name} is 'nonsense', expected ")
    assert line.endswith(f" · cure: unset {name}")


def test_a_forced_instruction_set_and_number_of_threads(command, monkeypatch):
    free = flashattn_core.backends()["cpu"]
    monkeypatch.setenv("FLASHATTN_CPU_ISA", "baseline")
    monkeypatch.setenv("FLASHATTN_NUM_THREADS", "3")
    done = command("mlxlm-flash", "doctor", timeout=180)
    assert done.returncode == 0, done.stdout
    expected = f"! cpu: FLASHATTN_CPU_ISA=baseline, FLASHATTN_NUM_THREADS=3; without, {free}"
    assert f"{expected} · cure: unset FLASHATTN_CPU_ISA FLASHATTN_NUM_THREADS" in done.stdout.splitlines()
    assert "3 threads" in done.stdout


def test_a_forced_number_of_threads_that_is_the_machine_s_own(command, monkeypatch):
    threads = flashattn_core.backends()["cpu"].split(", ")[1].split()[0]
    monkeypatch.setenv("FLASHATTN_NUM_THREADS", threads)
    assert "! cpu" not in command("mlxlm-flash", "doctor", timeout=180).stdout


@pytest.mark.parametrize(
    ("library", "cure"),
    [(None, "apt install libopenblas0-pthread, then LD_PRELOAD=libopenblas.so.0"), ("libx.so", "LD_PRELOAD=libx.so ")],
)
def test_the_reference_blas(monkeypatch, library, cure):
    monkeypatch.setattr(blas, "blas", lambda: "reference")
    monkeypatch.setattr("ctypes.util.find_library", lambda name: library)
    [line] = [line for line in found("! BLAS: the reference one, slow", broken=False) if "BLAS" in line]
    assert f" · cure: {cure}" in line


def test_where_mlx_brings_another_blas(monkeypatch):
    monkeypatch.setattr(blas, "blas", lambda: None)
    assert not any("BLAS" in line for line in examined()[0])


@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD; run this test on Linux")
def test_a_preloaded_blas(command, monkeypatch, tmp_path):
    library = tmp_path / "libopenblas.so.0"
    subprocess.run(["c++", "-shared", "-fPIC", "-x", "c++", os.devnull, "-o", library], check=True)
    assert "! BLAS: the reference one" in command("mlxlm-flash", "doctor", timeout=180).stdout
    monkeypatch.setenv("LD_PRELOAD", str(library))
    assert "✓ BLAS: openblas" in command("mlxlm-flash", "doctor", timeout=180).stdout


def test_wrong_numbers(monkeypatch):
    right = flashattn_core.flash_attention
    monkeypatch.setattr(flashattn_core, "flash_attention", lambda *args, **kwargs: right(*args, **kwargs) + 0.01)
    found("✗ self-test: off by 1.0e-02 from the reference · cure: please report", broken=True)


def test_attention_that_does_not_run(monkeypatch):
    """What two ABIs of nanobind look like to a caller."""

    def incompatible(*args, **kwargs):
        raise TypeError("__init__(): incompatible function arguments.\nInvoked with types: mlx.core.array")

    monkeypatch.setattr(flashattn_core, "flash_attention", incompatible)
    line = "✗ self-test: TypeError: __init__(): incompatible function arguments. · cure: pip install --force-reinstall"
    found(line, broken=True)


def test_another_signature(monkeypatch):
    monkeypatch.setattr(base, SEAM, base.scaled_dot_product_attention)
    exec(f"def {SEAM}(q, k, v): ...", vars(base))
    lines = found(f"✗ mlx-lm: mlx_lm.models.base.{SEAM} takes (q, k, v);", broken=True)
    assert lines[-3].endswith("cure: pip install --force-reinstall --no-deps 'mlx-lm==0.32.2'")


def test_another_library_in_the_same_place(monkeypatch):
    def theirs(*args):
        return None

    monkeypatch.setattr(llama, SEAM, theirs)
    lines = found("! mlx-lm: mlx_lm.models.llama holds ", broken=False)
    [line] = [line for line in lines if "holds" in line]
    assert "theirs, not mlx-lm's own: left alone · cure: switch that library off" in line


@pytest.fixture
def model(tmp_path):
    """model(model_type): a folder with this configuration and nothing else."""

    def make(**config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    return make


@pytest.mark.parametrize(
    ("model_type", "module"),
    [
        ("qwen2", "qwen2"),
        ("mistral", "llama"),  # mlx-lm's own remapping
        ("gemma3", "gemma3_text"),  # a shell around another
    ],
)
def test_a_model_that_is_covered(model, model_type, module):
    found(
        f"✓ model: {model_type} is covered: mlx_lm.models.{module}",
        "--model",
        model(model_type=model_type),
        broken=False,
    )


def test_a_model_without_attention(model):
    folder = model(model_type="mamba")
    lines = found("! model: mamba is not covered", "--model", folder, broken=False)
    assert lines[-1] == "broken: 0 · could be better: 1"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "no_such_type"}, "no_such_type: Model type no_such_type not supported."),
        ({"hidden_size": 8}, "config.json names no model_type"),
    ],
)
def test_a_model_that_mlx_lm_does_not_run(model, config, says):
    lines, code = examined("--model", model(**config))
    assert code == 1
    assert says in lines[-3]
    assert " · cure: " in lines[-3]


@pytest.mark.parametrize("name", ["no/such_model", "no such model", "no/such/folder"])
def test_a_model_that_is_not_here(name):
    lines = found("✗ model: ", "--model", name, broken=True)
    assert f" · cure: --model a folder with a config.json, or `hf download {name}` first" in lines[-3]


def test_a_folder_that_holds_no_model(tmp_path):
    lines = found("✗ model: [Errno 2] No such file or directory: ", "--model", str(tmp_path), broken=True)
    assert str(tmp_path / "config.json") in lines[-3]


def test_a_hub_id_of_which_the_cache_knows(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("c0ffee")
    (repository / "snapshots" / "c0ffee").mkdir(parents=True)
    (repository / "snapshots" / "c0ffee" / "config.json").write_text('{"model_type": "qwen2"}')
    found("✓ model: qwen2 is covered", "--model", "someone/model", broken=False)
