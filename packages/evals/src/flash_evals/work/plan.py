"""What a perplexity is of: the tokens that the model reads of a text, in which windows, and which of them are scored.

Every choice here changes the figure, so all of them are options, and each is named in the output.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from flash_evals.results.errors import EvalError
from flash_evals.results.perplexity_result import Documents, Scoring
from flash_evals.work import scoring, wikitext
from flash_evals.work.data import Text
from flash_evals.work.models import Bos, LoadedModel, Tokens, encode
from flash_evals.work.scoring import Window


@dataclass(frozen=True)
class Rules:
    """What the options say. Raises EvalError for options that exclude each other."""

    context: int
    stride: int | None  # None: the context
    scoring: Scoring
    documents: Documents
    bos: Bos
    detokenise: bool | None  # None: if the text is known to need it

    def __post_init__(self) -> None:
        if self.scoring == "half":
            given = {"--stride": self.stride is not None, "--documents separate": self.documents == "separate"}
            for option in filter(given.get, given):
                raise EvalError(f"{option} has no meaning with --scoring half, which cuts the joined text into chunks")
            if self.context < 3:
                raise EvalError(f"--scoring half takes a --context of at least 3, not {self.context}")
        elif self.stride is not None and not 1 <= self.stride <= self.context:
            raise EvalError(f"--stride must be between 1 and the context of {self.context}, not {self.stride}")


@dataclass(frozen=True)
class Plan:
    """A text under the rules: its tokens, and the windows that score them."""

    streams: Sequence[tuple[str, Tokens]]  # what is read without a context before it: the original, and its tokens
    ids: np.ndarray  # the streams' tokens, one behind the other
    windows: Sequence[Window]
    stride: int | None  # None: of the half windows
    bos: Literal["bos", "eos"] | None
    detokenised: bool

    def size_up_to(self, window: Window) -> tuple[int, int] | tuple[None, None]:
        """The words (split at white space) and UTF-8 bytes that are scored when this window and those before it are;
        None where the scored tokens do not make up a text.

        A document counts from its first token on, scored or not. Of the last one, if it is not read to its end, the
        original text counts that the tokens read stand for: detokenising takes away no more than spaces and marks, so
        it is known to the character.
        """
        if self.stride is None:
            return None, None
        words = n_bytes = start = 0
        for original, tokens in self.streams:
            if start > window.end:
                break
            read = tokens.text_up_to(min(window.end - start, len(tokens.ids) - 1))
            text = original if read == tokens.text else original[: wikitext.original_length(original, read)]
            words, n_bytes = words + len(text.split()), n_bytes + len(text.encode())
            start += len(tokens.ids)
        return words, n_bytes


def make(loaded: LoadedModel, text: Text, rules: Rules) -> Plan:
    """Applies the rules to a text. Raises EvalError for a text too short and a context too long."""
    loaded.require_positions(rules.context, "--context")
    detokenise = text.tokenised if rules.detokenise is None else rules.detokenise
    originals, texts = text.documents, [wikitext.detokenised(d) if detokenise else d for d in text.documents]
    if rules.documents == "joined":
        originals, texts = [text.dataset.separator.join(originals)], [text.dataset.separator.join(texts)]
    streams = [(original, encode(loaded, each, rules.bos)) for original, each in zip(originals, texts, strict=True)]
    half, longest = rules.scoring == "half", max(len(tokens.ids) for _, tokens in streams)
    if longest < (rules.context if half else 2):
        takes = f"--scoring half needs at least --context {rules.context:,}" if half else "scoring needs at least 2"
        where = "" if rules.documents == "joined" else "the longest document of "
        raise EvalError(f"{where}{text.dataset.name} has {longest:,} tokens for this model; {takes}")

    # Of a single token, or of none, nothing can be scored.
    streams = [(original, tokens) for original, tokens in streams if len(tokens.ids) > 1]
    ids, bos = np.concatenate([tokens.ids for _, tokens in streams]), streams[0][1].bos
    if half:
        stride, windows = None, scoring.half_windows(len(ids), rules.context)
        if bos:
            ids[[window.begin for window in windows]] = ids[0]
    else:
        stride = rules.stride or rules.context
        windows = scoring.windows([len(tokens.ids) for _, tokens in streams], rules.context, stride)
    return Plan(streams, ids, windows, stride, bos, detokenise)
