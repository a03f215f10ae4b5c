"""A text that needs no download: the language reference for `help()`, which every CPython contains.

`pydoc_data.topics` has about 80 chapters and sections of the Python documentation as plain text. The wording depends on
Python's version. Some chapters repeat passages of others. The tests check that held-out topics share no passage with
any other topic.
"""

from pydoc_data.topics import topics
from typing import Literal

# These short and long topics are about 9 % of the text. They have prose, grammar, method lists and examples.
HELD_OUT = (
    "booleans", "calls", "global", "import", "lambda", "objects", "raise", "subscriptions", "truth", "typesmapping"
)  # fmt: skip


def documents(split: Literal["train", "heldout"]) -> list[str]:
    """The topics of one split as text, sorted by name. A topic that this Python does not have is left out."""
    return [text for name, text in sorted(topics.items()) if (name in HELD_OUT) == (split == "heldout")]
