"""The text that needs no download: the language reference that `help()` reads, in every CPython.

`pydoc_data.topics` holds about 80 chapters and sections of the Python documentation as plain text. Its
wording follows the interpreter's version, so a figure measured on it names the version too.

Chapters repeat their sections word for word ("specialnames" holds all of "customization", "compound" all of
"try"). So a topic may be held out only if no other topic shares passages with it; the tests check that.
"""

from pydoc_data.topics import topics
from typing import Literal

# Whole topics, about 9 % of the text: prose, grammar, method lists and examples; short, medium and long.
HELD_OUT = (
    "booleans",
    "calls",
    "global",
    "import",
    "lambda",
    "objects",
    "raise",
    "subscriptions",
    "truth",
    "typesmapping",
)


def documents(split: Literal["train", "heldout"]) -> list[str]:
    """The topics of one split as text, sorted by name. A topic that this Python does not have is left out."""
    return [text for name, text in sorted(topics.items()) if (name in HELD_OUT) == (split == "heldout")]
