"""After Ctrl-C or an error, flash-eval shows what it has measured. After Ctrl-C it exits with code 130."""

import json
import signal
from unittest.mock import Mock

import pytest
from flash_evals.work import generation, measure, paired, training

from tests.promises import promise


def stop():
    signal.raise_signal(signal.SIGINT)


@pytest.fixture
def at_trial(monkeypatch):
    """at_trial(number, happens=stop): calls happens() in trial `number`. Warm-ups count as trials."""

    def at_trial(number, happens=stop):
        trials = []

        def run(*arguments):
            trials.append(arguments)
            if len(trials) == number:
                happens()
            return measure.run(*arguments)

        for module in (paired, generation, training):
            monkeypatch.setattr(module, "run", run)

    return at_trial


@pytest.fixture
def commands(model_folder, perplexity):
    return {
        "perplexity": perplexity,
        "speed": ["speed", "--model", model_folder, "-p", "8,16,32", "-g", 0, "-d", 0, "-r", 1],
        "finetune": ["finetune", "--model", model_folder, "-p", "8,16,32", "-r", 2, "--grad-checkpoint"],
        "kernels": ["kernels", "--shape", "2/1x8,1/1x600", "--seq-len", 8, "--impl", "flash", "-r", 1],
    }


OUT_OF_MEMORY = RuntimeError("[metal] Insufficient Memory\nand more")


def said_of(what):
    return f"Error: {what}: [metal] Insufficient Memory and more\n"


@promise("Ctrl-C keeps the measurements, and ends with 130")
@pytest.mark.slow("4 seconds")
@pytest.mark.parametrize(
    ("command", "trial", "what", "unit", "kept"),
    [
        # The third test stops after its warm-up, so the result does not have it. The first two tests are complete.
        ("speed", 2 * (2 + 2) + 2 + 1, "pp32", "trials", [("pp8", 1), ("pp16", 1)]),
        # The second length stops in its second repetition, and has one step. The first length is complete.
        ("finetune", 2 * 3 + 2 * 2 + 2, "a training step of 16 tokens", "steps", [(8, 2), (16, 1)]),
    ],
)
@pytest.mark.parametrize("error", [None, OUT_OF_MEMORY])
def test_speed_and_finetune(invoke, at_trial, commands, tmp_path, command, trial, what, unit, kept, error):
    """After Ctrl-C or an error, the page and the file have what was measured. stderr also has the error."""
    at_trial(trial, Mock(side_effect=error) if error else stop)
    page = invoke(*commands[command], "--json", tmp_path / "out.json")
    assert (page.exit_code, page.stderr) == ((2, said_of(f"{what} fails with the patch off")) if error else (130, ""))
    assert page.stdout.endswith(f"The run was interrupted: the figures are of the {unit} that were finished.\n")
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["interrupted"] is True
    name = "test" if command == "speed" else "seq_len"
    assert [(each[name], len(each["trials"])) for each in result["results"]] == kept


@pytest.mark.parametrize("command", ["perplexity", "speed", "finetune", "kernels"])
def test_before_anything_is_measured(invoke, at_trial, fake_implementation, quick_machine, commands, command):
    at_trial({"perplexity": 1, "speed": 3, "finetune": 2}.get(command))
    fake_implementation("flash", before=stop)  # stops `kernels`, in which at_trial() counts no trial
    page = invoke(*commands[command])
    assert (page.exit_code, page.stdout, page.stderr) == (130, "", "Interrupted.\n")
    if command == "finetune":
        at_trial(1, Mock(side_effect=OUT_OF_MEMORY))
        page = invoke(*commands[command])
        what = "a training step of 8 tokens fails with the patch on"
        assert (page.exit_code, page.stdout, page.stderr) == (2, "", said_of(what))


def test_kernels_keep_what_came_before_an_error(invoke, quick_machine, commands, tmp_path):
    page = invoke(*commands["kernels"], "--json", tmp_path / "out.json")
    assert page.exit_code == 2
    assert page.stderr.startswith("Error: flash cannot compute 1/1x600, 8 queries, 8 keys, causal, float32: ")
    assert "2/1x8" in page.stdout
    assert page.stdout.endswith("The run was interrupted: the figures are of the trials that were finished.\n")
    [entry] = json.loads((tmp_path / "out.json").read_text())
    assert entry["settings"]["interrupted"] is True
