"""A text that needs no download: the language reference for `help()`, which every CPython contains.

`pydoc_data.topics` has about 80 chapters and sections of the Python documentation as plain text; the wording depends on
the interpreter's version. Chapters repeat their sections word for word, so a topic may be held out only if it shares no
passage with another topic; the tests check this.
"""

from pydoc_data.topics import topics
from typing import Literal

# The topics that are held out: about 9 % of the text, with prose, grammar, method lists and examples, short and long.
HELD_OUT = (
    "booleans", "calls", "global", "import", "lambda", "objects", "raise", "subscriptions", "truth", "typesmapping"
)  # fmt: skip


def documents(split: Literal["train", "heldout"]) -> list[str]:
    """The topics of one split as text, sorted by name. A topic that this Python does not have is left out."""
    return [text for name, text in sorted(topics.items()) if (name in HELD_OUT) == (split == "heldout")]
