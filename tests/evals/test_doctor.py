"""flash-eval doctor: each finding, made to happen, with its cure below it; exit code 1 when something is broken."""

import csv
import importlib.metadata
import io
import json
import sys
from unittest.mock import Mock

import flashattn_core
import mlxlm_flash_patch as flash
import pytest
from flash_evals import doctor, hub, implementations, machine, measure, models
from flash_evals.errors import EvalError
from mlxlm_flash_patch import doctor as patch_doctor
from msgspec import to_builtins
from msgspec.structs import replace

STEADY = machine.Bounds([100e9, 95e9], [10e9, 12e9], [3e9, 5e9])


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    """A machine on which doctor has nothing to say: what a test changes is what it finds."""
    monkeypatch.setattr(patch_doctor, "examine", lambda: iter([patch_doctor.ok("patch", "all well")]))
    monkeypatch.setattr(machine, "bounds", lambda: STEADY)
    monkeypatch.setattr(doctor, "version", lambda name: "1.2")
    monkeypatch.setattr(hub, "commit", lambda *_: "0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setattr("os.cpu_count", implementations.threads)
    monkeypatch.delenv("FLASHATTN_NUM_THREADS", raising=False)


@pytest.fixture
def findings(invoke):
    """All of them; the exit code is that of what is broken."""

    def run():
        done = invoke("doctor", "-o", "json")
        result = json.loads(done.stdout)
        marks = [finding["mark"] for finding in result["findings"]]
        assert (result["broken"], result["could_be_better"]) == (marks.count("problem"), marks.count("warning"))
        assert (done.exit_code, done.stderr) == (int("problem" in marks), "")
        assert all(bool(finding["cure"]) == (finding["mark"] != "ok") for finding in result["findings"])
        return result["findings"]

    return run


@pytest.fixture
def found(findings):
    """Among the findings is one like this, and no other that is not fine."""

    def check(mark, subject, what, cure=""):
        all_of_them = findings()
        [one] = [finding for finding in all_of_them if finding["subject"] == subject and what in finding["what"]]
        assert one["mark"] == mark
        assert cure in one["cure"]
        assert [finding for finding in all_of_them if finding["mark"] != "ok"] == ([] if mark == "ok" else [one])

    return check


def test_nothing_to_find(invoke):
    done = invoke("doctor")
    assert (done.exit_code, done.stderr) == (0, "")
    head, *_ = lines = done.stdout.splitlines()
    assert head.endswith(f" · Python {sys.version.split()[0]} · {sys.prefix}")
    assert lines[2].split() == ["what", "finding"]
    assert all(line.startswith("✓   ") for line in lines[3:-2])
    assert lines[-1] == "broken: 0 · could be better: 0"
    subjects = ["patch", "processor", "memory", "multiply-adds", "memory reads", "matrix products", "peak memory"]
    for subject in (*subjects, "demo model", "datasets", "matplotlib", "torch", "cache", "hub"):
        assert any(line.startswith(f"✓   {subject} ") for line in lines), subject


def test_the_files_and_the_other_formats(invoke, tmp_path):
    json_file, csv_file = tmp_path / "out.json", tmp_path / "out.csv"
    page = invoke("doctor", "-o", "md", "--json", json_file, "--csv", csv_file).stdout
    assert page.splitlines()[2:4] == ["|  | what | finding |", "| --- | --- | --- |"]
    result = json.loads(json_file.read_text())
    assert (result["command"], result["machine"]) == ("doctor", to_builtins(machine.describe()))
    assert list(csv.DictReader(io.StringIO(csv_file.read_text()))) == result["findings"]


def test_the_patch_s_findings(findings, monkeypatch):
    """Its doctor's own, as they are: the real ones this time."""
    monkeypatch.undo()
    monkeypatch.setattr(machine, "bounds", lambda: STEADY)
    monkeypatch.setattr(hub, "commit", lambda *_: "0" * 40)
    theirs = [finding.subject for finding in patch_doctor.examine()]
    assert {"versions", "extension", "cpu", "self-test", "mlx-lm"} <= set(theirs)
    subjects = [finding["subject"] for finding in findings()]
    assert subjects[: len(theirs)] == theirs
    assert all(subject in (doctor.command.help or "") for subject in subjects)


def test_what_needs_flash_is_left_out_where_it_does_not_run(invoke, monkeypatch):
    """And a cure stands below what it cures."""
    broken = patch_doctor.problem("extension", "does not load", "pip install it")
    monkeypatch.setattr(patch_doctor, "examine", lambda: iter([broken]))
    monkeypatch.delattr(flashattn_core, "backends")
    done = invoke("doctor", "-o", "json")
    assert (done.exit_code, done.stderr) == (1, "")
    result = json.loads(done.stdout)
    assert (result["broken"], result["machine"]) == (1, None)
    assert {"datasets", "cache", "hub"} <= {finding["subject"] for finding in result["findings"]}
    lines = invoke("doctor").stdout.splitlines()
    assert lines[3].split(maxsplit=2) == ["✗", "extension", "does not load"]
    assert lines[4].split(maxsplit=1) == ["cure:", "pip install it"]
    assert lines[4].index("cure") == lines[3].index("does not")
    assert lines[-1] == "Left out, as flash attention does not run: hardware, bounds, peak memory, demo model."


def test_a_check_that_fails_costs_no_other(found, monkeypatch):
    monkeypatch.setattr(machine, "physical_memory", Mock(side_effect=OSError("no such thing\nas this")))
    found("problem", "hardware", "the check failed: OSError: no such thing", "please report it")


def test_a_processor_of_which_not_all_may_be_used(found, monkeypatch):
    threads = implementations.threads()
    monkeypatch.setattr("os.cpu_count", lambda: threads + 1)
    found("warning", "threads", f"flash uses {threads} of {threads + 1} cores", "taskset")
    monkeypatch.setenv("FLASHATTN_NUM_THREADS", "1")  # of which the patch's doctor speaks
    found("ok", "processor", f"{threads + 1} cores")


def test_what_bounds_the_figures(found, monkeypatch):
    found("ok", "multiply-adds", "95–100 GFLOP/s")
    found("ok", "memory reads", "11 GB/s")
    found("ok", "matrix products", "4.0 GFLOP/s, 4% of the multiply-adds")
    monkeypatch.setattr(machine, "bounds", lambda: machine.Bounds([100e9, 79e9], [10e9], [3e9]))
    found("warning", "multiply-adds", "79–100 GFLOP/s within seconds: times will scatter", "stop what else runs")
    described = machine.describe()
    monkeypatch.setattr(machine, "kind", lambda: "gpu")
    monkeypatch.setattr(machine, "describe", lambda: replace(described, processor="M9"))
    monkeypatch.setattr(machine, "peak_flops", lambda dtype: {"bfloat16": 8e14, "float32": 4e14}[dtype])
    monkeypatch.setattr(machine, "bandwidth", lambda: 3e12)
    found("ok", "processor", "M9")
    found("ok", "matrix products", "800.0 TFLOP/s in bfloat16, 400.0 TFLOP/s in float32")
    found("ok", "memory copy", "3,000 GB/s, reads and writes")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc; run this test on Linux")
def test_memory_that_is_not_seen(found, monkeypatch):
    found("ok", "peak memory", measure.memory_method())
    monkeypatch.setattr(measure, "memory_method", lambda: "peak of MLX's allocator")
    found("warning", "peak memory", "peak of MLX's allocator: memory that a kernel takes by itself", "clear_refs")


def test_the_demo_model_through_the_patch(found, monkeypatch, tmp_path):
    found("ok", "demo model", "Qwen2 demo, 1.0 M parameters; flash: cpu_prefill 4 calls, 0 fallbacks; max |Δlogit| ")
    with flash.enabled():
        found("problem", "demo model", "the patch is on for this whole process", "by itself")
    monkeypatch.setattr(models, "DEMO_MODEL", tmp_path)
    found("problem", "demo model", "it has no config.json", f"{doctor.REINSTALL} flash-evals")


@pytest.mark.parametrize(
    ("off_by", "says", "cure"),
    [
        (0.01, "its logits differ by 1.0e-02 with the patch on", "please report it"),
        (float("nan"), "its logits differ by nan with the patch on", "please report it"),
        (None, "flash: no calls, 0 fallbacks", "mlxlm-flash-patch"),
    ],
)
def test_a_patch_that_does_something_else(found, monkeypatch, off_by, says, cure):
    """It changes the logits, or takes no calls."""
    real = measure.run

    def changed(name, work, did):
        if off_by is None:
            return work(), None
        logits, trial = real(name, work, did)
        return logits + (off_by if name == "on" else 0), trial

    monkeypatch.setattr(measure, "run", changed)
    found("problem", "demo model", says, cure)


MISSING = {
    "torch": ("no kernels --impl torch", "pip install 'torch==2.13.0'"),
    "matplotlib": ("no report, and --plot of kernels and finetune", "pip install 'matplotlib<4,>=3.9'"),
    "datasets": ("no perplexity --dataset from the hub", "pip install 'datasets<6,>=4'"),
}


@pytest.mark.parametrize("package", MISSING)
def test_a_package_is_missing(found, monkeypatch, package):
    def version(name):
        if name == package:
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.2"

    found("ok", package, "1.2: ")
    monkeypatch.setattr(doctor, "version", version)
    says, cure = MISSING[package]
    found("warning", package, f"not installed: {says}", cure)


@pytest.mark.parametrize(
    ("module", "variable"), [("huggingface_hub.constants", "HF_HUB_CACHE"), ("datasets.config", "HF_DATASETS_CACHE")]
)
def test_a_cache_that_cannot_be_written(found, monkeypatch, tmp_path, module, variable):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "cache"
    monkeypatch.setattr(f"{module}.{variable}", str(folder))
    found("warning", "cache", f"{folder} cannot be written to", f"{variable}=FOLDER")


def test_a_hub_that_is_no_help(found, monkeypatch):
    found("ok", "hub", " answers")
    monkeypatch.setattr(hub, "commit", lambda *_: None)
    found("warning", "hub", " does not answer: what is in the caches, and nothing else", "--model FOLDER")
    monkeypatch.setattr(hub, "commit", Mock(side_effect=EvalError("no")))
    found("warning", "hub", "no")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.delattr(hub, "commit")
    found("ok", "hub", "HF_HUB_OFFLINE is set")


def test_in_a_process_of_its_own(in_fresh_process, tmp_path):
    """The hub's real client, where nobody listens, writes nothing into its caches; nonsense costs no traceback."""
    cache = tmp_path / "hf"
    [outcome] = in_fresh_process(["doctor"], HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(cache))
    assert outcome.stderr == ""
    assert "http://127.0.0.1:9 does not answer" in outcome.stdout
    assert f"{cache / 'hub'}, " in outcome.stdout
    assert not cache.exists()
    [outcome] = in_fresh_process(["doctor"], FLASHATTN_NUM_THREADS="many", HF_HUB_OFFLINE="1")
    assert (outcome.exit_code, outcome.stderr) == (1, "")
    assert "FLASHATTN_NUM_THREADS is 'many'" in outcome.stdout
    assert "Left out" in outcome.stdout


def test_describe_names_what_a_figure_depends_on():
    described = machine.describe()
    assert described.versions.keys() == {"mlx", "mlx-lm", "flashattn-core", "mlxlm-flash-patch", "flash-evals"}
    assert 1e8 < machine.free_memory() <= machine.physical_memory() < 1e14  # bytes
    kind, backend = described.device.split(", ", maxsplit=1)
    assert backend == flashattn_core.backends()["metal" if kind == "gpu" else "cpu"]


def test_bounds_are_per_second(monkeypatch):
    monkeypatch.undo()
    measured = machine.bounds(times=2)
    for figures in (measured.multiply_adds, measured.reads, measured.matrix_products):
        assert len(figures) == 2
        assert all(1e7 < figure < 1e14 for figure in figures)
