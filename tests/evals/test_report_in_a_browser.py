"""`flash-eval report`'s page in a headless Chromium: quiet, readable on a screen, on a phone and on paper."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click.testing
import pytest
from chromium import Chromium
from report_page import hostile

Results = dict[str, Any]

SIZES = {"screen": 1200, "phone": 390}
PAPER = 688  # CSS pixels between the margins of A4

# Text whose contrast to what is behind it is below 4.5, and lines of plots below 3, as WCAG 2.2 asks for (AA).
FAINT = """
(() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((x) => x / 255).map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const [r, g, b, alpha = 1] = parse(getComputedStyle(at).backgroundColor);
      if (alpha > 0) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const contrast = (element, color) => {
    const [low, high] = [luminance(parse(color).slice(0, 3)), luminance(behind(element))].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const faint = [];
  let seen = 0;
  const words = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (words.nextNode()) {
    const element = words.currentNode.parentElement;
    if (!words.currentNode.data.trim() || element.tagName === "title") continue;
    const style = getComputedStyle(element);
    const ratio = contrast(element, element.closest("svg") ? style.fill : style.color);
    seen += 1;
    if (!(ratio >= 4.5)) faint.push([words.currentNode.data, ratio]);
  }
  for (const line of document.querySelectorAll(".line")) {
    const ratio = contrast(line, getComputedStyle(line).stroke);
    seen += 1;
    if (!(ratio >= 3)) faint.push([line.parentElement.className.baseVal, ratio]);
  }
  return [seen, faint];
})()
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        demanded = os.environ.get("CI") and sys.platform == "linux"
        (pytest.fail if demanded else pytest.skip)("no Chromium: apt-get install chromium")
    chromium = Chromium(program, tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.close()


@pytest.fixture(scope="module")
def page(results: Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run of each command, and with a file that is left out."""
    return make(list(results.values()), tmp_path_factory.mktemp("report"))


def make(results: list[Any], folder: Path) -> Path:
    from flash_evals.cli import main

    files = [folder / f"{number}.json" for number in range(len(results))]
    for file, result in zip(files, results, strict=True):
        file.write_text(json.dumps(result))
    out = folder / "page.html"
    arguments = ["report", *files, folder / "missing.json", "-o", out]
    done = click.testing.CliRunner().invoke(main, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    return out


def is_quiet(browser: Chromium) -> bool:
    """One request, for the page itself, and nothing that a console would show."""
    requests = [event["request"]["url"] for event in browser.seen("Network.requestWillBeSent")]
    said = [
        browser.seen(method) for method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
    ]
    assert said == [[], [], []]
    assert len(requests) == 1, requests
    return True


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_it_opens(browser: Chromium, page: Path, size: str, dark: bool) -> None:
    """Without a word on the console, without the network, and no wider than the screen."""
    browser.open(page, SIZES[size], dark)
    assert is_quiet(browser)
    assert browser.evaluate("document.documentElement.scrollWidth") <= SIZES[size]
    assert browser.evaluate("document.querySelectorAll('article').length") == 4


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_can_be_read(browser: Chromium, page: Path, dark: bool) -> None:
    browser.open(page, dark=dark)
    browser.evaluate("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
    seen, faint = browser.evaluate(FAINT)
    assert seen > 300
    assert faint == []


def test_light_and_dark_differ(browser: Chromium, page: Path) -> None:
    colors = []
    for dark in (False, True):
        browser.open(page, dark=dark)
        colors.append(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
    light, dark_color = (sum(map(int, color.removeprefix("rgb(").removesuffix(")").split(","))) for color in colors)
    assert light > 600
    assert dark_color < 150


def test_a_phone_gets_letters_of_a_phone(browser: Chromium, page: Path) -> None:
    """Text of at least 11 pixels, that of plots too, and tables that scroll by themselves."""
    browser.open(page, SIZES["phone"])
    sizes = browser.evaluate(
        "[...document.querySelectorAll('p, td, th, figure text')].map((element) => "
        "parseFloat(getComputedStyle(element).fontSize) * (element.getScreenCTM ? element.getScreenCTM().a : 1))"
    )
    assert min(sizes) >= 9
    wide = browser.evaluate("[...document.querySelectorAll('.scroll')].map((box) => box.scrollWidth > box.clientWidth)")
    assert any(wide)


def test_paper(browser: Chromium, page: Path) -> None:
    """All of it, settings and machine included, and no wider than the sheet."""
    browser.open(page, PAPER, media="print")
    assert browser.evaluate("document.documentElement.scrollWidth") <= PAPER
    folds = browser.evaluate("[...document.querySelectorAll('.about')].map((part) => part.checkVisibility())")
    assert folds == [True] * 4
    browser.open(page)
    assert browser.evaluate("document.querySelector('.about').checkVisibility()") is False
    pdf = browser.pdf()
    assert pdf.startswith(b"%PDF-")
    assert pdf.rstrip().endswith(b"%%EOF")


def test_a_fold_opens_without_a_script(browser: Chromium, page: Path) -> None:
    browser.open(page)
    browser.evaluate("document.querySelector('summary').click()")
    assert browser.evaluate("document.querySelector('.about').offsetHeight") > 0


def test_numbers_are_seen(browser: Chromium, page: Path, results: Results) -> None:
    """What the browser shows of them is what the files have."""
    browser.open(page)
    values = set(browser.evaluate("[...document.querySelectorAll('td data')].map((data) => Number(data.value))"))
    hidden = browser.evaluate("[...document.querySelectorAll('td data')].filter((data) => !data.offsetWidth).length")
    assert hidden == 0
    for arm in ("off", "on"):
        assert results["perplexity"][arm]["ppl"] in values
        assert {test[arm]["tokens_per_s"] for test in results["speed"]["results"]} <= values
        assert {length[arm]["seconds"] for length in results["finetune"]["results"]} <= values
    assert {entry["forward"]["time(s)"] for entry in results["kernels"]} <= values


def test_plots_are_drawn_where_they_belong(browser: Chromium, page: Path) -> None:
    """No marker and no text of a plot lies outside of it."""
    browser.open(page)
    outside = browser.evaluate(
        """[...document.querySelectorAll('figure > svg')].flatMap((svg) => {
          const box = svg.getBoundingClientRect();
          return [...svg.querySelectorAll('text, .mark, .line')].filter((part) => {
            const at = part.getBoundingClientRect();
            return at.left < box.left || at.right > box.right || at.top < box.top || at.bottom > box.bottom;
          }).map((part) => part.outerHTML);
        })"""
    )
    assert outside == []
    assert browser.evaluate("document.querySelectorAll('figure > svg .mark').length") > 20


def test_markup_in_a_file_does_nothing(browser: Chromium, results: Results, tmp_path: Path) -> None:
    browser.open(make(hostile(results), tmp_path), SIZES["phone"])
    assert is_quiet(browser)
    assert browser.evaluate("document.title") == "Flash attention, off and on"
    assert browser.evaluate("document.querySelectorAll('script, img').length") == 0
    assert browser.evaluate("document.documentElement.scrollWidth") <= SIZES["phone"]


@pytest.mark.parametrize(
    ("name", "attribute", "refused"), [("script", "text", "script-src-elem"), ("img", "src", "img-src")]
)
def test_what_should_get_into_it_all_the_same_is_refused(
    browser: Chromium, page: Path, name: str, attribute: str, refused: str
) -> None:
    """The page's own policy: no scripts, nothing from elsewhere."""
    browser.open(page)
    add = f"""new Promise((resolve) => {{
      document.addEventListener("securitypolicyviolation", (event) => resolve(event.effectiveDirective));
      const element = document.createElement("{name}");
      element.{attribute} = "http://localhost:1/x";
      document.body.append(element);
      setTimeout(() => resolve("allowed"), 5000);
    }})"""
    assert browser.evaluate(add) == refused
