"""`flash-eval report`: the numbers of the page, in tables and plots, are those of the files."""

import re
from copy import deepcopy

import pytest
from report_page import all_plots, head, plots, rows

ARMS = ("off", "on")


def shown(page):
    """The exact numbers of each row of its table."""
    [table] = page.all("table")
    return {name: [cell.figures for cell in cells] for name, cells in rows(table).items()}


def arms_and_ratio(of, key):
    off, on = of["off"][key], of["on"][key]
    return [[off], [on], [on / off]]


def test_numbers_of_perplexity(report, results):
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
    agreement = page.all("article")[0].all("p", class_="note")[0]
    assert agreement.figures == [paired[key] for key in ("top1_agreement", "max_abs_dlogit", "mean_kl")]
    assert "99.999 %" in report({**result, "paired": {**paired, "top1_agreement": 0.9999999}}).text


def test_numbers_of_speed(report, results):
    """Attention's share of the time, and the accepted guesses of a draft model, where there is one."""
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
    assert rows(page.all("table")[0])["pp8"][-2].text == "–"


def test_numbers_of_finetune(report, results):
    expected = {}
    for length in results["finetune"]["results"]:
        keys = ("seconds", "tokens_per_s", "peak_memory_mb")
        for arm in ARMS:
            steps = [[]]  # a count
            expected[f"{length['seq_len']} {arm}"] = [[length[arm][key]] for key in (*keys, "loss")] + steps
        ratios = [length["time_ratio"], length["on"]["tokens_per_s"] / length["off"]["tokens_per_s"]]
        ratios += [length["memory_ratio"], length["max_abs_dloss"]]
        expected[f"{length['seq_len']} on/off"] = [[ratio] for ratio in ratios] + steps
    assert shown(report(results["finetune"])) == expected


def test_numbers_of_kernels(report, results):
    """A decode step is measured by what it reads."""
    entries = results["kernels"]
    decode = deepcopy(entries)
    for entry in decode:
        entry["config"]["query_len"] = 1
        entry["forward"]["read(GB/s)"] = 5.0
        entry["backward"] = {}
        entry["roofline"] = {"peak(TFLOPs/s)": 1, "read(GB/s)": 20.0}
    expected = {}
    for entry in entries:
        [flash] = [other for other in entries if other["config"] == {**entry["config"], "impl": "flash"}]
        for pass_ in ("forward", "backward"):
            figures, keys = entry[pass_], entry["config"]["seq_len"]
            share = figures["FLOPS(TFLOPs/s)"] / entry["roofline"]["peak(TFLOPs/s)"]
            ratio = figures["time(s)"] / flash[pass_]["time(s)"]
            faster = [] if ratio == 1 else [ratio if ratio > 1 else 1 / ratio]
            expected[f"4/2x8 float32 {keys} {keys} {pass_} {entry['config']['impl']}"] = [
                [figures["time(s)"]],
                [figures["FLOPS(TFLOPs/s)"] * 1000],
                [pytest.approx(share)],
                faster,
                [figures["peak_memory_usage(MB)"]],
                [],
            ]
    found = shown(report(entries))
    for name, cells in found.items():
        cells[3] = cells[3] or expected[name][3]  # nothing is claimed
    assert found == expected

    page = report(decode)
    assert head(page)[6:8] == ["K/V GB/s", "of reads"]
    assert all(cells[1:3] == [[5.0], [0.25]] for cells in shown(page).values())
    assert "Share of what the machine reads" in plots(page)


def test_what_a_person_reads_is_that_number(report, results):
    """Rounded to at least two digits, in the unit beside it."""
    units = {"ms": 1e-3, "µs": 1e-6, "%": 1e-2}
    page = report(*results.values())
    checked = 0
    for data in page.all("data"):
        exact = float(data.attributes["value"])
        number, unit = re.fullmatch(r"([-+0-9.,e]+) ?([a-zA-Zµ%]*)", data.text).groups()
        read = float(number.replace(",", "")) * units.get(unit, 1)
        assert read == pytest.approx(exact, rel=0.06, abs={"x": 0.0051, "MB": 0.051}.get(unit, 0))
        checked += 1
    assert checked > 50


def series(points, *keys, length="seq_len"):
    """With a band around the first of these figures, if there are three."""
    return {f"patch {arm}": [(at[length], *(at[arm][key] for key in keys)) for at in points] for arm in ARMS}


def test_plots_of_finetune(report, results):
    """With the 20th and the 80th percentile of the time; and in words, for who cannot see them."""
    lengths = results["finetune"]["results"]
    page = report(results["finetune"])
    assert plots(page) == {
        "Time of a step": series(lengths, "seconds", "seconds_p20", "seconds_p80"),
        "Peak memory of a step": series(lengths, "peak_memory_mb"),
    }
    for title, figure in zip(plots(page), page.all("figure"), strict=True):
        [picture] = figure.all("svg[@role='img']")
        words = picture.attributes["aria-label"]
        assert words.startswith(f"{title} against tokens in a sequence: patch off from ")
        assert "; patch on from " in words
        assert "tokens in a sequence" in [text.text for text in picture.all("text")]
        assert [key.text for key in figure.all("li")] == ["patch off", "patch on"]
        assert len({mark.text for mark in picture.all("path[@data-length]")}) == 4  # what a pointer above them shows


def test_plots_of_speed(report, results):
    """Against the length, with a standard deviation to both sides."""
    tests = deepcopy(results["speed"]["results"])  # -p 8,16 -g 4 -d 0,32
    for test in tests:
        test["off"] |= {"tokens_per_s": 90.0, "tokens_per_s_sd": 5.0, "low": 85.0, "high": 95.0}
        test["on"] |= {"tokens_per_s": 190.0, "tokens_per_s_sd": 5.0, "low": 185.0, "high": 195.0}
        test["at_last"] = test["depth"] + test["tokens"]
    drawn = plots(report({**results["speed"], "results": tests}))
    rate = ("tokens_per_s", "low", "high")
    for depth in (0, 32):
        of_depth = [test for test in tests if (test["kind"], test["depth"]) == ("prompt", depth)]
        assert drawn[f"Prompts, depth {depth}: tokens per second"] == series(of_depth, *rate, length="tokens")
    steps = [test for test in tests if test["kind"] == "generation"]
    assert drawn["Generation, 4 tokens: tokens per second"] == series(steps, *rate, length="at_last")
    assert drawn["Generation, 4 tokens: peak memory"] == series(steps, "peak_memory_mb", length="at_last")


def test_plots_of_kernels(report, results):
    entries = results["kernels"]
    titles, drawn = zip(*all_plots(report(entries)), strict=True)
    assert titles == ("Time of a call", "Memory of a call", "Share of the machine's peak") * 2
    for number, pass_ in enumerate(("forward", "backward")):
        time, memory, share = drawn[3 * number : 3 * number + 3]
        for impl in ("flash", "mlx"):
            mine = [(at["config"]["seq_len"], at[pass_], at) for at in entries if at["config"]["impl"] == impl]
            keys = ("time(s)", "time_p20(s)", "time_p80(s)")
            assert time[impl] == [(n, *(figures[key] for key in keys)) for n, figures, _ in mine]
            peak = "peak(TFLOPs/s)"
            of_peak = [(n, figures["FLOPS(TFLOPs/s)"] / entry["roofline"][peak]) for n, figures, entry in mine]
            assert share[impl] == list(map(pytest.approx, of_peak))
        assert memory["inputs and outputs"] == [(n, figures["inputs_and_outputs(MB)"]) for n, figures, _ in mine]


def test_plots_of_perplexity_against_the_context(report, results):
    """Of runs that differ in it alone."""
    short = results["perplexity"]
    double = {
        **short,
        "settings": {**short["settings"], "context": 64},
        **{arm: {**short[arm], "tokens_per_s": 10.0 + number} for number, arm in enumerate(ARMS)},
    }
    other = {**double, "model": {**short["model"], "name": "other"}}
    half = {**double, "settings": {**double["settings"], "context": 128, "scoring": "half"}}
    drawn = plots(report(double, short, other, half))
    assert list(drawn) == ["Prefill: tokens per second", "Peak memory of a batch"]
    assert drawn["Prefill: tokens per second"] == {
        "patch off": [(32, short["off"]["tokens_per_s"]), (64, 10.0)],
        "patch on": [(32, short["on"]["tokens_per_s"]), (64, 11.0)],
    }
