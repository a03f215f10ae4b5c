"""`flash-eval report`: the numbers of the page, in tables and plots, are those of the files."""

import re
from copy import deepcopy

import pytest
from report_page import all_plots, plots, rows


def arms_and_ratio(of, key):
    off, on = of["off"][key], of["on"][key]
    return [[off], [on], [on / off]]


def test_numbers_of_perplexity(report, results):
    result = results["perplexity"]
    page = report(result)
    [table] = page.all("table")
    assert [cell.text for cell in table.all("thead")[0].all("th")] == ["", "patch off", "patch on", "on/off"]
    shown = {name: [cell.figures for cell in cells] for name, cells in rows(table).items()}
    keys = {"word perplexity": "word_ppl", "byte perplexity": "byte_ppl", "bits per byte": "bits_per_byte"}
    assert shown == {
        "token perplexity": [[result[arm]["ppl"], result[arm]["ppl_se"]] for arm in ("off", "on")] + [[]],
        **{name: [[result[arm][key]] for arm in ("off", "on")] + [[]] for name, key in keys.items()},
        "prefill tokens/s": arms_and_ratio(result, "tokens_per_s"),
        "peak memory": arms_and_ratio(result, "peak_memory_mb"),
    }
    compared = ("top1_agreement", "delta_nll", "delta_nll_se", "max_abs_dlogit", "mean_kl")
    assert page.all("article")[0].all("dl")[0].figures == [result["paired"][key] for key in compared]
    assert "99.999 %" in report({**result, "paired": {**result["paired"], "top1_agreement": 0.9999999}}).text


def test_numbers_of_speed(report, results):
    """Attention's share of the time, and the accepted guesses of a draft model, have columns where there are any."""
    result = deepcopy(results["speed"])
    for test in result["results"]:
        test["off"] |= {"attention_share": 0.5, "accepted_share": None}
        test["on"] |= {"attention_share": 0.125, "accepted_share": 0.75}
    [table] = report(result).all("table")
    groups, columns = ([cell.text for cell in row.all("th")] for row in table.all("thead")[0].all("tr"))
    assert groups == ["test", "tokens/s", "peak memory", "attention", "accepted"]
    assert columns == ["off", "on", "on/off"] * 2 + ["off", "on"] * 2
    shown = rows(table)
    assert list(shown) == [test["test"] for test in result["results"]]
    for test, cells in zip(result["results"], shown.values(), strict=True):
        assert [cell.figures for cell in cells] == [
            *([test[arm]["tokens_per_s"], test[arm]["tokens_per_s_sd"]] for arm in ("off", "on")),
            [test["ratio"]],
            *arms_and_ratio(test, "peak_memory_mb"),
            *([0.5], [0.125], [None], [0.75]),
        ]


def test_numbers_of_finetune(report, results):
    result = results["finetune"]
    [table] = report(result).all("table")
    shown = rows(table)
    assert list(shown) == [f"{length['seq_len']:,}" for length in result["results"]]
    for length, cells in zip(result["results"], shown.values(), strict=True):
        off, on = length["off"], length["on"]
        assert [figure for cell in cells for figure in cell.figures] == [
            *(off["seconds"], on["seconds"], length["time_ratio"]),
            *(off["tokens_per_s"], on["tokens_per_s"], on["tokens_per_s"] / off["tokens_per_s"]),
            *(off["peak_memory_mb"], on["peak_memory_mb"], length["memory_ratio"]),
            length["max_abs_dloss"],
        ]


def test_numbers_of_kernels(report, results):
    entries = results["kernels"]
    passes = ("forward", "backward")
    tables = report(entries).all("table")
    assert [table.all("caption")[0].text.split(",")[0] for table in tables] == list(passes)
    for pass_, table in zip(passes, tables, strict=True):
        for entry, (name, row) in zip(entries, rows(table).items(), strict=True):
            figures, config = entry[pass_], entry["config"]
            [flash] = [other[pass_] for other in entries if other["config"] == {**config, "impl": "flash"}]
            assert name == f"{config['seq_len']}, {config['impl']}"
            assert [cell.figures for cell in row] == [
                [figures["time(s)"]],
                [figures["time_p20(s)"], figures["time_p80(s)"]],
                [figures["FLOPS(TFLOPs/s)"] * 1000],
                [pytest.approx(figures["FLOPS(TFLOPs/s)"] / entry["roofline"]["peak(TFLOPs/s)"])],
                [] if config["impl"] == "flash" else [figures["time(s)"] / flash["time(s)"]],
                [figures["peak_memory_usage(MB)"]],
            ]


def test_a_decode_step_is_measured_by_what_it_reads(report, results):
    entries = deepcopy(results["kernels"])
    for entry in entries:
        entry["config"]["query_len"] = 1
        entry["forward"]["read(GB/s)"] = 5.0
        entry["backward"] = {}
        entry["roofline"] = {"peak(TFLOPs/s)": 1, "read(GB/s)": 20.0}
    page = report(entries)
    [table] = page.all("table")
    assert [cell.text for cell in table.all("thead")[0].all("th")][3:5] == ["K/V GB/s", "of reads"]
    assert all([cell.figures for cell in cells[2:4]] == [[5.0], [0.25]] for cells in rows(table).values())
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
    return {f"patch {arm}": [(at[length], *(at[arm][key] for key in keys)) for at in points] for arm in ("off", "on")}


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


def test_plots_of_speed_against_the_length(report, results):
    """With a standard deviation to both sides."""
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
            mine = {entry["config"]["seq_len"]: entry for entry in entries if entry["config"]["impl"] == impl}
            keys = ("time(s)", "time_p20(s)", "time_p80(s)")
            assert time[impl] == [(n, *(entry[pass_][key] for key in keys)) for n, entry in mine.items()]
            assert share[impl] == [
                (n, pytest.approx(entry[pass_]["FLOPS(TFLOPs/s)"] / entry["roofline"]["peak(TFLOPs/s)"]))
                for n, entry in mine.items()
            ]
        held = [(n, entry[pass_]["inputs_and_outputs(MB)"]) for n, entry in mine.items()]
        assert memory["inputs and outputs"] == held


def test_plots_of_perplexity_against_the_context(report, results):
    """Of runs that differ in it alone."""
    short = results["perplexity"]
    double = {
        **short,
        "settings": {**short["settings"], "context": 64},
        **{arm: {**short[arm], "tokens_per_s": 10.0 + number} for number, arm in enumerate(("off", "on"))},
    }
    other = {**double, "model": {**short["model"], "name": "other"}}
    half = {**double, "settings": {**double["settings"], "context": 128, "scoring": "half"}}
    drawn = plots(report(double, short, other, half))
    assert list(drawn) == ["Prefill: tokens per second", "Peak memory of a batch"]
    assert drawn["Prefill: tokens per second"] == {
        "patch off": [(32, short["off"]["tokens_per_s"]), (64, 10.0)],
        "patch on": [(32, short["on"]["tokens_per_s"]), (64, 11.0)],
    }
