"""flash-eval doctor: each finding, made to happen, with its cure below it; exit code 1 when something is broken."""

import csv
import importlib.metadata
import io
import json
import sys
from pathlib import Path
from unittest.mock import Mock

import flashattn_core
import mlxlm_flash_patch as flash
import pytest
from flash_evals import doctor, hub, implementations, machine, measure
from flash_evals.errors import EvalError
from mlxlm_flash_patch import doctor as patch_doctor
from msgspec import to_builtins
from msgspec.structs import replace

STEADY = machine.Bounds([100e9, 95e9], [10e9, 12e9], [3e9, 5e9])
THREADS = implementations.threads()
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="/proc; run this test on Linux")


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    """A machine on which doctor has nothing to say: what a test changes is what it finds."""
    monkeypatch.setattr(patch_doctor, "examine", lambda: iter([patch_doctor.ok("patch", "all well")]))
    monkeypatch.setattr(machine, "bounds", lambda: STEADY)
    monkeypatch.setattr(doctor, "version", lambda name: "1.2")
    monkeypatch.setattr(hub, "commit", lambda *_: "0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setattr("os.cpu_count", lambda: THREADS)
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
def fine(findings):
    """There is nothing but what is fine, and among it a finding like each of these."""

    def check(**expected):
        found = findings()
        assert [finding for finding in found if finding["mark"] != "ok"] == []
        for name, says in expected.items():
            assert any(f["subject"] == name.replace("_", " ") and says in f["what"] for f in found), (name, found)

    return check


def test_nothing_to_find(fine, invoke):
    demo = "Qwen2 demo, 1.0 M parameters, float32; flash: cpu_prefill 4 calls, 0 fallbacks; max |Δlogit| "
    fine(
        **{"multiply-adds": "95–100 GFLOP/s"},
        patch="all well",
        processor=machine.describe().processor,
        memory=" GB of it free",
        memory_reads="11 GB/s",
        matrix_products="4.0 GFLOP/s, 4% of the multiply-adds",
        peak_memory=measure.memory_method(),
        demo_model=demo,
        versions="flash-evals 1.2",
        datasets="1.2: perplexity --dataset from the hub",
        matplotlib="1.2: report",
        torch="1.2: kernels --impl torch",
        cache=" GB free",
        hub=" answers",
    )
    head, _, columns, *lines, _, last = invoke("doctor").stdout.splitlines()
    assert head.endswith(f" · Python {sys.version.split()[0]} · {sys.prefix}")
    assert columns.split() == ["what", "finding"]
    assert all(line.startswith("✓   ") for line in lines)
    assert last == "broken: 0 · could be better: 0"


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
    monkeypatch.setattr(hub, "commit", lambda *_: None)
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


def fails(error):
    return Mock(side_effect=error)


def without(package):
    return lambda name: "1.2" if name != package else fails(importlib.metadata.PackageNotFoundError(name))()


def logits_off_by(difference):
    """A patch that changes them by that, or takes no calls."""
    real = measure.run

    def run(name, work, tokens, did):
        if difference is None:
            return work(), None
        logits, trial = real(name, work, tokens, did)
        return logits + (difference if name == "on" else 0), trial

    return run


# What is changed, and the finding that this makes: its mark, subject, words and cure.
FOUND = [
    ("flash_evals.machine.physical_memory", fails(OSError("no such thing\nas this")),
     "problem", "hardware", "the check failed: OSError: no such thing", "please report it"),
    ("os.cpu_count", lambda: THREADS + 1,
     "warning", "threads", f"flash uses {THREADS} of {THREADS + 1} cores", "taskset"),
    ("flash_evals.machine.bounds", lambda: machine.Bounds([100e9, 79e9], [10e9], [3e9]),
     "warning", "multiply-adds", "79–100 GFLOP/s within seconds: times will scatter", "stop what else runs"),
    pytest.param("flash_evals.measure.memory_method", lambda: "MLX's allocator",
     "warning", "peak memory", "MLX's allocator: memory that a kernel takes by itself", "clear_refs", marks=LINUX),
    ("flash_evals.models.DEMO_MODEL", Path(__file__).parent,
     "problem", "demo model", "it has no config.json", f"{doctor.REINSTALL} flash-evals"),
    ("flash_evals.measure.run", logits_off_by(0.01),
     "problem", "demo model", "its logits differ by 1.0e-02 with the patch on", "please report it"),
    ("flash_evals.measure.run", logits_off_by(float("nan")),
     "problem", "demo model", "its logits differ by nan with the patch on", "please report it"),
    ("flash_evals.measure.run", logits_off_by(None),
     "problem", "demo model", "flash: no calls, 0 fallbacks", f"{doctor.REINSTALL} mlxlm-flash-patch"),
    ("flash_evals.doctor.version", without("torch"),
     "warning", "torch", "not installed: no kernels --impl torch", "pip install 'torch==2.13.0'"),
    ("flash_evals.doctor.version", without("matplotlib"),
     "warning", "matplotlib", "not installed: no report, and --plot of kernels", "pip install 'matplotlib<4,>=3.9'"),
    ("flash_evals.doctor.version", without("datasets"),
     "warning", "datasets", "not installed: no perplexity --dataset from the hub", "pip install 'datasets<6,>=4'"),
    ("huggingface_hub.constants.HF_HUB_CACHE", "/dev/null/cache",
     "warning", "cache", "/dev/null/cache cannot be written to", "HF_HUB_CACHE=FOLDER"),
    ("datasets.config.HF_DATASETS_CACHE", "/dev/null/cache",
     "warning", "cache", "/dev/null/cache cannot be written to", "HF_DATASETS_CACHE=FOLDER"),
    ("flash_evals.hub.commit", lambda *_: None,
     "warning", "hub", " does not answer: what is in the caches", "--model FOLDER and --dataset FILE need none"),
    ("flash_evals.hub.commit", fails(EvalError("no")), "warning", "hub", " answers: no", "another HF_ENDPOINT"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "to", "mark", "subject", "what", "cure"), FOUND)
def test_what_is_found(findings, monkeypatch, changed, to, mark, subject, what, cure):
    """One finding, and no other that is not fine."""
    monkeypatch.setattr(changed, to)
    [found] = [finding for finding in findings() if finding["mark"] != "ok"]
    assert (found["mark"], found["subject"]) == (mark, subject)
    assert what in found["what"]
    assert cure in found["cure"]


def test_what_is_set_is_no_finding(fine, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: THREADS + 1)
    monkeypatch.setenv("FLASHATTN_NUM_THREADS", "1")  # of which the patch's doctor speaks
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.delattr(hub, "commit")
    fine(processor=f"{THREADS + 1} cores", hub="HF_HUB_OFFLINE is set")


def test_a_process_that_is_patched(findings):
    with flash.enabled():
        [found] = [finding for finding in findings() if finding["mark"] != "ok"]
    assert found["subject"] == "demo model"
    assert "the patch is on for this whole process" in found["what"]


def test_a_gpu(fine, monkeypatch):
    described = machine.describe()
    monkeypatch.setattr(machine, "kind", lambda: "gpu")
    monkeypatch.setattr(machine, "describe", lambda: replace(described, processor="M9"))
    monkeypatch.setattr(machine, "peak_flops", lambda dtype: {"bfloat16": 8e14, "float32": 4e14}[dtype])
    monkeypatch.setattr(machine, "bandwidth", lambda: 3e12)
    products = "800.0 TFLOP/s in bfloat16, 400.0 TFLOP/s in float32"
    fine(processor="M9", matrix_products=products, memory_copy="3,000 GB/s, reads and writes")


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


def test_the_machine(monkeypatch):
    """Named is what a figure depends on; what bounds it is measured per second."""
    described = machine.describe()
    assert described.versions.keys() == {"mlx", "mlx-lm", "flashattn-core", "mlxlm-flash-patch", "flash-evals"}
    assert 1e8 < machine.free_memory() <= machine.physical_memory() < 1e14  # bytes
    kind, backend = described.device.split(", ", maxsplit=1)
    assert backend == flashattn_core.backends()["metal" if kind == "gpu" else "cpu"]
    monkeypatch.undo()
    measured = machine.bounds()
    for figures in (measured.multiply_adds, measured.reads, measured.matrix_products):
        assert len(figures) > 1
        assert all(1e7 < figure < 1e14 for figure in figures)
