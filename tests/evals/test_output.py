"""Numbers as people read them."""

import numpy as np
import pytest
from flash_evals import output
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("number", "text"),
    [(12, "12"), (1_300, "1.3 k"), (1_017_984, "1.0 M"), (494_032_768, "494 M"), (7_615_616_512, "7.6 B")],
)
def test_count(number: int, text: str) -> None:
    assert output.count(number) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(35.36123, "35.3612"), (5343.3441, "5,343.3441"), (3.9e35, "3.9000e+35"), (float("inf"), "not finite")],
)
def test_plain(number: float, text: str) -> None:
    assert output.plain(number) == text


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]))
def test_percentile(values: list[float], share: float) -> None:
    assert output.percentile(values, share) == pytest.approx(np.quantile(values, share), abs=1e-6)


def test_spread() -> None:
    assert output.spread([1000.0, 1100.0, 1200.0, 1300.0, 1400.0, 9000.0]) == "1,250 (1,100–1,400)"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        ([17.24, 17.0, 18.0], "17.2 s (17.1–17.7)"),
        ([0.00421], "4.21 ms (4.21–4.21)"),
        ([0.271], "271 ms (271–271)"),
        ([0.00002, 0.000021, 0.001], "21.0 µs (20.4–608.4)"),
    ],
)
def test_duration(seconds: list[float], text: str) -> None:
    assert output.duration(seconds) == text


def test_columns() -> None:
    assert output.columns([("", "off"), ("speed", "1")], gap=2) == "       off\nspeed  1"
