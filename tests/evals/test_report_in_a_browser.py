"""`flash-eval report`'s page in a headless Chromium: quiet, readable on a screen, on a phone and on paper."""

import json
import shutil

import click.testing
import pytest
from chromium import Chromium
from demanded import lacking
from flash_evals.cli import main
from report_page import hostile

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
def browser(tmp_path_factory):
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        lacking("no Chromium: apt-get install chromium")
    chromium = Chromium(program, tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.close()


@pytest.fixture(scope="module")
def page(results, tmp_path_factory):
    """Of a run of each command, and with a file that is left out."""
    return make(list(results.values()), tmp_path_factory.mktemp("report"))


def make(results, folder):
    files = [folder / f"{number}.json" for number in range(len(results))]
    for file, result in zip(files, results, strict=True):
        file.write_text(json.dumps(result))
    out = folder / "page.html"
    arguments = ["report", *files, folder / "missing.json", "-o", out]
    done = click.testing.CliRunner().invoke(main, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    return out


def is_quiet(browser):
    """One request, for the page itself, and nothing that a console would show."""
    for method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
        assert browser.seen(method) == []
    return len(browser.seen("Network.requestWillBeSent")) == 1


LONG = pytest.mark.long("another look at the same page")


@pytest.mark.parametrize(
    ("size", "dark"),
    [("phone", True), *(pytest.param(*look, marks=LONG) for look in (("phone", False), ("screen", True)))],
)
def test_it_opens(browser, page, results, size, dark):
    """Without a word on the console, without the network, no wider than the screen, and nothing of it is faint."""
    browser.open(page, SIZES[size], dark)
    assert is_quiet(browser)
    assert browser.evaluate("document.documentElement.scrollWidth") <= SIZES[size]
    assert browser.evaluate("document.querySelectorAll('article').length") == 4
    color = browser.evaluate("getComputedStyle(document.body).backgroundColor").removeprefix("rgb(").removesuffix(")")
    assert (sum(map(int, color.split(","))) < 400) is dark
    browser.evaluate("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
    seen, faint = browser.evaluate(FAINT)
    assert seen > 300
    assert faint == []


@LONG
def test_a_phone_gets_letters_of_a_phone(browser, page):
    """Those of plots too, and tables scroll by themselves."""
    browser.open(page, SIZES["phone"])
    sizes = browser.evaluate(
        "[...document.querySelectorAll('p, td, th, figure text')].map((element) => "
        "parseFloat(getComputedStyle(element).fontSize) * (element.getScreenCTM ? element.getScreenCTM().a : 1))"
    )
    assert min(sizes) >= 9
    assert browser.evaluate(
        "[...document.querySelectorAll('.scroll')].some((box) => box.scrollWidth > box.clientWidth)"
    )


@LONG
def test_paper(browser, page):
    """All of it, settings and machine included, which a fold hides on a screen; and no wider than the sheet."""
    visible = "[...document.querySelectorAll('.about')].map((part) => part.checkVisibility())"
    browser.open(page, PAPER, media="print")
    assert browser.evaluate("document.documentElement.scrollWidth") <= PAPER
    assert browser.evaluate(visible) == [True] * 4
    pdf = browser.pdf()
    assert pdf.startswith(b"%PDF-")
    assert pdf.rstrip().endswith(b"%%EOF")
    browser.open(page)
    assert browser.evaluate(visible) == [False] * 4
    browser.evaluate("document.querySelector('summary').click()")
    assert browser.evaluate(visible) == [True] + [False] * 3


@LONG
def test_numbers_and_plots_are_seen(browser, page):
    """None is hidden, and no marker and no text of a plot lies outside of it."""
    browser.open(page)
    widths = browser.evaluate("[...document.querySelectorAll('td data')].map((data) => data.offsetWidth)")
    assert len(widths) > 50
    assert all(widths)
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


def test_markup_in_a_file_does_nothing(browser, results, tmp_path):
    """And what should get into the page all the same, its own policy refuses: no scripts, nothing from elsewhere."""
    browser.open(make(hostile(results), tmp_path), SIZES["phone"])
    assert is_quiet(browser)
    assert browser.evaluate("document.title") == "Flash attention, off and on"
    assert browser.evaluate("document.querySelectorAll('script, img').length") == 0
    assert browser.evaluate("document.documentElement.scrollWidth") <= SIZES["phone"]
    for name, attribute, refused in (("script", "text", "script-src-elem"), ("img", "src", "img-src")):
        add = f"""new Promise((resolve) => {{
          document.addEventListener("securitypolicyviolation", (event) => resolve(event.effectiveDirective));
          const element = document.createElement("{name}");
          element.{attribute} = "http://localhost:1/x";
          document.body.append(element);
          setTimeout(() => resolve("allowed"), 5000);
        }})"""
        assert browser.evaluate(add) == refused
