"""HTML made of Python values. What is no `Html` is text, and escaped, wherever it comes from."""

from collections.abc import Iterable
from html import escape

from flash_evals.page.description import Table
from flash_evals.page.units import Figure


class Html(str):
    """Markup, as against text."""

    __slots__ = ()


Content = str | Iterable["Content"]


def tag(name: str, *children: Content, **attributes: str | float | None) -> Html:
    """`class_` is the attribute class, `aria_label` is aria-label; an attribute that is None is left out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{given}>{join(children)}</{name}>")


def join(content: Content) -> Html:
    if isinstance(content, Html):
        return content
    if isinstance(content, Figure):
        return tag("data", str(content), value=repr(content.value))
    if isinstance(content, str):
        return Html(escape(content))
    return Html("".join(map(join, content)))


def table(of: Table) -> Html:
    """It scrolls by itself where the page is narrower. Each row has all of its names, for those who hear it."""
    names = sum(of.names)
    head = [tag("th", cell, scope="col", class_="name" if n < names else None) for n, cell in enumerate(of.head)]
    rows = [
        tag("tr", [tag("th", cell, scope="row") for cell in row[:names]], [tag("td", cell) for cell in row[names:]])
        for row in of.rows
    ]
    made = tag("table", tag("caption", tag("span", of.caption)), tag("thead", tag("tr", head)), tag("tbody", rows))
    classes = "scroll words" if of.words else "scroll"
    return tag("div", made, class_=classes, role="region", aria_label=of.caption, tabindex=0)
