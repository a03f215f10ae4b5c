"""WikiText as its authors published it, tokenised, and as people write: ` 2 @.@ 5 kg ( 6 lb ) , ` is `2.5 kg (6 lb), `.

A model has seen the second kind, so that is what it should read; words and bytes are those of the first, which every
published figure divides by. The rules are lm-evaluation-harness's, in its order, so that its figures can be met.
"""

import re
from collections.abc import Iterable

# The line end before the heading of a page, which has one "=" on each side: that of a section has more.
HEADING = re.compile(r"\n(?=[^\S\n]*= (?!=).*(?<!=) =[^\S\n]*(?:\n|\Z))")
OPENING, CLOSING = "([{\"'", ")]}\"'"


def detokenised(text: str) -> str:
    """The text with the spaces that its tokeniser put in taken out, page by page.

    Quotes and brackets are matched in pairs, and one without a partner would shift all pairs to the end of the text:
    no pair reaches beyond its page.
    """
    return "\n".join(map(_page, HEADING.split(text)))


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

    Detokenising takes spaces and @ away, which belong to the character after them, and makes a 1 of some N.
    """
    position = 0
    for character in read:
        while original[position] != character and (original[position], character) != ("N", "1"):
            position += 1
        position += 1
    return position


def pages(rows: Iterable[str]) -> list[str]:
    """The pages of the file whose lines are these rows, in which a blank one is empty; less a blank start of the file.

    They are cut as lm-evaluation-harness does, and joined by a line end.
    """
    text = "".join(row or " \n" for row in rows)
    return [page for page in HEADING.split(text) if page.strip()]
