"""`flash-eval report`'s page in a headless Chromium logs nothing, and is readable on a screen, a phone and paper."""

import json
import shutil
from importlib.util import find_spec
from io import BytesIO

import pytest
from flash_evals.pages.colors import DARK, LIGHT
from PIL import Image, ImageColor

from tests.demanded import lacking
from tests.evals.report_page import hostile

pytestmark = pytest.mark.slow("starts a browser")

SIZES = {"screen": 1200, "phone": 390}
PAPER = 688  # CSS pixels between the margins of A4

# Counts the page's texts, and lists those whose contrast is below 4.5, the minimum of WCAG 2.2 (AA).
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
    if (!words.currentNode.data.trim()) continue;
    const ratio = contrast(element, getComputedStyle(element).color);
    seen += 1;
    if (!(ratio >= 4.5)) faint.push([words.currentNode.data, ratio]);
  }
  return [seen, faint];
})()
"""


@pytest.fixture(scope="module")
def chromium():
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        lacking("no Chromium: apt-get install chromium")
    if not find_spec("playwright"):
        lacking("no playwright: uv sync --all-groups")
    from playwright.sync_api import sync_playwright

    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=program, chromium_sandbox=False) as browser,
    ):
        yield browser


@pytest.fixture
def open_page(chromium):
    """open_page(path): opens a page, which must load nothing else, and log nothing."""

    def open_page(path, width=1200, dark=False, media="screen"):
        page = chromium.new_page(
            viewport={"width": width, "height": 900}, is_mobile=width < 600, color_scheme="dark" if dark else "light"
        )
        page.emulate_media(media=media)
        said, requested = [], []
        for event in ("console", "pageerror"):
            page.on(event, lambda what: said.append(what))
        page.on("request", lambda request: requested.append(request.url))
        page.goto(path.as_uri())
        assert said == []
        assert [url for url in requested if not url.startswith("data:")] == [path.as_uri()]
        return page

    yield open_page
    for context in chromium.contexts:
        context.close()


@pytest.fixture(scope="module")
def make(invoke, tmp_path_factory):
    """make(*results): writes the page of these results and of one missing file. Returns the page's path."""

    def make(*results):
        folder = tmp_path_factory.mktemp("report")
        files = [folder / f"{number}.json" for number in range(len(results))]
        for file, result in zip(files, results, strict=True):
            file.write_text(json.dumps(result))
        done = invoke("report", *files, folder / "missing.json", "-o", folder / "page.html")
        assert done.exit_code == 0, done.output
        return folder / "page.html"

    return make


@pytest.fixture(scope="module")
def file(make, results):
    return make(*results.values())


NIGHTLY = pytest.mark.nightly("another look at the same page")


@pytest.mark.parametrize(
    ("size", "dark"),
    [("phone", True), *(pytest.param(*look, marks=NIGHTLY) for look in (("phone", False), ("screen", True)))],
)
def test_it_opens(open_page, file, size, dark):
    """The page is no wider than the screen, because each wide table has a scroll bar. No text is faint. On a phone,
    letters are large enough, also in plots.
    """
    page = open_page(file, SIZES[size], dark)
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size]
    assert page.evaluate("document.querySelectorAll('article').length") == 4
    color = page.evaluate("getComputedStyle(document.body).backgroundColor").removeprefix("rgb(").removesuffix(")")
    assert (sum(map(int, color.split(","))) < 400) is dark
    page.evaluate("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
    seen, faint = page.evaluate(FAINT)
    assert seen > 300
    assert faint == []
    sizes = "[...document.querySelectorAll('p, td, th')].map((part) => parseFloat(getComputedStyle(part).fontSize))"
    assert min(page.evaluate(sizes)) >= 9
    shrunk = "[...document.querySelectorAll('img')].map((image) => image.width / image.naturalWidth)"
    assert min(page.evaluate(shrunk)) >= 0.65  # a plot's letters of 11 points, 14.7 pixels, stay above 9
    scrolls = "[...document.querySelectorAll('.scroll')].some((box) => box.scrollWidth > box.clientWidth)"
    assert page.evaluate(scrolls) is (size == "phone")


@NIGHTLY
def test_paper(open_page, file):
    """On paper, the page is no wider than the sheet, and shows settings and machine, which are folded on a screen."""
    visible = "[...document.querySelectorAll('.about')].map((part) => part.checkVisibility())"
    page = open_page(file, PAPER, media="print")
    assert page.evaluate("document.documentElement.scrollWidth") <= PAPER
    assert page.evaluate(visible) == [True] * 4
    pdf = page.pdf(prefer_css_page_size=True)
    assert pdf.startswith(b"%PDF-")
    assert pdf.rstrip().endswith(b"%%EOF")
    page = open_page(file)
    assert page.evaluate(visible) == [False] * 4
    page.evaluate("document.querySelector('summary').click()")
    assert page.evaluate(visible) == [True] + [False] * 3


@NIGHTLY
@pytest.mark.parametrize(("dark", "media", "colors"), [(0, "screen", LIGHT), (1, "screen", DARK), (1, "print", LIGHT)])
def test_charts_are_as_light_as_the_page(open_page, file, dark, media, colors):
    shown = open_page(file, dark=dark, media=media).locator("img").first.screenshot()
    ground = Image.open(BytesIO(shown)).convert("RGB").getpixel((3, 3))
    assert ground == ImageColor.getrgb(colors["card"])


def test_markup_in_a_file_does_nothing(open_page, make, results):
    """Markup is escaped. The page's content security policy blocks any script, and any content from elsewhere."""
    page = open_page(make(*hostile(*results.values())), SIZES["phone"])
    assert page.evaluate("document.title") == "Flash attention, off and on"
    assert page.evaluate("document.querySelectorAll('script, img[onerror]').length") == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES["phone"]
    for name, attribute, refused in (("script", "text", "script-src-elem"), ("img", "src", "img-src")):
        add = f"""new Promise((resolve) => {{
          document.addEventListener("securitypolicyviolation", (event) => resolve(event.effectiveDirective));
          const element = document.createElement("{name}");
          element.{attribute} = "http://localhost:1/x";
          document.body.append(element);
          setTimeout(() => resolve("allowed"), 5000);
        }})"""
        assert page.evaluate(add) == refused
