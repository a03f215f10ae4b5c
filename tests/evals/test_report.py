"""`flash-eval report`: the numbers of the page, in tables and plots, are those of the files."""

import re
from copy import deepcopy

import pytest
from report_page import Element, captions, plots, rows


def test_numbers_of_perplexity(report, results):
    result = results["perplexity"]
    page = report(result)
    off, on, paired = result["off"], result["on"], result["paired"]
    [table] = page.all("table")
    assert [cell.text for cell in table.all("thead")[0].all("th")] == ["", "patch off", "patch on", "on/off"]
    shown = {name: [cell.figures for cell in cells] for name, cells in rows(table).items()}
    assert shown == {
        "token perplexity": [[off["ppl"], off["ppl_se"]], [on["ppl"], on["ppl_se"]], []],
        "word perplexity": [[off["word_ppl"]], [on["word_ppl"]], []],
        "byte perplexity": [[off["byte_ppl"]], [on["byte_ppl"]], []],
        "bits per byte": [[off["bits_per_byte"]], [on["bits_per_byte"]], []],
        "prefill tokens/s": [
            [off["tokens_per_s"]],
            [on["tokens_per_s"]],
            [on["tokens_per_s"] / off["tokens_per_s"]],
        ],
        "peak memory": [[off["peak_memory_mb"]], [on["peak_memory_mb"]], _ratio(on, off, "peak_memory_mb")],
    }
    assert page.all("article")[0].all("dl")[0].figures == [
        paired["top1_agreement"],
        paired["delta_nll"],
        paired["delta_nll_se"],
        paired["max_abs_dlogit"],
        paired["mean_kl"],
    ]


def _ratio(on, off, key):
    return [on[key] / off[key] if off[key] else None]


def test_numbers_of_speed(report, results):
    result = results["speed"]
    [table] = report(result).all("table")
    shown = rows(table)
    assert list(shown) == [test["test"] for test in result["results"]]
    for test, cells in zip(result["results"], shown.values(), strict=True):
        off, on = test["off"], test["on"]
        assert [cell.figures for cell in cells[:6]] == [
            [off["tokens_per_s"], off["tokens_per_s_sd"]],
            [on["tokens_per_s"], on["tokens_per_s_sd"]],
            [test["ratio"]],
            [off["peak_memory_mb"]],
            [on["peak_memory_mb"]],
            _ratio(on, off, "peak_memory_mb"),
        ]


def test_shares_of_speed(report, results):
    """Attention's of the time, and the accepted ones of what a draft model guessed: columns where there are any."""
    result = deepcopy(results["speed"])
    for test in result["results"]:
        test["off"] |= {"attention_share": 0.5, "accepted_share": None}
        test["on"] |= {"attention_share": 0.125, "accepted_share": 0.75}
    [table] = report(result).all("table")
    groups, columns = ([cell.text for cell in row.all("th")] for row in table.all("thead")[0].all("tr"))
    assert groups == ["test", "tokens/s", "peak memory", "attention", "accepted"]
    assert columns == ["off", "on", "on/off"] * 2 + ["off", "on"] * 2
    for cells in rows(table).values():
        assert [cell.figures for cell in cells[6:]] == [[0.5], [0.125], [None], [0.75]]


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
    page = report(entries)
    passes = ("forward", "backward")
    tables = page.all("table")
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
        exact = float(str(data.attributes["value"]))
        number, unit = re.fullmatch(r"([-+0-9.,e]+) ?([a-zA-Zµ%]*)", data.text).groups()
        read = float(number.replace(",", "")) * units.get(unit, 1)
        assert read == pytest.approx(exact, rel=0.06, abs={"x": 0.0051, "MB": 0.051}.get(unit, 0))
        checked += 1
    assert checked > 50


def series(points, key, length="seq_len"):
    return {f"patch {arm}": [(point[length], point[arm][key]) for point in points] for arm in ("off", "on")}


def bands(page, plot):
    """Of each point of that plot."""
    [figure] = [figure for figure in page.all("figure") if str(captions(figure)[0].children[0]) == plot]
    assert len(figure.all("path", class_="band")) == len(figure.all("g", class_="series"))
    points = figure.all("g", class_="point")
    return [(float(str(at.attributes["data-low"])), float(str(at.attributes["data-high"]))) for at in points]


def test_plots_of_finetune(report, results):
    """With the 20th and the 80th percentile of the time; and in words, for who cannot see them."""
    lengths = results["finetune"]["results"]
    page = report(results["finetune"])
    assert plots(page) == {
        "Time of a step": series(lengths, "seconds"),
        "Peak memory of a step": series(lengths, "peak_memory_mb"),
    }
    steps = [(length[arm]["seconds_p20"], length[arm]["seconds_p80"]) for arm in ("off", "on") for length in lengths]
    assert bands(page, "Time of a step") == steps
    for figure in page.all("figure"):
        [picture] = [svg for svg in figure.all("svg") if svg.attributes.get("role") == "img"]
        words = str(picture.attributes["aria-label"])
        assert words.startswith(str(captions(figure)[0].children[0]) + " against tokens in a sequence: patch off from ")
        assert "; patch on from " in words
        assert "tokens in a sequence" in [text.text for text in picture.all("text")]


def test_plots_of_speed_against_the_length(report, results):
    """With a standard deviation to both sides."""
    tests = deepcopy(results["speed"]["results"])  # -p 8,16 -g 4 -d 0,32
    for test in tests:
        test["off"] |= {"tokens_per_s": 90.0, "tokens_per_s_sd": 5.0}
        test["on"] |= {"tokens_per_s": 190.0, "tokens_per_s_sd": 5.0}
        test["at_last"] = test["depth"] + test["tokens"]
    page = report({**results["speed"], "results": tests})
    drawn = plots(page)
    for depth in (0, 32):
        of_depth = [test for test in tests if (test["kind"], test["depth"]) == ("prompt", depth)]
        assert drawn[f"Prompts, depth {depth}: tokens per second"] == series(of_depth, "tokens_per_s", "tokens")
    steps = [test for test in tests if test["kind"] == "generation"]
    assert drawn["Generation, 4 tokens: tokens per second"] == series(steps, "tokens_per_s", "at_last")
    assert bands(page, "Prompts, depth 32: tokens per second") == [(85.0, 95.0)] * 2 + [(185.0, 195.0)] * 2


def test_plots_of_kernels(report, results):
    entries = results["kernels"]
    page = report(entries)
    figures = page.all("figure")
    titles = [str(captions(figure)[0].children[0]) for figure in figures]
    assert titles == ["Time of a call", "Memory of a call", "Share of the machine's peak"] * 2
    for number, pass_ in enumerate(("forward", "backward")):
        together = Element("", {})
        together.children = list(figures[3 * number : 3 * number + 3])
        drawn = plots(together)
        for impl in ("flash", "mlx"):
            mine = [entry for entry in entries if entry["config"]["impl"] == impl]
            lengths = [entry["config"]["seq_len"] for entry in mine]
            times = [entry[pass_]["time(s)"] for entry in mine]
            peak = [entry[pass_]["FLOPS(TFLOPs/s)"] / entry["roofline"]["peak(TFLOPs/s)"] for entry in mine]
            assert drawn["Time of a call"][impl] == list(zip(lengths, times, strict=True))
            shares = [(length, pytest.approx(share)) for length, share in zip(lengths, peak, strict=True)]
            assert drawn["Share of the machine's peak"][impl] == shares
        held = [(entry["config"]["seq_len"], entry[pass_]["inputs_and_outputs(MB)"]) for entry in mine]
        assert drawn["Memory of a call"]["inputs and outputs"] == held


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
