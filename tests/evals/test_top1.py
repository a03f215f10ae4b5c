"""The token that an arm ranks first, what ties with it, and whether two arms agree: with one arm's logits at a time."""

from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from flash_evals import paired
from flash_evals.paired import Scores, top1_agrees
from flash_evals.scoring import Window

NAN, INF = float("nan"), float("inf")


def scored(*rows: list[float]) -> Scores:
    """Of a window whose logits these are."""
    ids = np.zeros(len(rows) + 1, np.int32)
    return paired._score(mx.array(list(rows)), ids, Window(0, len(rows), 1))


@pytest.mark.parametrize(
    ("off", "on", "agrees"),
    [
        ([1.0, 2.0, 0.0], [1.1, 1.9, 0.0], True),
        ([1.0, 2.0, 0.0], [2.1, 1.9, 0.0], False),
        ([16.0, 16.0, 0.0], [16.0, 16.1, 0.0], True),  # a tie may be broken either way
        ([16.0, 16.00001, 0.0], [16.1, 16.0, 0.0], True),  # ... and 5 roundings apart is a tie
        ([16.0, 16.0001, 0.0], [16.1, 16.0, 0.0], False),  # ... and 52 are none
        ([1e-9, 0.0, -1.0], [0.0, 1e-9, -1.0], True),
        ([NAN, 1.0, 0.0], [0.0, 1.0, 0.0], False),
        ([0.0, 1.0, 0.0], [NAN, 1.0, 0.0], False),
        ([NAN, NAN, NAN], [NAN, NAN, NAN], False),
        ([1.0, NAN, 0.0], [1.0, NAN, 0.0], False),
        ([1.0, INF, 0.0], [1.0, INF, 0.0], False),
        ([1.0, 0.0, -INF], [1.0, 0.0, -INF], True),  # a token that the model may not choose
    ],
)
def test_agreement(off: list[float], on: list[float], agrees: bool) -> None:
    assert top1_agrees(scored(off), scored(on)).tolist() == [agrees]


def test_each_token_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows are looked at together, and after windows are joined and cut."""
    kinds = [[3.0, 2.0, 1.0], [1.0, 2.0, 3.0], [3.0, 3.0, 1.0], [2.0, 2.0, 2.0], [NAN, 1.0, 2.0]]
    off, on = zip(*product(kinds, kinds), strict=True)
    expected = [bool(top1_agrees(scored(a), scored(b))[0]) for a, b in zip(off, on, strict=True)]
    assert 0 < sum(expected) < len(expected)
    for rows in (1, 4, 1000):
        monkeypatch.setattr(paired, "ROWS_AT_ONCE", rows)
        assert top1_agrees(scored(*off), scored(*on)).tolist() == expected
    joined = Scores.join([scored(*on[:7]), scored(*on[7:8]), scored(*on[8:])])
    assert top1_agrees(scored(*off), joined).tolist() == expected
    assert top1_agrees(joined.first(9), scored(*on[:9])).tolist() == [row is not kinds[4] for row in on[:9]]


def test_ties_are_kept_while_they_are_few() -> None:
    """A model that likes all of 150,000 tokens the same must not fill the memory."""
    assert len(scored([0.0] * 1000).ties) == paired.TIES_KEPT
