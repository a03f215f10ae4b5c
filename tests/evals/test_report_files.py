"""`flash-eval report`: whatever a file holds, the page is whole, and what cannot be used is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest
from report_page import HOSTILE, Element, answer, hostile, parse, rows

Invoke = Callable[..., click.testing.Result]
Results = dict[str, Any]


def test_unknown_fields_are_fine(report: Callable[..., Element], results: Results) -> None:
    """Of files that are older or newer. Where a name is a kernel or a reason, there are no others."""

    def more(value: Any, key: str = "") -> Any:
        if isinstance(value, dict) and value and key not in ("calls", "fallbacks"):
            return {**{name: more(item, name) for name, item in value.items()}, "unknown": {"x": [1, None]}}
        return [more(item) for item in value] if isinstance(value, list) else value

    plain, grown = report(*results.values()), report(*map(more, results.values()))
    assert [data.attributes for data in grown.all("data")] == [data.attributes for data in plain.all("data")]
    assert grown.text != plain.text


def test_null_figures_are_dashes(report: Callable[..., Element], results: Results) -> None:
    """What is not finite is null in a result file."""

    def nulls(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: nulls(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [nulls(item, key) for item in value]
        return None if isinstance(value, float) else value

    page = report(*map(nulls, results.values()))
    assert len(page.all("article")) == 4
    assert page.all("data") == []
    cells = [cell.text for table in page.all("table") for cell in table.all("td")]
    assert set(cells) == {"–", "– ± –", "– to –", "– as fast", ""}
    assert page.all("figure") == []
    assert answer(page, "Same predictions?")[0] == "Not known"
    for question in ("Faster?", "Less memory?"):
        assert answer(page, question)[0] == "Not measured"


def test_numbers_that_json_does_not_have(report: Callable[..., Element], results: Results) -> None:
    result = results["perplexity"]
    page = report({**result, "on": {**result["on"], "word_ppl": float("inf"), "byte_ppl": 10**400}})
    shown = rows(page.all("table")[0])
    assert shown["word perplexity"][1].text == shown["byte perplexity"][1].text == "–"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"context": 32, "stride": 16}, "context 32, stride 16"),
        ({"context": 4096, "stride": None, "scoring": "half"}, "context 4,096, half scoring"),
        (
            {"context": 32, "stride": 32, "scoring": "rolling", "documents": "separate"},
            "context 32, stride 32, rolling scoring, separate documents",
        ),
    ],
)
def test_how_a_text_was_read(report: Callable[..., Element], results: Results, settings: Results, says: str) -> None:
    page = report({**results["perplexity"], "settings": settings})
    assert says in page.all("p", class_="facts")[0].text.split(" · ")


@pytest.mark.parametrize("arm", ["off", "on"])
def test_perplexity_of_one_arm(report: Callable[..., Element], results: Results, arm: str) -> None:
    other = {"off": "on", "on": "off"}[arm]
    result = {key: value for key, value in results["perplexity"].items() if key != other}
    page = report({**result, "paired": None, **({"flash": {"calls": {}, "fallbacks": {}}} if arm == "off" else {})})
    [table] = page.all("table")
    assert [cell.text for cell in table.all("thead")[0].all("th")] == ["", f"patch {arm}"]
    assert rows(table)["token perplexity"][0].figures == [result[arm]["ppl"], result[arm]["ppl_se"]]
    assert answer(page, "Same predictions?")[0] == answer(page, "Faster?")[0] == "Not measured"
    assert "never ran" not in page.text


def test_perplexity_compared_with_another_run(report: Callable[..., Element], results: Results) -> None:
    """Same predictions can be said of two runs; which one is faster is not to be told from them."""
    compared = {"file": "off.jsonl", "arm": "off", "column": "off", "differs_in": ["batch size 1, here 4"]}
    result = results["perplexity"]
    paired = {**result["paired"], "max_abs_dlogit": None, "mean_kl": None}
    page = report({**result, "paired": paired, "compared": compared})
    assert answer(page, "Same predictions?")[0] == "Yes"
    assert answer(page, "Faster?")[0] == "Not measured"
    heads = [cell.text for cell in page.all("table")[0].all("thead")[0].all("th")]
    assert heads == ["", "patch off, another run", "patch on"]
    assert "kept in off.jsonl. It differs in: batch size 1, here 4." in page.all("article")[0].text


def test_perplexity_of_one_arm_on_two_machines(report: Callable[..., Element], results: Results) -> None:
    compared = {"file": "mac.jsonl", "arm": "on", "column": "other", "differs_in": []}
    result = {key: value for key, value in results["perplexity"].items() if key != "off"}
    page = report({**result, "other": result["on"], "compared": compared})
    heads = [cell.text for cell in page.all("table")[0].all("thead")[0].all("th")]
    assert heads == ["", "patch on, another run", "patch on"]
    assert answer(page, "Same predictions?")[0] == "Not measured"


def without(result: Any, *path: Any) -> Any:
    """The same without what is there."""
    key, *others = path
    copy = dict(result) if isinstance(result, dict) else list(result)
    if others:
        copy[key] = without(copy[key], *others)
    else:
        del copy[key]
    return copy


def with_(result: Any, value: Any, *path: Any) -> Any:
    """The same with something else there."""
    key, *others = path
    copy = dict(result) if isinstance(result, dict) else list(result)
    copy[key] = with_(copy[key], value, *others) if others else value
    return copy


BROKEN: dict[str, tuple[Callable[[Results], Any], str]] = {
    "a text": (lambda results: "hello", "no result file of flash-eval perplexity, speed, finetune or kernels"),
    "null": (lambda results: None, "no result file of flash-eval perplexity, speed, finetune or kernels"),
    "foreign": (lambda results: {"loss": 1}, "no result file of flash-eval perplexity, speed, finetune or kernels"),
    "another command": (lambda results: {"command": "train"}, "no result file of flash-eval "),
    "command of another type": (lambda results: {"command": ["speed"]}, "no result file of flash-eval "),
    "an empty list": (lambda results: [], "it has no results"),
    "a foreign list": (lambda results: [1, 2], "[0] is not names and values: 1"),
    "no config": (lambda results: [{}], "[0] has no 'config'"),
    "no arms": (
        lambda results: without(without(results["perplexity"], "off"), "on"),
        "expected the arms off and on, or one of them, not none",
    ),
    "no figure": (lambda results: without(results["perplexity"], "on", "ppl"), "on has no 'ppl'"),
    "no model": (lambda results: without(results["speed"], "model"), "the file has no 'model'"),
    "a word for a number": (
        lambda results: with_(results["perplexity"], "many", "off", "ppl"),
        'off.ppl is not a number: "many"',
    ),
    "true for a number": (
        lambda results: with_(results["perplexity"], True, "off", "ppl"),
        "off.ppl is not a number: true",
    ),
    "a number for a name": (
        lambda results: with_(results["perplexity"], 7, "model", "name"),
        "model.name is not a text: 7",
    ),
    "a negative time": (
        lambda results: with_(results["finetune"], -1.5, "results", 0, "off", "seconds"),
        "results[0].off.seconds is not a number that is not negative: -1.5",
    ),
    "a part of a token": (lambda results: with_(results["perplexity"], 1.5, "tokens"), "tokens is not a whole number"),
    "another kind of test": (
        lambda results: with_(results["speed"], "training", "results", 1, "kind"),
        'results[1].kind is not prompt or generation: "training"',
    ),
    "no results": (lambda results: with_(results["speed"], [], "results"), "it has no results"),
    "no training": (lambda results: with_(results["finetune"], [], "results"), "it has no results"),
    "results of another type": (lambda results: with_(results["speed"], {}, "results"), "results is not a list: {}"),
    "broken counts": (
        lambda results: with_(results["speed"], "all", "flash", "calls"),
        "flash.calls is not names and values",
    ),
    "a broken trial": (
        lambda results: with_(results["finetune"], "x", "results", 0, "trials", 0, "on", "seconds"),
        'results[0].trials[0].on.seconds is not a number: "x"',
    ),
    "no time": (
        lambda results: without(results["kernels"], 1, "forward", "time(s)"),
        "[1].forward has no 'time(s)'",
    ),
    "no pass": (
        lambda results: [{**entry, "forward": {}, "backward": {}} for entry in results["kernels"]],
        "no pass of its entries was measured",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named_and_left_out(invoke: Invoke, results: Results, tmp_path: Path, name: str) -> None:
    make, why = BROKEN[name]
    broken, whole, out = tmp_path / "broken.json", tmp_path / "whole.json", tmp_path / "page.html"
    broken.write_text(json.dumps(make(results)))
    whole.write_text(json.dumps(results["speed"]))
    done = invoke("report", broken, whole, "--html", out)
    assert done.exit_code == 0, done.output
    [line] = done.stderr.splitlines()
    assert line.startswith(f"Left out: {broken}: {why}")
    page = parse(out)
    assert page.all("section", class_="left-out")[0].all("li")[0].text == line.removeprefix("Left out: ")
    assert len(page.all("article")) == 1


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no JSON: Expecting value"),
        (b'{"command": "speed", ', "no JSON: Expecting"),
        (b"batch,arm\n0,off\n", "no JSON: Expecting value"),
        (b'{"command": "\xff"}', "no JSON that can be read: "),
        (b"[" * 200_000, "no JSON that can be read: "),
        (b"9" * 5000, "no JSON that can be read: "),
        (b"\x89PNG\r\n\x1a\n\0\0", "no JSON"),
    ],
)
def test_what_is_no_json(invoke: Invoke, results: Results, tmp_path: Path, content: bytes, why: str) -> None:
    broken, whole, out = tmp_path / "broken.json", tmp_path / "whole.json", tmp_path / "page.html"
    broken.write_bytes(content)
    whole.write_text(json.dumps(results["speed"]))
    done = invoke("report", broken, whole, "--html", out)
    assert done.exit_code == 0, done.output
    assert done.stderr.startswith(f"Left out: {broken}: {why}")
    assert len(parse(out).all("article")) == 1


def test_files_that_cannot_be_read(report: Callable[..., Element], results: Results, tmp_path: Path) -> None:
    missing, folder = tmp_path / "missing.json", tmp_path / "folder.json"
    folder.mkdir()
    says = f"Left out: {missing}: No such file or directory\nLeft out: {folder}: Is a directory\n"
    page = report(missing, folder, results["speed"], says=says)
    assert len(page.all("section", class_="left-out")[0].all("li")) == 2


def test_nothing_usable_makes_no_page(invoke: Invoke, tmp_path: Path) -> None:
    broken, out = tmp_path / "broken.json", tmp_path / "page.html"
    broken.write_text("{}")
    done = invoke("report", broken, "--html", out)
    assert (done.exit_code, done.stdout) == (2, "")
    named, line = done.stderr.splitlines()
    assert named.startswith(f"Left out: {broken}: ")
    assert line == "Error: none of the files is a result of flash-eval, so there is no page to make"
    assert not out.exists()


def test_no_files(invoke: Invoke) -> None:
    assert invoke("report").exit_code == 2


def test_a_file_that_is_given_twice_counts_once(
    report: Callable[..., Element], results: Results, tmp_path: Path
) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(results["speed"]))
    assert len(report(file, file).all("article")) == 1


def test_entries_of_two_machines_are_two_runs(report: Callable[..., Element], results: Results) -> None:
    """A list of kernels can be put together from several."""
    here = results["kernels"]
    there = [{**entry, "machine": {**entry["machine"], "device": "gpu, Metal"}} for entry in here]
    page = report([*here, *there])
    assert [article.all("p", class_="facts")[0].text.split(" · ")[0] for article in page.all("article")] == [
        here[0]["machine"]["device"],
        "gpu, Metal",
    ]


def test_text_from_files_is_text(report: Callable[..., Element], results: Results, tmp_path: Path) -> None:
    page = report(*hostile(results))
    assert page.all("script") == page.all("img") == []
    assert HOSTILE.replace("\ud800", "?") in page.all("h3")[0].text
    [style] = page.all("style")
    assert "<" not in style.text


def test_names_of_files_are_text(report: Callable[..., Element], results: Results, tmp_path: Path) -> None:
    file = tmp_path / '<b>&".json'
    file.write_text(json.dumps(results["speed"]))
    broken = tmp_path / "<i>.json"
    broken.write_text("")
    page = report(file, broken, says=f"Left out: {broken}: no JSON: Expecting value: line 1 column 1 (char 0)\n")
    assert page.all("b") == page.all("i") == []
    assert str(file) in page.all("details")[0].text
    assert str(broken) in page.all("section", class_="left-out")[0].text
