"""WikiText as its authors published it, tokenised, and as people write: ` 2 @.@ 5 kg ( 6 lb ) , ` is `2.5 kg (6 lb), `.

A model has seen the second kind, so that is what it should read; words and bytes are those of the first, which every
published figure divides by. The rules are lm-evaluation-harness's, in its order, so that its figures can be met.
"""

import re
from collections.abc import Iterable

HEADING = re.compile("= (?!=).*(?<!=) =")  # of a page: one "=" on each side, a section has more
OPENING, CLOSING = "([{\"'", ")]}\"'"


def detokenised(text: str) -> str:
    """The text with the spaces that its tokeniser put in taken out, page by page.

    Quotes and brackets are matched in pairs, and one without a partner would shift all pairs to the end of the text:
    no pair reaches beyond its page.
    """
    return "\n".join(_page(page) for page in _pages(text.split("\n")))


def _page(text: str) -> str:
    text = text.replace("s '", "s'")
    for mark in "-,.":
        text = text.replace(f" @{mark}@ ", mark)
    for mark in ":;.!?,":
        text = text.replace(f" {mark} ", f"{mark} ")
    for opening, closing in zip(OPENING, CLOSING, strict=True):
        inside = rf"\s*([^\{closing}]*?)\s*"
        text = re.sub(rf"\{opening}{inside}\{closing}", rf"{opening}\1{closing}", text)
    for depth in (4, 3, 2):
        text = text.replace(" ".join("=" * depth), "=" * depth)
    for spaced, plain in ((" ° ", "°"), (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")):
        text = text.replace(spaced, plain)
    return text


def original_length(original: str, read: str) -> int:
    """How many characters of the original a text stands for that its detokenised form begins with.

    Detokenising takes spaces and @ away, and makes a 1 of some N; everything else is there in both, in order. What was
    taken away belongs to the character after it.
    """
    position = 0
    for character in read:
        while original[position] != character and (original[position], character) != ("N", "1"):
            position += 1
        position += 1
    return position


def pages(rows: Iterable[str]) -> list[str]:
    """The pages of the file whose lines are these rows, cut as lm-evaluation-harness does.

    On the hub a row is a line with its `"\\n"`, and a blank line is empty. Joined by `"\\n"` the pages are the file,
    less a blank start.
    """
    text = "".join(row or " \n" for row in rows)
    return [page for page in _pages(text.split("\n")) if page.strip()]


def _pages(lines: Iterable[str]) -> list[str]:
    """Cut before each heading."""
    found: list[list[str]] = [[]]
    for line in lines:
        if HEADING.fullmatch(line.strip()) and found[-1]:
            found.append([])
        found[-1].append(line)
    return ["\n".join(page) for page in found]
