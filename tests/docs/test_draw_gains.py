"""Figures of whole models on the pages, and the README's picture, are what draw_gains.py writes from docs/results."""

import draw_gains
import pytest


@pytest.mark.parametrize("page", draw_gains.parts())
def test_the_page_has_the_files_figures(page):
    text = (draw_gains.ROOT / page).read_text(encoding="utf-8")
    assert draw_gains.with_parts(text, draw_gains.parts()[page]) == text, "run packages/evals/scripts/draw_gains.py"


def test_the_picture_has_the_files_figures():
    assert draw_gains.picture() == draw_gains.PICTURE.read_bytes(), "run packages/evals/scripts/draw_gains.py"
