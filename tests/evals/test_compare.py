"""`--arm`, `--save-logprobs`, `--compare`: one arm now, the other later or elsewhere, paired by token."""

import re

import pytest
from flash_evals import machine
from msgspec import to_builtins
from msgspec.structs import replace

COMMAND = ("perplexity",)  # of `evaluate`


@pytest.fixture
def saved(evaluate, tmp_path):
    """The file of a run of one arm."""

    def run(arm, *arguments):
        path = tmp_path / f"{arm}.jsonl"
        evaluate("--arm", arm, "--save-logprobs", path, *arguments)
        return path

    return run


@pytest.mark.parametrize(("arm", "absent"), [("off", "on"), ("on", "off")])
def test_one_arm(evaluate, arm, absent):
    """Its figures are those it has beside the other, and flash runs in the one that is on alone."""
    both, one = evaluate(), evaluate("--arm", arm)
    assert absent not in one
    assert one["paired"] is None
    assert one[arm]["ppl"] == both[arm]["ppl"]
    assert all(trial["order"] == [arm] for trial in one["trials"])
    assert one["flash"] == (both["flash"] if arm == "on" else {"calls": {}, "fallbacks": {}})
    assert one["page"].splitlines()[2].split() == ["patch", arm]
    assert one["page"].endswith("One arm: nothing is compared.\n")


@pytest.mark.parametrize(("held", "live"), [("off", "on"), ("on", "off")])
def test_the_other_arm_later(evaluate, saved, held, live):
    """Whatever does not take both arms' logits is as if they had run together; that is null, and a dash on the page."""
    together, later = evaluate(), evaluate("--arm", live, "--compare", saved(held))
    for arm in ("off", "on"):
        for figure in ("ppl", "ppl_se", "word_ppl", "byte_ppl", "bits_per_byte"):
            assert later[arm][figure] == together[arm][figure]
    assert later["paired"] == {**together["paired"], "max_abs_dlogit": None, "mean_kl": None}
    assert later["flash"] == together["flash"]
    assert "top-1 agreement 100.000 % · max |Δlogit| – · mean KL – · flash: cpu_prefill" in later["page"]
    for title in (f"patch {live}", f"patch {held}, {held}.jsonl"):
        assert title in later["page"].splitlines()[2]
    assert "differs in nothing: the same model, machine, versions and batch size" in later["page"]
    assert "Same predictions; " in later["page"]


def test_under_other_conditions(evaluate, saved):
    """Smaller batches are slower, which is not the patch. And more windows than are compared: they end within a batch
    of the file.
    """
    together = evaluate("--max-windows", 3)
    later = evaluate("--arm", "on", "--max-windows", 3, "--compare", saved("off", "--batch-size", 2))
    assert later["tokens"] == together["tokens"]
    assert len(later["compared"]["trials"]) == 2  # that these windows take, of all that the file holds
    assert later["off"]["ppl"] == pytest.approx(together["off"]["ppl"], rel=1e-6)
    assert later["paired"]["delta_nll"] == pytest.approx(together["paired"]["delta_nll"], abs=1e-6)
    assert "off.jsonl differs in batch size 2, here 4" in later["page"]
    assert later["page"].endswith("\nSame predictions.\n")
    assert "x" not in "".join(line for line in later["page"].splitlines() if line.startswith(("prefill", "peak")))


def test_the_same_arm_of_another_machine(evaluate, saved, monkeypatch):
    """What differs is named, and the columns say what they are."""
    there = saved("on", "--batch-size", 2)
    described = machine.describe()
    here = replace(described, processor="Another", versions={**described.versions, "mlx": "9.9"})
    monkeypatch.setattr(machine, "describe", lambda: here)
    result = evaluate("--arm", "on", "--compare", there)
    assert "off" not in result
    assert result["paired"]["of"] == ["other", "on"]
    assert result["paired"]["delta_nll"] == pytest.approx(0, abs=1e-6)
    assert result["other"]["ppl"] == pytest.approx(result["on"]["ppl"], rel=1e-6)
    assert result["compared"]["machine"] == to_builtins(described)
    assert result["compared"]["differs_in"] == [
        "batch size 2, here 4",
        f"processor {described.processor}, here Another",
        f"mlx {described.versions['mlx']}, here 9.9",
    ]
    assert "; ".join(result["compared"]["differs_in"]) in result["page"]
    assert "Same predictions; " in result["page"]
    head = [cell.strip() for cell in result["page"].splitlines()[2].split("   ") if cell.strip()]
    assert head == ["patch on, on.jsonl", "patch on", "difference"]


def test_another_model_on_the_same_tokens(evaluate, saved, make_model):
    """As one compares a quantised model with the one it was made from."""
    result = evaluate("--arm", "on", "--model", make_model(rope_theta=100.0), "--compare", saved("on"))
    assert abs(result["paired"]["delta_nll"]) > 1e-4
    assert "Predictions differ: another token ranks first at " in result["page"]
    assert "weights sha256:" in result["page"]


def test_a_file_of_something_else_is_refused(refused, saved, make_model, model_folder, text_file, tmp_path):
    """Other windows, another text, other tokens of the same text; and one that holds too little."""
    (tmp_path / "other.txt").write_text(text_file.read_text() + "More.")
    path = saved("off")

    def line(*arguments, model=model_folder, text=text_file):
        always = ("--model", model, "--dataset", text, "--context", 24, "--arm", "on", "--compare", path)
        return refused("perplexity", *always, *arguments)

    for said, named in (
        (line("--context", 32, "--stride", 24), ["context 24, here 32"]),
        (line("--stride", 12), ["stride 24, here 12"]),
        (line("--scoring", "half"), ["scoring rolling, here half"]),
        (line("--documents", "separate"), ["documents joined, here separate"]),
        (line(text=tmp_path / "other.txt"), ["text sha256:"]),
        (line(model=make_model(bos=True)), ["tokens sha256:", "bos "]),
    ):
        assert f"--compare {path} is of something else: " in said
        assert all(difference in said for difference in named)
    saved("off", "--max-windows", 2)  # a new file takes the place of an old one
    assert re.search(f"--compare {path} holds 2 of the .*take --max-windows 2", line())
