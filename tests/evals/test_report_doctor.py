"""`flash-eval report`: what `mlxlm-flash doctor` found and measured, which claims nothing."""

import json
from copy import deepcopy
from functools import reduce
from operator import getitem

import pytest
from report_page import HOSTILE, answer, hostile, mapped, plots, rows

FOUND = [
    {"mark": "ok", "subject": "metal", "what": "Apple M3 Max", "cure": ""},
    {"mark": "warning", "subject": "hook", "what": "another version's", "cure": "mlxlm-flash hook install"},
    {"mark": "problem", "subject": "kernels", "what": "metal_rowwise: off by 0.3", "cure": "FLASHATTN_CHECK=once"},
]


def call(queries, keys, /, mlx=(), **flash):
    """Seconds and bytes of each kernel that was measured."""
    lengths = {"query_len": queries, "key_len": keys, "window": 0}
    kind = {"dtype": "bfloat16", "heads": 28, "kv_heads": 4, "head_dim": 128, "batch_size": 1, "bits": 0}
    flags = {"softcap": False, "sinks": False, "padded": False}
    costs = flash | ({"mlx": mlx} if mlx else {})
    seconds, memory = ({kernel: cost[part] for kernel, cost in costs.items()} for part in (0, 1))
    return {"call": {**lengths, **kind, **flags}, "seconds": seconds, "bytes": memory}


CALLS = [
    call(1, 1024, mlx=(2e-4, 2000), metal_decode=(1.2e-4, 900), metal_decode_split=(1e-4, 1000)),
    call(1, 8192, mlx=(4e-4, 2000), metal_decode=(1e-3, 900), **{"metal_decode_split@1": (2e-4, 1500)}),
    call(128, 128, mlx=(3e-4, 5_000_000), metal_prefill_mma=(4e-4, 1_000_000)),
    call(1024, 1024, metal_prefill_mma=(5e-3, 8_000_000)),
    call(8, 4096, mlx=(1e-5, 0)),
]
TABLE = {"device": "Apple M3 Max", "mlx": "0.32.4", "flashattn-core": "0.1.0", "calls": CALLS}
RESULT = {
    "command": "mlxlm-flash doctor",
    "system": "macOS-15-arm64",
    "python": "3.12.1",
    "findings": FOUND,
    "table": TABLE,
    "broken": 1,
    "could_be_better": 2,
}


def texts(table):
    return {name: [cell.text for cell in cells] for name, cells in rows(table).items()}


def test_findings(report):
    """Without a table of what was measured, too."""
    page = report({**RESULT, "table": None})
    [table] = page.all("table")
    assert texts(table) == {
        "✓ metal": ["Apple M3 Max", ""],
        "! hook": ["another version's", "mlxlm-flash hook install"],
        "✗ kernels": ["metal_rowwise: off by 0.3", "FLASHATTN_CHECK=once"],
    }
    [article] = page.all("article")
    assert article.all("h3")[0].text == "macOS-15-arm64"
    assert article.all("p", class_="facts")[0].text == "broken: 1 · could be better: 2"
    assert page.all("figure") == []
    assert "never ran" not in page.text


def test_times_of_the_fastest_kernel_and_of_mlx(report):
    """Drawn are decode steps, and prefills of an empty cache; what lies between is in the table alone."""
    page = report(RESULT)
    assert page.all("h3")[0].text == "Apple M3 Max"
    _, table = page.all("table")
    assert table.all("caption")[0].text == "28/4x128, bfloat16, batch size 1"
    assert texts(table) == {
        "1 x 1,024": ["200 µs", "100 µs", "2.00x as fast", "metal_decode_split", "2.00 kB", "1.00 kB"],
        "1 x 8,192": ["400 µs", "200 µs", "2.00x as fast", "metal_decode_split@1", "2.00 kB", "1.50 kB"],
        "128 x 128": ["300 µs", "400 µs", "0.75x as fast", "metal_prefill_mma", "5.00 MB", "1.00 MB"],
        "1,024 x 1,024": ["–", "5.00 ms", "–", "metal_prefill_mma", "–", "8.00 MB"],
        "8 x 4,096": ["10.0 µs", "–", "–", "–", "0.00 kB", "–"],
    }
    assert [cell.figures for cell in rows(table)["128 x 128"]] == [[3e-4], [4e-4], [3e-4 / 4e-4], [], [5.0], [1.0]]
    assert plots(page) == {
        "Time of a decode step": {"mlx": [(1024, 2e-4), (8192, 4e-4)], "flash": [(1024, 1e-4), (8192, 2e-4)]},
        "Time of a prefill": {"mlx": [(128, 3e-4)], "flash": [(128, 4e-4), (1024, 5e-3)]},
    }
    assert all("keys" in [text.text for text in figure.all("text")] for figure in page.all("figure"))
    [fold] = page.all("details")
    names, values = ([part.text for part in fold.all(name)] for name in ("dt", "dd"))
    assert names == ["system", "python", "device", "mlx", "flashattn-core"]
    assert values == ["macOS-15-arm64", "3.12.1", "Apple M3 Max", "0.32.4", "0.1.0"]


@pytest.mark.parametrize(
    ("change", "caption"),
    [
        ({"dtype": "float32", "bits": 4}, "28/4x128, float32, 4-bit K/V, batch size 1"),
        ({"window": 1024, "sinks": True}, "28/4x128, bfloat16, window 1,024, sinks, batch size 1"),
        ({"softcap": True, "padded": True, "batch_size": 8}, "28/4x128, bfloat16, softcap, padded, batch size 8"),
    ],
)
def test_calls_of_another_kind_have_a_table_of_their_own(report, change, caption):
    other = {**CALLS[1], "call": {**CALLS[1]["call"], **change}}
    page = report({**RESULT, "table": {**TABLE, "calls": [CALLS[0], other]}})
    captions = [table.all("caption")[0].text for table in page.all("table")]
    assert captions == ["✓ fine, ! could be better, ✗ broken", "28/4x128, bfloat16, batch size 1", caption]
    assert page.all("figure") == []


def test_it_claims_nothing(report, results):
    """Medians alone have no spread; a file beside it says what it says."""
    alone, page, speed = report(RESULT), report(RESULT, results["speed"]), report(results["speed"])
    assert "medians without their spread: nothing is claimed of them" in alone.text
    assert answer(alone, "Faster?")[1] == "No file of flash-eval speed is here."
    for question in ("Same predictions?", "Faster?", "Less memory?", "Does training fit?"):
        assert answer(alone, question)[0] == "Not measured"
        assert answer(page, question)[0] == answer(speed, question)[0]
    headings = [heading.text for heading in page.all("h2")[4:]]
    assert headings == ["Prompts and generation", "What mlxlm-flash doctor found"]


def test_text_is_text_and_what_is_not_finite_a_dash(report):
    page = report(mapped(*hostile(RESULT), lambda leaf, _: None if isinstance(leaf, float) else leaf))
    assert page.all("script") == page.all("img") == page.all("figure") == []
    assert page.all("h3")[0].text == HOSTILE
    findings, table = page.all("table")
    assert texts(findings)[f"! {HOSTILE}"] == [HOSTILE, HOSTILE]
    assert texts(table)["1 x 1,024"][:3] == ["–", "–", "–"]


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        (("findings",), [], "Expected `array` of length >= 1 - at `$.findings`"),
        (("findings", 1, "mark"), "good", "Invalid enum value 'good' - at `$.findings[1].mark`"),
        (("table", "calls", 0, "call"), {}, "Object missing required field `query_len` - at `$.table.calls[0].call`"),
        (("table", "calls", 0, "seconds", "mlx"), -1.0, "Expected `float` >= 0.0 - at `$.table.calls[0].seconds[...]`"),
    ],
)
def test_a_broken_file_is_left_out(invoke, tmp_path, path, value, why):
    broken = deepcopy(RESULT)
    reduce(getitem, path[:-1], broken)[path[-1]] = value
    file = tmp_path / "mac.json"
    file.write_text(json.dumps(broken))
    done = invoke("report", file, "--html", tmp_path / "page.html")
    assert done.exit_code == 2
    assert done.stderr.startswith(f"Left out: {file}: {why}")
