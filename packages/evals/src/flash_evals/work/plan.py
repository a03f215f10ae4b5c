"""Plans the measurement of a perplexity: which tokens the model reads, in which windows, and which tokens are scored.

Every choice here changes the perplexity. So each choice is an option, and the output names it.
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
    """The options that change the perplexity. Raises EvalError for options that exclude each other."""

    context: int
    stride: int | None  # None: the same as context
    scoring: Scoring
    documents: Documents
    bos: Bos
    detokenise: bool | None  # None: only if the text is WikiText

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
    """A text, the tokens that the model reads, and the windows that score these tokens."""

    streams: Sequence[tuple[str, Tokens]]  # (original text, its tokens); no window extends over two streams
    ids: np.ndarray  # the tokens of all streams, one after the other
    windows: Sequence[Window]
    stride: int | None  # None with --scoring half
    bos: Literal["bos", "eos"] | None
    detokenised: bool

    def size_up_to(self, window: Window) -> tuple[int, int] | tuple[None, None]:
        """Counts words (split at white space) and UTF-8 bytes of the original text, up to the last token that `window`
        scores. Returns (None, None) with --scoring half, because the scored tokens do not form a text.

        A document's first token counts, although it may not be scored.
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
    """Applies the rules to a text. Raises EvalError if the text is too short or the context too long."""
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

    # Drops streams of fewer than two tokens, because nothing in them can be scored.
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
