"""flash-eval doctor: each finding, made to happen, with its cure; exit code 1 when something is broken."""

import csv
import io
import json
import sys
from itertools import cycle
from pathlib import Path
from unittest.mock import Mock

import flashattn_core
import mlxlm_flash_patch as flash
import pytest
from flash_evals import doctor, implementations, machine, measure
from mlxlm_flash_patch import doctor as patch_doctor
from msgspec import to_builtins
from msgspec.structs import replace

THREADS = implementations.threads()


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """A machine on which doctor has nothing to say: what a test changes is what it finds."""
    monkeypatch.setattr(patch_doctor, "examine", lambda: iter([patch_doctor.ok("patch", "all well")]))
    monkeypatch.setattr(machine, "products", lambda dtype: 4e9)
    monkeypatch.setattr(flashattn_core, "peak_flops", Mock(side_effect=cycle([100e9, 95e9])))
    monkeypatch.setattr(flashattn_core, "read_bandwidth", lambda: 11e9)
    monkeypatch.setattr("os.cpu_count", lambda: THREADS)
    monkeypatch.delenv("FLASHATTN_NUM_THREADS", raising=False)


@pytest.fixture
def findings(invoke):
    """What each is about, and what it says, of those with the mark; the exit code is that of what is broken."""

    def run(mark):
        done = invoke("doctor", "-o", "json")
        result = json.loads(done.stdout)
        marks = [finding["mark"] for finding in result["findings"]]
        assert (result["broken"], result["could_be_better"]) == (marks.count("problem"), marks.count("warning"))
        assert (done.exit_code, done.stderr) == (int("problem" in marks), "")
        assert all(bool(finding["cure"]) == (finding["mark"] != "ok") for finding in result["findings"])
        assert set(marks) == {"ok", mark}
        return {finding["subject"]: finding["what"] for finding in result["findings"] if finding["mark"] == mark}

    return run


def test_nothing_to_find(findings, invoke, tmp_path):
    found = findings("ok")
    assert found.pop("memory").endswith(" GB of it free")
    assert found.pop("model").startswith(
        "Qwen2 demo, 1.0 M parameters, float32; flash: cpu_prefill 4 calls, 0 fallbacks; max |Δlogit| "
    )
    assert found == {
        "patch": "all well",
        "versions": f"flash-evals {machine.describe().versions['flash-evals']}",
        "processor": f"{machine.describe().processor}, {THREADS} cores",
        "multiply-adds": "95–100 GFLOP/s",
        "memory reads": "11 GB/s",
        "matrix products": "4.0 GFLOP/s, 4% of the multiply-adds",
        "peak memory": measure.memory_method(),
    }
    json_file, csv_file = tmp_path / "out.json", tmp_path / "out.csv"
    head, _, columns, *lines, _, last = invoke("doctor", "--json", json_file, "--csv", csv_file).stdout.splitlines()
    assert head.endswith(f" · Python {sys.version.split()[0]} · {sys.prefix}")
    assert columns.split() == ["what", "finding"]
    assert all(line.startswith("✓   ") for line in lines)
    assert last == "broken: 0 · could be better: 0"
    result = json.loads(json_file.read_text())
    assert (result["command"], result["machine"]) == ("doctor", to_builtins(machine.describe()))
    assert list(csv.DictReader(io.StringIO(csv_file.read_text()))) == result["findings"]


def test_the_patch_s_findings(invoke, monkeypatch):
    """Its doctor's own, as they are: the real ones this time. The help has the subjects of all."""
    monkeypatch.undo()
    theirs = [finding.subject for finding in patch_doctor.examine()]
    assert {"versions", "extension", "cpu", "self-test", "attention"} <= set(theirs)
    subjects = [finding["subject"] for finding in json.loads(invoke("doctor", "-o", "json").stdout)["findings"]]
    assert subjects[: len(theirs)] == theirs
    assert all(subject in (doctor.command.help or "") for subject in subjects)


def test_what_needs_flash_is_left_out_where_it_does_not_run(invoke, monkeypatch):
    broken = patch_doctor.problem("extension", "does not load", "pip install it")
    monkeypatch.setattr(patch_doctor, "examine", lambda: iter([broken]))
    monkeypatch.delattr(flashattn_core, "backends")
    done = invoke("doctor", "-o", "json")
    assert (done.exit_code, done.stderr) == (1, "")
    result = json.loads(done.stdout)
    assert (result["broken"], result["machine"]) == (1, None)
    lines = invoke("doctor").stdout.splitlines()
    assert lines[3].split(maxsplit=2) == ["✗", "extension", "does not load · cure: pip install it"]
    assert lines[-1] == "Left out, as flash attention does not run: hardware, bounds, model."


def logits_off_by(difference):
    """A patch that changes them by that."""
    real = measure.run

    def run(arm, work, tokens, did):
        logits, trial = real(arm, work, tokens, did)
        return logits + (difference if arm == "on" else 0), trial

    return run


# What is changed, and the finding that this makes: its mark, subject, and words.
FOUND = [
    ("machine.physical_memory", Mock(side_effect=OSError("no\nsuch")), "problem", "hardware", "failed: OSError: no"),
    ("os.cpu_count", lambda: THREADS + 1, "warning", "threads", f"flash uses {THREADS} of {THREADS + 1} cores"),
    ("machine.peak_flops", Mock(side_effect=cycle([100e9, 79e9])), "warning", "multiply-adds", "79–100 GFLOP/s"),
    ("models.DEMO_MODEL", Path(__file__).parent, "problem", "model", "config.json"),
    ("measure.run", logits_off_by(0.01), "problem", "model", "max |Δlogit| 1.0e-02"),
    ("measure.run", logits_off_by(float("nan")), "problem", "model", "max |Δlogit| nan"),
    ("measure.run", lambda arm, work, tokens, did, *_: (work(), 0), "problem", "model", "flash: no calls, 0 fallbacks"),
]


@pytest.mark.parametrize(("changed", "to", "mark", "subject", "what"), FOUND)
def test_what_is_found(findings, monkeypatch, changed, to, mark, subject, what):
    monkeypatch.setattr(changed if changed.startswith("os") else f"flash_evals.{changed}", to)
    found = findings(mark)
    assert list(found) == [subject]
    assert what in found[subject]


def test_threads_that_are_set_are_no_finding(findings, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: THREADS + 1)
    monkeypatch.setenv("FLASHATTN_NUM_THREADS", "1")  # of which the patch's doctor speaks
    assert findings("ok")["processor"].endswith(f", {THREADS + 1} cores")


def test_a_process_that_is_patched(findings):
    with flash.enabled():
        assert "flash-eval cannot measure with the patch off" in findings("problem")["model"]


def test_a_gpu(findings, monkeypatch):
    described = machine.describe()
    monkeypatch.setattr(machine, "kind", lambda: "gpu")
    monkeypatch.setattr(machine, "describe", lambda: replace(described, processor="M9"))
    monkeypatch.setattr(machine, "products", lambda dtype: {"bfloat16": 8e14, "float32": 4e14}[dtype])
    monkeypatch.setattr(machine, "bandwidth", lambda: 3e12)
    assert (
        findings("ok").items()
        >= {
            "processor": "M9",
            "matrix products": "800.0 TFLOP/s in bfloat16, 400.0 TFLOP/s in float32",
            "memory copy": "3,000 GB/s, reads and writes",
        }.items()
    )


def test_nonsense_in_a_variable_costs_no_traceback(in_fresh_process):
    [outcome] = in_fresh_process(["doctor"], FLASHATTN_NUM_THREADS="many")
    assert (outcome.exit_code, outcome.stderr) == (1, "")
    assert "FLASHATTN_NUM_THREADS is 'many'" in outcome.stdout
    assert "Left out" in outcome.stdout


def test_the_machine(monkeypatch):
    """Named is what a figure depends on; what bounds it is measured per second."""
    described = machine.describe()
    assert described.versions.keys() == {"mlx", "mlx-lm", "flashattn-core", "mlxlm-flash-patch", "flash-evals"}
    kind, backend = described.device.split(", ", maxsplit=1)
    assert backend == flashattn_core.backends()["metal" if kind == "gpu" else "cpu"]
    monkeypatch.undo()
    assert 1e8 < machine.free_memory() <= machine.physical_memory() < 1e14  # bytes
    assert all(1e7 < speed < 1e14 for speed in (machine.bandwidth(), machine.products("float32")))
