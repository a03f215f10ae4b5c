"""`flash-eval report`: the page as a whole, self-contained and accessible, and where it goes."""

import json
import re
from itertools import pairwise

import pytest
from report_page import Element


@pytest.mark.parametrize("command", ["perplexity", "speed", "finetune", "kernels"])
def test_settings_and_machine_are_in_a_fold(report, results, command):
    result = results[command]
    [fold] = report(result).all("details")
    assert fold.all("summary")[0].text == "Settings and machine"
    pairs = {name.text: value.text for name, value in zip(fold.all("dt"), fold.all("dd"), strict=True)}
    about = result[0] if command == "kernels" else result
    for key, value in about["machine"]["versions"].items():
        assert pairs[f"versions {key}"] == value
    assert pairs["cores"] == str(about["machine"]["cores"])
    assert pairs["memory"] == about["settings"]["memory"]


def test_it_is_self_contained(report, results):
    """Nothing is loaded, nothing runs, and links lead to places of the page."""
    page = report(*results.values())
    assert page.all("script") == page.all("link") == page.all("img") == []
    assert "url(" not in page.all("style")[0].text
    assert "@import" not in page.all("style")[0].text
    anchors = {str(article.attributes["id"]) for article in page.all("article")}
    assert len(anchors) == 4
    assert {str(link.attributes["href"]) for link in page.all("a")} == {f"#{anchor}" for anchor in anchors}


def in_order(element):
    inner = [child for child in element.children if isinstance(child, Element)]
    return [each for child in inner for each in (child, *in_order(child))]


def test_it_is_accessible(report, results):
    page = report(*results.values())
    assert page.all("html")[0].attributes["lang"] == "en"
    assert page.all("title")[0].text == page.all("h1")[0].text
    headings = [int(element.name[1]) for element in in_order(page) if re.fullmatch("h[1-6]", element.name)]
    assert (headings[0], headings.count(1)) == (1, 1)
    assert all(next_ <= level + 1 for level, next_ in pairwise(headings))
    for table in page.all("table"):
        assert table.all("caption")[0].text
        assert all(head.attributes["scope"] in ("row", "col", "colgroup") for head in table.all("th"))
    for picture in page.all("svg"):
        assert picture.attributes.get("aria-label") or picture.attributes["aria-hidden"] == "true"


def test_the_page_goes_where_it_is_told(invoke, refused, results, tmp_path, monkeypatch):
    """The same to the byte. A result file is not written over, and a full disk says so."""
    file = tmp_path / "run.json"
    file.write_text(json.dumps(results["speed"]))
    monkeypatch.chdir(tmp_path)
    pages = set()
    for options, out in ((["-o", "a.html"], "a.html"), (["--html", "b.html"], "b.html"), ([], "report.html")):
        done = invoke("report", file, *options)
        assert (done.exit_code, done.stdout, done.stderr) == (0, f"{out}\n", "")
        pages.add((tmp_path / out).read_text("utf-8"))
    [page] = pages
    assert page.startswith("<!doctype html>\n<html")

    line = refused("report", file, "--html", tmp_path / "." / "run.json")
    assert line == f"Error: --html {file} is one of the result files, and would be lost"
    assert json.loads(file.read_text()) == results["speed"]
    line = refused("report", "run.json", "-o", "/no/such/folder/page.html")
    assert line == "Error: -o /no/such/folder/page.html: /no/such/folder cannot be written to"
    assert refused("report", file, "-o", "/dev/full") == "Error: cannot write /dev/full: No space left on device"
