"""All pages use one rule to decide whether they say that flash attention is faster or takes less memory."""

import copy
import statistics

import pytest
from flash_evals.commands.report import DESCRIBE, Result
from flash_evals.pages import units
from flash_evals.results.claims import LEGEND, MARK, NOTHING, Ratio
from msgspec import convert

from tests.evals.report_page import answer
from tests.promises import promise

# Seconds per trial. Two lists differ clearly if their ranges from the 20th to the 80th percentile do not overlap. The
# range of OVERLAPPING overlaps that of OFF, and the range of APART does not. The median of OFF is 2.5, and the medians
# of APART and OVERLAPPING are both 2, so their ratios to OFF are equal: 1.25.
OFF = [1.5, 2.4, 2.5, 2.6, 3.5]
APART, OVERLAPPING = [1.8, 1.9, 2.0, 2.1, 2.2], [1.0, 1.5, 2.0, 2.5, 3.0]


@pytest.mark.parametrize(
    ("value", "one", "other", "sign", "shown"),
    [
        (1.25, OFF, APART, 1, "1.25x"),
        (0.8, APART, OFF, -1, "0.80x"),
        (1.25, OFF, OVERLAPPING, 0, "1.25x ~"),
        (1.004, [1.004] * 3, [1.0] * 3, 0, "1.00x ~"),  # the page shows 1.00x, which is no difference
        (1.25, [5, 5.1, 5.2], [4, 4.1, 4.2], 1, "1.25x"),
        # If a side has fewer than three trials, the two sides differ only if they are at least twofold apart.
        (1.25, [5, 5.1], [4, 4.1, 4.2], 0, "1.25x ~"),
        (0.49, [4], [7.8, 8.5], 0, "0.49x ~"),
        (1.95, [7.8, 8.5], [4, 4.1, 4.2], 0, "1.95x ~"),
        (2.0, [8, 8.5], [4], 1, "2.00x"),
        (0.5, [4], [8, 8.5, 8.6], -1, "0.50x"),
        (1.25, [], [4], 1, "1.25x"),  # without trials, the ratio alone decides
        (None, OFF, APART, None, ""),
    ],
)
def test_the_rule(value, one, other, sign, shown):
    ratio = Ratio.of(value, one, other)
    assert (ratio.sign, units.ratio(ratio)) == (sign, shown)


def figures(seconds):
    """The figures of an arm that reads one token in `seconds` s, with a peak memory of `seconds` MB."""
    others = {"loss": 1.0, "drafted": 0, "accepted": 0}  # fields that some commands need
    return {"seconds": seconds, "tokens_per_s": 1 / seconds, "peak_memory_mb": seconds, **others}


def timed(results, command, on):
    """A command's result in which flash attention has the trials `on`. MLX's attention has the trials OFF."""
    result = copy.deepcopy(results[command])
    if command == "kernels":
        for entry in result:
            trials = on if entry["config"]["impl"] == "flash" else OFF
            entry["forward"] |= {"time(s)": statistics.median(trials), "trials(s)": trials}
            entry["backward"] = {}
        return result
    for test in result.get("results", [result]):
        test["trials"] = [
            {**test["trials"][0], "off": figures(one), "on": figures(other)} for one, other in zip(OFF, on, strict=True)
        ]
        for arm, trials in (("off", OFF), ("on", on)):
            test[arm] |= figures(statistics.median(trials))
        test |= {"ratio": 1.25, "time_ratio": 0.8, "memory_ratio": 0.8}
    return result


@promise("every page claims a difference only if the arms' trials do not overlap")
@pytest.mark.rotate(1, default=2)
@pytest.mark.parametrize("command", ["perplexity", "speed", "finetune", "kernels"])
@pytest.mark.parametrize("apart", [True, False])
def test_every_page_claims_what_the_report_does(results, report, command, apart):
    """If the arms' times overlap (`apart` is false), no page claims a difference, although the medians differ."""
    result = timed(results, command, APART if apart else OVERLAPPING)
    found = convert(result, Result)
    page, report_page = DESCRIBE[type(found)](found).text(), report(result)
    marked = [cell.text for cell in report_page.all("td") if cell.text.endswith((MARK, NOTHING))]
    assert answer(report_page, "Faster?")[0] == ("Yes" if apart else "No difference")
    if apart:
        assert "1.25x" in page
        assert not marked
        assert not any(sign in page for sign in (NOTHING, MARK))
    else:
        assert NOTHING in page
        assert (LEGEND in page) is (MARK in page) is (command != "kernels")
        assert not any(claim in page for claim in ("1.25x the speed", "x faster"))
        assert marked
        assert all(text.startswith(("1.25x", "0.80x", NOTHING)) for text in marked)
