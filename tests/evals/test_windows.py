"""Which window scores which token: each token but the first exactly once, with the longest context it can have.

And the windows of others, from their definitions.
"""

import pytest
from flash_evals.scoring import Window, half_windows, windows, windows_of_streams
from hypothesis import given
from hypothesis import strategies as st


@st.composite
def plans(draw):
    context = draw(st.integers(1, 40))
    return draw(st.integers(0, 200)), context, draw(st.integers(1, context))


def test_by_hand():
    assert windows(9, 4, 2) == [Window(0, 4, 1), Window(2, 6, 5), Window(4, 8, 7)]
    assert windows(8, 4, 4) == [Window(0, 4, 1), Window(3, 7, 5)]  # the ragged end reaches back
    assert windows(3, 4, 4) == [Window(0, 2, 1)]  # shorter than the context
    assert windows(1, 4, 4) == windows(0, 4, 4) == []


def test_a_plan_that_would_leave_tokens_out_is_refused():
    for context, stride in ((0, 1), (4, 0), (4, 5)):
        with pytest.raises(ValueError, match="context" if context < 1 else "stride"):
            windows(10, context, stride)
    with pytest.raises(ValueError, match="context must be at least 3"):
        half_windows(10, 2)


@given(plans())
def test_each_token_but_the_first_is_scored_once_and_in_order(plan):
    scored = [token for window in windows(*plan) for token in range(window.first_scored, window.end + 1)]
    assert scored == list(range(1, plan[0]))


@given(plans())
def test_the_context_of_a_token_is_the_longest_its_window_allows(plan):
    """The last token of a window sees `context` tokens or all there are; no token loses more than stride - 1 of it."""
    _, context, stride = plan
    for number, (begin, end, first_scored) in enumerate(windows(*plan)):
        for token in range(first_scored, end + 1):
            least = min(token, context if token == end else context - stride + 1)
            assert token - begin >= (least if number else token)


@given(st.lists(st.integers(), max_size=100), st.integers(1, 20), st.data())
def test_as_lm_evaluation_harness_rolls_its_windows(text, context, data):
    """Pairs of what the model reads and what it predicts, behind a prefix.

    The first predicts as many tokens as the model can read; each later one `context - context_len + 1` of those that
    are left, or all, and reads the `context` tokens that stand before the last of them.
    """
    context_len = data.draw(st.integers(1, context))
    prefix = -1
    expected = []
    predicted = 0
    while predicted < len(text):
        more = context - context_len + 1 if predicted else context
        upto = min(predicted + more, len(text))
        reads = ([prefix, *text])[max(0, upto - context) : upto]
        expected.append((reads, text[predicted:upto]))
        predicted = upto

    ids = [prefix, *text]
    plan = windows(len(ids), context, context - context_len + 1)
    assert [(ids[w.begin : w.end], ids[w.first_scored : w.end + 1]) for w in plan] == expected


@given(st.lists(st.integers(0, 60), max_size=6), st.integers(1, 20), st.data())
def test_streams_have_their_windows_to_themselves(lengths, context, data):
    stride = data.draw(st.integers(1, context))
    plan = windows_of_streams(lengths, context, stride)
    expected, start = [], 0
    for length in lengths:
        expected += [Window(*(start + token for token in window)) for window in windows(length, context, stride)]
        start += length
    assert plan == expected


@given(st.integers(0, 200), st.integers(3, 40))
def test_half_windows_are_llama_perplexitys(n_tokens, n_ctx):
    """Outputs at the positions n_ctx / 2 to n_ctx - 2 of each whole chunk predict the token at the next position."""
    scored = [
        (chunk * n_ctx, chunk * n_ctx + position + 1)
        for chunk in range(n_tokens // n_ctx)
        for position in range(n_ctx // 2, n_ctx - 1)
    ]
    plan = half_windows(n_tokens, n_ctx)
    assert [(w.begin, token) for w in plan for token in range(w.first_scored, w.end + 1)] == scored
