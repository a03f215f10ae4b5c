"""Chooses the tests that run: a fixed choice by default, more tests in CI, and all tests at night.

- `pytest` runs the folders in pyproject.toml's `testpaths`, without tests marked `slow(reason)`. It runs every n-th
  case of a test marked `rotate(n)`, and every m-th case if the mark is `rotate(n, default=m)`. Each run has the same
  cases, and the same examples of Hypothesis.
- `pytest tests/metal`, or another folder or file, also runs the slow tests there. It ignores `default=m`.
- `--rotate`, which CI uses in `make parts`, runs the slow tests and every n-th case. The number of the last commit
  decides which cases and which examples of Hypothesis run, so n commits in a row run all cases.
- `--all`, which `make nightly` uses, runs all cases of all tests, even of tests marked `nightly(reason)`. A test
  marked `rotate(n, nightly=m)` would take hours. It runs every m-th case, chosen by the number of the last commit,
  unless the command names its file.

`pytest --all file.py::test` runs all cases of one test. Without `--all`, naming a test does not make it run if it is
marked nightly.
"""

import os
import subprocess
from collections import Counter
from pathlib import Path

import hypothesis
import pytest
from hypothesis import HealthCheck, settings

# This file starts first, because other files wait for its build.
FIRST = ("test_instruction_sets.py",)


settings.register_profile("default", deadline=None, max_examples=20, derandomize=True)
settings.register_profile("rotate", deadline=None, max_examples=40)
settings.register_profile("all", deadline=None, max_examples=200, derandomize="CI" in os.environ)
# For `pytest tests/core/test_properties.py tests/core/test_surface_*.py --hypothesis-profile=hours`.
settings.register_profile("hours", deadline=None, max_examples=10_000, suppress_health_check=list(HealthCheck))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rotate", action="store_true", help="pick cases and examples by the number of the last commit")
    parser.addoption("--all", action="store_true", help="run every test")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow(reason): not among the default tests")
    config.addinivalue_line("markers", "nightly(reason): runs only with --all")
    config.addinivalue_line("markers", "promise(text): the test holds this promise, see tests/promises.py")
    config.addinivalue_line("markers", "rotate(n, default=n, nightly=1): every n-th case runs")
    level = next((level for level in ("all", "rotate") if config.getoption(f"--{level}")), "default")
    if not config.getoption("--hypothesis-profile"):
        settings.load_profile(level)
    if level == "rotate" and config.getoption("--hypothesis-seed") is None:
        hypothesis.core.global_force_seed = commit_number()


def commit_number() -> int:
    """The number of commits in the history of HEAD; 0 outside of a checkout."""
    count = ["git", "-C", str(Path(__file__).parent), "rev-list", "--count", "HEAD"]
    try:
        return int(subprocess.run(count, capture_output=True, text=True, check=True).stdout)
    except (OSError, subprocess.CalledProcessError):
        return 0


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_all = config.getoption("--all")
    start = commit_number() if is_all or config.getoption("--rotate") else 0
    # Compares the arguments with the testpaths, because pytest-xdist passes the testpaths to its processes.
    is_default = not is_all and not config.getoption("--rotate") and config.args == config.getini("testpaths")

    def step(mark: pytest.Mark) -> int:
        if is_all:
            return mark.kwargs.get("nightly", 1)
        return mark.kwargs.get("default", mark.args[0]) if is_default else mark.args[0]

    seen = Counter[str]()
    chosen, left_out = [], []
    for item in items:
        is_left_out = (item.get_closest_marker("nightly") and not is_all) or (
            item.get_closest_marker("slow") and is_default
        )
        every = max((step(mark) for mark in item.iter_markers("rotate")), default=1)
        if not is_left_out and every > 1:
            test = item.nodeid.partition("[")[0]
            is_whole_file = is_all and any(item.path.name in name for name in config.args)
            is_left_out = seen[test] % every != start % every and not is_whole_file
            seen[test] += 1
        (left_out if is_left_out else chosen).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    items[:] = sorted(chosen, key=lambda item: (*FIRST, item.path.name).index(item.path.name))
