"""The text that needs no download: the language reference that `help()` reads, in every CPython.

`pydoc_data.topics` holds about 80 chapters and sections of the Python documentation as plain text, whose wording
follows the interpreter's version. Chapters repeat their sections word for word: so a topic may be held out only if no
other topic shares passages with it, which the tests check.
"""

from pydoc_data.topics import topics
from typing import Literal

# Whole topics, about 9 % of the text: prose, grammar, method lists and examples; short, medium and long.
HELD_OUT = (
    "booleans", "calls", "global", "import", "lambda", "objects", "raise", "subscriptions", "truth", "typesmapping"
)  # fmt: skip


def documents(split: Literal["train", "heldout"]) -> list[str]:
    """The topics of one split as text, sorted by name. A topic that this Python does not have is left out."""
    return [text for name, text in sorted(topics.items()) if (name in HELD_OUT) == (split == "heldout")]
