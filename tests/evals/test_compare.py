"""--arm with --save-logprobs saves one arm's scores. --compare compares another run's scores with them, by token."""

import re

import pytest
from flash_evals.work import machine
from msgspec import to_builtins
from msgspec.structs import replace

from tests.promises import promise


@pytest.fixture
def run_arm(run_command, tmp_path):
    """run_arm(arm, *options): runs one arm with --save-logprobs. Adds the scores' path to the result, as `file`."""

    def run(arm, *arguments):
        path = tmp_path / f"{arm}.jsonl"
        return {**run_command("perplexity", "--arm", arm, "--save-logprobs", path, *arguments), "file": path}

    return run


@pytest.mark.rotate(1, default=2)
@pytest.mark.parametrize(("held", "live"), [("off", "on"), ("on", "off")])
def test_one_arm_and_the_other_later(run_command, run_arm, same_scores, held, live):
    """An arm that runs alone has the same figures as in a run of both arms. If the other arm runs later with --compare,
    max_abs_dlogit and mean_kl are null in the file and dashes on the page, because they need the logits of both arms.
    """
    together, one = run_command("perplexity"), run_arm(held)
    assert live not in one
    assert one["paired"] is None
    assert all(trial["order"] == [held] for trial in one["trials"])
    assert one["flash"] == (together["flash"] if held == "on" else {"calls": {}, "fallbacks": {}, "left": {}})
    assert one["page"].splitlines()[2].split() == ["patch", held]
    assert one["page"].endswith("Only one arm ran: there is nothing to compare.\n")

    later = run_command("perplexity", "--arm", live, "--compare", one["file"])
    expected = {**together, "paired": {**together["paired"], "max_abs_dlogit": None, "mean_kl": None}}
    same_scores(later, expected)
    same_scores({**expected, held: one[held]}, expected)
    assert later["compared"]["trials"] == [trial[held] for trial in one["trials"]]
    assert "top-1 agreement 100.000 % · max |Δlogit| – · mean KL – · flash: cpu_prefill" in later["page"]
    for title in (f"patch {live}", f"patch {held}, {held}.jsonl"):
        assert title in later["page"].splitlines()[2]
    assert "and this run have the same model, machine, versions and batch size" in later["page"]
    assert "Same predictions; " in later["page"]


def test_the_same_arm_of_another_machine_and_model(run_command, run_arm, make_model, model_folder, monkeypatch):
    """The page lists how the two runs differ: here in the model, its weights, the processor and MLX's version.

    So a quantised model can be compared with the original. A column's title names its arm, and its file if it has one.
    """
    there, described, model = run_arm("on")["file"], machine.describe(), make_model(rope_theta=100.0)
    here = replace(described, processor="Another", versions={**described.versions, "mlx": "9.9"})
    monkeypatch.setattr(machine, "describe", lambda: here)
    result = run_command("perplexity", "--arm", "on", "--model", model, "--compare", there)
    assert "off" not in result
    assert result["paired"]["of"] == ["other", "on"]
    assert abs(result["paired"]["delta_nll"]) > 1e-4
    assert result["compared"]["machine"] == to_builtins(described)
    assert [re.sub("weights .*", "weights", fact) for fact in result["compared"]["differs_in"]] == [
        f"model {model_folder.name}, this run has {model.name}",
        "weights",
        f"processor {described.processor}, this run has Another",
        f"mlx {described.versions['mlx']}, this run has 9.9",
    ]
    assert "; ".join(result["compared"]["differs_in"]) in result["page"]
    assert "Predictions differ: another token ranks first at " in result["page"]
    assert re.split("  +", result["page"].splitlines()[2].strip()) == ["patch on, on.jsonl", "patch on", "difference"]


@promise("--compare refuses another text, other tokens and other windows")
def test_a_file_of_something_else_is_refused(refused, run_arm, make_model, perplexity, text_file, tmp_path):
    """--compare refuses a file with other windows, another text or other tokens, and a file with too few windows."""
    other, path = tmp_path / "other.txt", run_arm("off")["file"]
    other.write_text(text_file.read_text() + "More.")

    def says(said, *arguments):
        line = refused(*perplexity, "--arm", "on", "--compare", path, *arguments)
        assert re.search(f"--compare {path} {said}", line), line

    says("was written by a different run: context 24, this run has 32", "--context", 32, "--stride", 24)
    says("was written by a different run: stride 24, this run has 12", "--stride", 12)
    rolling = "stride 24, this run has None; scoring rolling, this run has half"
    says(f"was written by a different run: {rolling}", "--scoring", "half")
    says("was written by a different run: documents joined, this run has separate", "--documents", "separate")
    says("was written by a different run: text ", *("--dataset", other))
    says("was written by a different run: tokens .*; bos None, this run has bos", "--model", make_model(bos=True))
    run_arm("off", "--max-windows", 2)  # overwrites the old file
    says("holds only 2 of the .*give --max-windows 2")
