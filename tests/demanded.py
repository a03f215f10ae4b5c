"""Skips tests that need something that this machine lacks."""

import os
import sys
from typing import NoReturn

import pytest


def lacking(what: str) -> NoReturn:
    """Skips a test because `what` is missing. On Linux with CI set, the test fails instead: .ci/run installs `what`."""
    (pytest.fail if os.environ.get("CI") and sys.platform == "linux" else pytest.skip)(what)
