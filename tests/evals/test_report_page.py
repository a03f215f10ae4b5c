"""`flash-eval report` writes a complete, self-contained page whatever the files contain, and names unusable files."""

import json
import re
from copy import deepcopy
from functools import reduce
from operator import getitem

import msgspec
import pytest
from flash_evals.commands.report import Result

from tests.evals.report_page import HOSTILE, answer, head, hostile, mapped, parse, rows
from tests.promises import promise


def test_a_file_read_back_is_what_was_written(results):
    for result in results.values():
        read = msgspec.json.decode(json.dumps(result), type=Result)
        assert msgspec.json.decode(msgspec.json.encode(read)) == result


NULLABLE = re.compile("ppl|bits_per|nll|dlogit|kl|loss|memory_ratio")  # figures that null may replace


@pytest.mark.slow("2 seconds")
def test_null_figures_are_named_or_dashes(report, results):
    """In a result file, null stands for a number that is not finite."""

    def null(leaf, key):
        return None if isinstance(leaf, float) and NULLABLE.search(key) else leaf

    changed = [mapped(results[command], null) for command in ("perplexity", "finetune")]
    page = report(*changed)
    perplexity, finetune = map(rows, page.all("table"))
    names = ("token perplexity", "word / byte perplexity", "bits per byte")
    shown = ["not finite ± not finite", "– / –", "–"]
    assert [perplexity[name][:2] for name in names] == [[text] * 2 for text in shown]
    assert [finetune[name][3] for name in ("8 off", "8 on/off")] == ["not finite", "max |Δ| not finite"]
    assert answer(page, "Same predictions?")[0] == "Not known"
    assert "Not comparable: some logits are not finite numbers." in page.text


@pytest.mark.parametrize("arm", ["off", "on"])
def test_perplexity_of_one_arm(report, results, arm):
    other = {"off": "on", "on": "off"}[arm]
    result = {key: value for key, value in results["perplexity"].items() if key != other} | {"paired": None}
    page = report({**result, "flash": result["flash"] if arm == "on" else {"calls": {}, "fallbacks": {}}})
    assert head(page) == ["", f"patch {arm}"]
    assert rows(page.all("table")[0])["token perplexity"][0].startswith(f"{result[arm]['ppl']:,.4f} ± ")
    assert answer(page, "Same predictions?")[0] == answer(page, "Faster?")[0] == "Not measured"
    assert "never ran" not in page.text


@pytest.mark.parametrize(
    ("arm", "differs_in", "same", "faster"),
    [
        ("off", ["batch size 1, this run has 4"], "Yes", "Not measured"),
        ("off", [], "Yes", "Yes"),
        ("on", [], "Not measured", "Not measured"),
    ],
)
def test_perplexity_compared_with_another_run(report, results, arm, differs_in, same, faster):
    """Predictions are compared if the patch was off in one run. Speeds are compared only if nothing else differs."""
    column = "off" if arm == "off" else "other"
    about = {"model": results["perplexity"]["model"], "machine": results["perplexity"]["machine"], "trials": []}
    about |= {"file": "folder/kept.jsonl", "batch_size": 1, "ranks": 1}
    compared = {**about, "arm": arm, "column": column, "differs_in": differs_in}
    result = {"other": results["perplexity"]["on"], **results["perplexity"], "compared": compared}
    del result["other" if arm == "off" else "off"]
    result["on"] = {**result["on"], "tokens_per_s": 2 * result[column]["tokens_per_s"]}
    page = report({**result, "paired": {**result["paired"], "of": [column, "on"], "max_abs_dlogit": None}})
    assert (answer(page, "Same predictions?")[0], answer(page, "Faster?")[0]) == (same, faster)
    assert ("prefill" in answer(page, "Faster?")[1]) is (faster == "Yes")
    assert head(page) == ["", f"patch {arm}, kept.jsonl", "patch on", "difference"]
    same = " and this run have the same model, machine, versions and batch size"
    differs = " differs from this run: batch size 1, this run has 4" if differs_in else same
    assert f"kept.jsonl{differs}" in page.all("article")[0].text


GONE = object()
# (command, field of its result, new value of the field, the reason why the page leaves the changed file out)
CHANGES = [
    ("perplexity", ("on", "ppl"), GONE, "Object missing required field `ppl` - at `$.on`"),
    ("perplexity", ("tokens",), 10**400, "Expected `int` <= 9007199254740992 - at `$.tokens`"),
    ("perplexity", ("paired",), None, "expected `paired` of the two columns if the file has two"),
    ("speed", ("results",), [], "Expected `array` of length >= 1 - at `$.results`"),
    ("finetune", ("results", 0, "off", "seconds"), -1.5, "Expected `float` >= 0.0 - at `$.results[0].off.seconds`"),
    ("finetune", ("results", 0, "trials", 0, "on", "seconds"), None, "Expected `float`, got `null` - at `$.results[0]"),
]
CONTENTS = [(b"", "Input data was truncated"), (b"[" * 200_000, "Expected `object`, got `array` - at `$[0]`")]


def changed(result, path, value):
    copy = deepcopy(result)
    *way, last = path
    at = reduce(getitem, way, copy)
    if value is GONE:
        del at[last]
    else:
        at[last] = value
    return json.dumps(copy).encode()


def test_broken_files_are_named_and_left_out(invoke, results, tmp_path):
    """The page and stderr name each broken file and the reason. The good file is given twice, but shown once."""
    broken = [(changed(results[command], path, value), why) for command, path, value, why in CHANGES]
    armless = {key: value for key, value in results["perplexity"].items() if key not in ("off", "on")}
    broken.append((json.dumps(armless).encode(), "expected one or two of the columns other, off, on, not none"))
    unmeasured = [{**entry, "forward": {}, "backward": {}} for entry in results["kernels"]]
    broken.append((json.dumps(unmeasured).encode(), "no entry of this file has a measured pass"))
    broken.append((json.dumps(2 * results["kernels"]).encode(), "the file has two entries of flash for one problem"))
    windows = [{**entry, "config": {**entry["config"], "window": 9}} for entry in results["kernels"]]
    broken.append((json.dumps([*results["kernels"], *windows]).encode(), "this file has entries of several runs"))
    broken += CONTENTS
    files = [tmp_path / f"{number}.json" for number in range(len(broken))]
    for file, (content, _) in zip(files, broken, strict=True):
        file.write_bytes(content)
    (tmp_path / "folder.json").mkdir()
    files += [tmp_path / "folder.json", tmp_path / "missing.json"]
    broken += [(b"", "Is a directory"), (b"", "No such file or directory")]
    whole, out = tmp_path / "whole.json", tmp_path / "page.html"
    whole.write_text(json.dumps(results["speed"]))
    done = invoke("report", *files, whole, whole, "--html", out)
    assert done.exit_code == 0, done.output
    page, said = parse(out), done.stderr.splitlines()
    for file, (_, why), line in zip(files, broken, said, strict=True):
        assert line.startswith(f"Left out: {file}: {why}")
    left_out = [item.text for item in page.all("section", class_="left-out")[0].all("li")]
    assert left_out == [line.removeprefix("Left out: ") for line in said]
    assert len(page.all("article")) == 1


def test_nothing_usable_makes_no_page(invoke, tmp_path):
    broken, out = tmp_path / "broken.json", tmp_path / "page.html"
    broken.write_text("{}")
    done = invoke("report", broken, "--html", out)
    assert (done.exit_code, done.stdout) == (2, "")
    named, line = done.stderr.splitlines()
    assert named.startswith(f"Left out: {broken}: ")
    assert line == "Error: none of the files is a result of flash-eval, so no page was made"
    assert not out.exists()
    assert invoke("report").exit_code == 2


@pytest.mark.slow("3 seconds")
def test_text_of_files_and_their_names_is_text(report, results, tmp_path):
    page = report(*hostile(*results.values()))
    assert page.all("script") == []
    assert all(image.attributes["src"].startswith("data:") for image in page.all("img"))
    assert HOSTILE in page.all("h3")[0].text
    file, broken = tmp_path / '<b>&".json', tmp_path / "<i>.json"
    file.write_text(json.dumps(results["speed"]))
    broken.write_text("")
    page = report(file, broken, says=f"Left out: {broken}: Input data was truncated\n")
    assert page.all("b") == page.all("i") == []
    assert str(file) in page.all("details")[0].text
    assert str(broken) in page.all("section", class_="left-out")[0].text


@pytest.fixture
def page(report, results):
    return report(*results.values())


@promise("flash-eval report writes one file without network or script")
def test_it_is_self_contained(page):
    """The page loads nothing and runs nothing. Its links lead to its own sections."""
    assert page.all("script") == page.all("link") == []
    assert len(page.all("img")) == 6 + 2 + 6  # charts of speed, finetune and kernels
    assert all(image.attributes["src"].startswith("data:image/svg+xml;base64,") for image in page.all("img"))
    assert not any(word in page.all("style")[0].text for word in ("url(", "@import"))
    anchors = {article.attributes["id"] for article in page.all("article")}
    assert len(anchors) == 4
    assert {link.attributes["href"] for link in page.all("a")} == {f"#{anchor}" for anchor in anchors}


@pytest.mark.slow("2 seconds")
def test_the_page_goes_where_it_is_told(invoke, refused, results, tmp_path, monkeypatch):
    """Into report.html, or into the file of -o or --html, which is not one of the result files."""
    file = tmp_path / "run.json"
    file.write_text(json.dumps(results["speed"]))
    monkeypatch.chdir(tmp_path)
    done = invoke("report", file)
    assert (done.exit_code, done.stdout, done.stderr) == (0, "report.html\n", "")
    assert (tmp_path / "report.html").read_text("utf-8").startswith("<!DOCTYPE html>\n<html")

    line = refused("report", file, "--html", tmp_path / "." / "run.json")
    assert line == f"Error: --html {file} would overwrite one of the result files"
    assert json.loads(file.read_text()) == results["speed"]
    line = refused("report", "run.json", "-o", "/no/such/folder/page.html")
    assert line == "Error: -o /no/such/folder/page.html: /no/such/folder is missing or not writable"
    assert refused("report", file, "-o", "/dev/full") == "Error: cannot write /dev/full: No space left on device"
