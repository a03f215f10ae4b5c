"""`flash-eval report` answers four questions from the files' figures, and claims no more than these show."""

import pytest

from tests.evals.report_page import answer


def faster(speed, *ratios):
    """A result of `speed` with one test for each ratio, and no trials that could overlap."""
    test = speed["results"][0]
    tests = [{**test, "depth": number, "ratio": ratio, "trials": []} for number, ratio in enumerate(ratios)]
    return {**speed, "results": tests}


@pytest.mark.parametrize(
    ("ratios", "word", "says"),
    [
        ([1.5, 2.5], "Yes", "prompts 1.50x to 2.50x as fast."),
        ([0.5], "No", "prompts 0.50x as fast."),
        ([1.001], "No difference", "prompts 1.00x as fast (no clear difference)."),
        ([1.5, 1.2, 0.5], "In 2 of 3 tests, slower in 1", "prompts 0.50x to 1.50x as fast."),
        ([1.5, 1.0], "In 1 of 2 tests", "prompts 1.00x to 1.50x as fast (no clear difference in 1 of 2)."),
    ],
)
def test_faster(report, results, ratios, word, says):
    assert answer(report(faster(results["speed"], *ratios)), "Faster?") == (word, f"speed: {says}")


@pytest.mark.parametrize(
    ("off", "on", "overlap", "word"),
    [
        (100, 40, False, "Yes"),
        (100, 40, True, "No difference"),
        (100, 150, False, "No"),
        (0, 10, False, "Not measured"),
    ],
)
def test_less_memory(report, results, off, on, overlap, word):
    pairs = [(off, on)] * 3 + [(on, off)] * (3 if overlap else 0)
    trial = results["perplexity"]["trials"][0]
    figures = [({**trial["off"], "peak_memory_mb": one}, {**trial["on"], "peak_memory_mb": two}) for one, two in pairs]
    result = {**results["perplexity"], "trials": [{**trial, "off": off, "on": on} for off, on in figures]}
    result |= {arm: {**result[arm], "peak_memory_mb": value} for arm, value in (("off", off), ("on", on))}
    assert answer(report(result), "Less memory?")[0] == word


@pytest.mark.parametrize(
    ("top1", "delta", "dlogit", "word", "says"),
    [
        (1, 9e-5, 1e-3, "Yes", "the same token ranks first at all 200 positions, ΔNLL +9.0e-05."),
        (1, -2e-4, 1e-3, "No", "the same token ranks first at all 200 positions, ΔNLL -2.0e-04."),
        (0.99, 0.0, 1e-3, "No", "another token ranks first at 2 of 200 positions, ΔNLL +0.0e+00."),
        (1, 0.0, None, "Not known", "some logits are not finite numbers."),
        (1, None, 1e-3, "Not known", "some logits are not finite numbers."),
    ],
)
def test_same_predictions(report, results, top1, delta, dlogit, word, says):
    """The answer has one sentence for each run."""
    one = {**results["perplexity"], "tokens": 200}
    paired = {**one["paired"], "top1_agreement": top1, "delta_nll": delta, "max_abs_dlogit": dlogit}
    result = {**one, "paired": paired}
    assert answer(report(result), "Same predictions?") == (word, f"perplexity: {says}")
    other = {**one, "model": {**one["model"], "name": "other"}}
    both, sentences = answer(report(result, other), "Same predictions?")
    assert both == ("Yes" if word == "Yes" else "In 1 of 2 runs")
    assert sentences.index(says) < sentences.index("other on ")


def test_training_fits(report, results):
    result = {**results["finetune"], "skipped": []}
    longest = max(result["results"], key=lambda length: length["seq_len"])
    off, on = (f"{longest[arm]['peak_memory_mb']:,.1f} MB" for arm in ("off", "on"))
    word, says = answer(report(result), "Does training fit?")
    assert word == f"Yes, up to {longest['seq_len']} tokens"
    assert f"a step of {longest['seq_len']} tokens needed {off} with the patch off, {on} with the patch on" in says
    reason = "8,192 tokens: a step without the patch needs about 7.30 GB, only 6.00 GB are free"
    page = report({**result, "skipped": [{"seq_len": 8192, "reason": reason}]})
    word, says = answer(page, "Does training fit?")
    assert word == "Not at every length"
    assert f"skipped {reason}." in says
    assert answer(page, "Same predictions?") == ("Not measured", "No result file of flash-eval perplexity was given.")


@pytest.mark.parametrize("command", ["perplexity", "speed", "finetune"])
def test_a_patch_that_never_ran(report, results, command):
    """If the patch never ran, the page claims nothing about flash attention."""
    page = report({**results[command], "flash": {"calls": {}, "fallbacks": {"no kernel": 3}}})
    for question in ("Faster?", "Less memory?"):
        assert answer(page, question) == ("Not measured", f"{command}: the patch never ran.")
    if command != "speed":
        word, says = answer(page, "Same predictions?" if command == "perplexity" else "Does training fit?")
        assert word == ("Not known" if command == "perplexity" else "Yes, up to 16 tokens")
        assert "the patch never ran." in says
    [article] = page.all("article")
    assert "The patch never ran: MLX's own attention computed everything." in article.text
    assert "no calls, 3 fallbacks (no kernel: 3)" in article.text
    assert "Same predictions" not in article.text
