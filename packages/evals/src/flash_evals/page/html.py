"""HTML made of Python values. What is no `Html` is text, and escaped, wherever it comes from."""

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

DASH = "–"  # for a figure that is not finite or not known


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
    if isinstance(content, str):
        return Html(escape(content))
    return Html("".join(map(join, content)))


def figure(value: float | None, shown: Callable[[float], str]) -> Html:
    """A number of a result file, or made of some: as a person reads it, and exactly."""
    if value is None or not math.isfinite(value):
        return Html(DASH)
    return tag("data", shown(value), value=repr(value))


Head = Sequence[str | tuple[str, Sequence[str]]]  # of columns, and of groups of them with a name above


def table(caption: str, head: Head, rows: Iterable[Sequence[Content]]) -> Html:
    """Its first column names the rows. It scrolls by itself where the page is narrower."""
    body = [tag("tr", tag("th", first, scope="row"), [tag("td", cell) for cell in others]) for first, *others in rows]
    made = tag("table", tag("caption", tag("span", caption)), tag("thead", _head(head)), tag("tbody", body))
    return tag("div", made, class_="scroll", role="region", aria_label=caption, tabindex=0)


def _head(head: Head) -> list[Html]:
    """One row, or two where columns stand in groups."""
    groups = [group for group in head if not isinstance(group, str)]
    deep = 2 if groups else None
    first = [
        tag("th", cell, scope="col", rowspan=deep)
        if isinstance(cell, str)
        else tag("th", cell[0], scope="colgroup", colspan=len(cell[1]), class_="group")
        for cell in head
    ]
    second = [tag("th", name, scope="col") for _, names in groups for name in names]
    return [tag("tr", first), *([tag("tr", second)] if groups else [])]


def facts(pairs: Iterable[tuple[str, Content]]) -> Html:
    """Names and what they stand for."""
    return tag("dl", [tag("div", tag("dt", name), tag("dd", what)) for name, what in pairs])
