"""Turns WikiText, published tokenised, into normal text: ` 2 @.@ 5 kg ( 6 lb ) , ` becomes `2.5 kg (6 lb), `.

Models were trained on normal text, so they read normal text here, too. Published figures count the words and bytes of
the original text. The rules and their order are lm-evaluation-harness's, so that both programs' figures can agree.
"""

import re
from collections.abc import Iterable

# Matches the line end before a page's heading. A page's heading has one "=" on each side; a section's has more.
HEADING = re.compile(r"\n(?=[^\S\n]*= (?!=).*(?<!=) =[^\S\n]*(?:\n|\Z))")
OPENING, CLOSING = "([{\"'", ")]}\"'"


def detokenised(text: str) -> str:
    """Undoes the tokenisation, page by page.

    Quotes and brackets are matched in pairs. A quote or bracket without a partner shifts all later pairs of its page.
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
    """Returns how many characters of the original correspond to `read`, the beginning of the detokenised original.

    Detokenising removes spaces and @, and turns N into 1 in some places. A removed character counts if `read` has a
    character after it.
    """
    position = 0
    for character in read:
        while original[position] != character and (original[position], character) != ("N", "1"):
            position += 1
        position += 1
    return position


def pages(rows: Iterable[str]) -> list[str]:
    """Joins the rows, which are the lines of a file, and cuts the file into its pages, as lm-evaluation-harness does.

    An empty row is a blank line. Blank pages and the line end between two pages are left out.
    """
    text = "".join(row or " \n" for row in rows)
    return [page for page in HEADING.split(text) if page.strip()]
