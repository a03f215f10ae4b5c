"""The numbers in the tables of `flash-eval report` are those of the files, rounded to the digits shown."""

import re
from copy import deepcopy

import pytest

from tests.evals.report_page import head, rows
from tests.promises import promise

ARMS = ("off", "on")
UNITS = {"ms": 1e-3, "µs": 1e-6, "%": 1e-2}
NUMBER = re.compile(r"([-+]?[0-9][0-9,]*)(\.\d+)?(e[-+]\d+)? ?(ms|µs|%)?")


def figures(cell):
    """The numbers in a cell before the first bracket, as approx() with a tolerance of one unit of the last digit."""
    found = []
    for whole, digits, power, unit in NUMBER.findall(cell.split(" (")[0]):
        value = float(f"{whole.replace(',', '')}{digits}{power}")
        last = 10.0 ** -len(digits[1:]) * float(f"1{power}")
        found.append(pytest.approx(value * UNITS.get(unit, 1), rel=0, abs=last * UNITS.get(unit, 1)))
    return found


def shown(page):
    """The numbers in each row of the page's table, by the row's name."""
    [table] = page.all("table")
    return {name: list(map(figures, cells)) for name, cells in rows(table).items()}


def arms_and_ratio(of, key):
    off, on = of["off"][key], of["on"][key]
    return [[off], [on], [on / off]]


@promise("flash-eval report shows the files' numbers")
def test_perplexity(report, results):
    result = results["perplexity"]
    page, paired = report(result), result["paired"]
    assert head(page) == ["", "patch off", "patch on", "difference"]
    assert shown(page) == {
        "token perplexity": [
            *([result[arm]["ppl"], result[arm]["ppl_se"]] for arm in ARMS),
            [paired["delta_nll"], paired["delta_nll_se"]],
        ],
        "word / byte perplexity": [*([result[arm]["word_ppl"], result[arm]["byte_ppl"]] for arm in ARMS), []],
        "bits per byte": [*([result[arm]["bits_per_byte"]] for arm in ARMS), []],
        "prefill tokens/s": arms_and_ratio(result, "tokens_per_s"),
        "peak memory": arms_and_ratio(result, "peak_memory_mb"),
    }
    agreement = page.all("article")[0].all("p", class_="note")[0].text.partition(" · flash")[0]
    assert figures(agreement.replace("top-1", "")) == [
        paired[key] for key in ("top1_agreement", "max_abs_dlogit", "mean_kl")
    ]


def test_speed(report, results):
    """The table has attention's share of the time and, with a draft model, the share of accepted tokens."""
    result = deepcopy(results["speed"])
    result["draft_model"] = result["model"]
    for test in result["results"]:
        test["off"] |= {"attention_share": 0.5, "accepted_share": None}
        test["on"] |= {"attention_share": 0.125, "accepted_share": 0.75}
    page = report(result)
    memory = ["peak memory off", "on", "on/off"]
    shares = ["attention off", "on", "accepted off", "on"]
    assert head(page) == ["test", "patch off t/s", "patch on t/s", "on/off", *memory, *shares]
    assert shown(page) == {
        test["test"]: [
            *([test[arm]["tokens_per_s"], test[arm]["tokens_per_s_sd"]] for arm in ARMS),
            [test["ratio"]],
            *arms_and_ratio(test, "peak_memory_mb"),
            *([0.5], [0.125], [], [0.75]),
        ]
        for test in result["results"]
    }
    assert rows(page.all("table")[0])["pp8"][-2] == "–"


def test_finetune(report, results):
    expected = {}
    for length in results["finetune"]["results"]:
        keys, steps = ("seconds", "tokens_per_s", "peak_memory_mb", "loss"), len(length["trials"])
        for arm in ARMS:
            expected[f"{length['seq_len']} {arm}"] = [[length[arm][key]] for key in keys] + [[steps]]
        ratios = [length["time_ratio"], length["on"]["tokens_per_s"] / length["off"]["tokens_per_s"]]
        ratios += [length["memory_ratio"], length["max_abs_dloss"]]
        expected[f"{length['seq_len']} on/off"] = [[ratio] for ratio in ratios] + [[]]
    assert shown(report(results["finetune"])) == expected
