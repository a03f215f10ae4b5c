"""Which window scores which token: each token but the first exactly once, with the longest context it can have."""

import pytest
from flash_evals.scoring import Window, windows
from hypothesis import given
from hypothesis import strategies as st


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, int, int]:
    context = draw(st.integers(1, 40))
    return draw(st.integers(0, 200)), context, draw(st.integers(1, context))


@pytest.mark.parametrize(
    ("n_tokens", "context", "stride", "expected"),
    [
        (9, 4, 4, [Window(0, 4, 1), Window(4, 8, 5)]),
        (9, 4, 2, [Window(0, 4, 1), Window(2, 6, 5), Window(4, 8, 7)]),
        (8, 4, 4, [Window(0, 4, 1), Window(3, 7, 5)]),  # the ragged end reaches back
        (10, 4, 4, [Window(0, 4, 1), Window(4, 8, 5), Window(5, 9, 9)]),
        (5, 4, 1, [Window(0, 4, 1)]),
        (6, 4, 1, [Window(0, 4, 1), Window(1, 5, 5)]),
        (3, 4, 4, [Window(0, 2, 1)]),  # shorter than the context
        (2, 1, 1, [Window(0, 1, 1)]),
        (1, 4, 4, []),
        (0, 4, 4, []),
    ],
)
def test_by_hand(n_tokens: int, context: int, stride: int, expected: list[Window]) -> None:
    assert windows(n_tokens, context, stride) == expected


@given(plans())
def test_each_token_but_the_first_is_scored_once_and_in_order(plan: tuple[int, int, int]) -> None:
    scored = [token for window in windows(*plan) for token in range(window.first_scored, window.end + 1)]
    assert scored == list(range(1, plan[0]))


@given(plans())
def test_a_window_reads_what_its_context_allows(plan: tuple[int, int, int]) -> None:
    n_tokens, context, _ = plan
    for begin, end, first_scored in windows(*plan):
        assert 0 <= begin < first_scored <= end < n_tokens
        assert end - begin == min(context, n_tokens - 1)


@given(plans())
def test_later_windows_score_a_stride_and_the_last_one_the_rest(plan: tuple[int, int, int]) -> None:
    n_tokens, context, stride = plan
    sizes = [window.end + 1 - window.first_scored for window in windows(*plan)]
    assert sizes[:1] == [min(context, n_tokens - 1)][: len(sizes)]
    assert all(size == stride for size in sizes[1:-1])
    assert all(1 <= size <= stride for size in sizes[1:])


@given(plans())
def test_the_context_of_a_token_is_the_longest_its_window_allows(plan: tuple[int, int, int]) -> None:
    """The last token of a window sees `context` tokens or all there are; no token loses more than stride - 1 of it."""
    _, context, stride = plan
    for number, (begin, end, first_scored) in enumerate(windows(*plan)):
        for token in range(first_scored, end + 1):
            least = min(token, context if token == end else context - stride + 1)
            assert token - begin >= (least if number else token)


@pytest.mark.parametrize(("context", "stride"), [(0, 1), (-1, 1), (4, 0), (4, 5), (4, -1)])
def test_a_plan_that_would_leave_tokens_out_is_refused(context: int, stride: int) -> None:
    with pytest.raises(ValueError, match="context" if context < 1 else "stride"):
        windows(10, context, stride)
