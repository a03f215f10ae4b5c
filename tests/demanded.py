"""Handles tests that need something that a bare machine lacks."""

import os
import sys
from typing import NoReturn

import pytest


def lacking(what: str) -> NoReturn:
    """Skips a test for want of `what`. On Linux with CI=1, where .ci/run installs it, the test fails."""
    (pytest.fail if os.environ.get("CI") and sys.platform == "linux" else pytest.skip)(what)
