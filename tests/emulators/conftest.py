"""Settings for the tests of the emulators. Only every eighth case runs, because the emulators seldom change."""

from pathlib import Path

import pytest

from tests.demanded import lacking
from tests.emulators.metal_on_cpu import MISSING

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.rotate(8))


@pytest.fixture(autouse=True, scope="module")
def _clang() -> None:
    if MISSING:
        lacking(MISSING)
