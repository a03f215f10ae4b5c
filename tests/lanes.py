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

`pytest file.py::test` runs the test even if it is marked slow or nightly. It leaves out cases with a nightly mark of
their own. `pytest file.py::test[case]` runs that case.
"""

import os
import subprocess
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, settings

LEFT_OUT = pytest.StashKey[dict[str, int]]()
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
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        test = item.nodeid.partition("[")[0]
        every = max((step(mark) for mark in item.iter_markers("rotate")), default=1)
        group = "run"
        nightly = item.get_closest_marker("nightly")
        is_of_case = nightly in getattr(getattr(item, "callspec", None), "marks", [])
        if nightly and not is_all and not is_named(config, item.nodeid, whole=is_of_case):
            group = "nightly"
        elif item.get_closest_marker("slow") and is_default and not is_named(config, item.nodeid):
            group = "slow"
        if group == "run" and every > 1:
            is_whole_file = is_all and any(name.endswith(item.path.name) for name in config.args)
            is_turn = seen[test] % every == start % every
            group = "run" if is_turn or is_whole_file or is_named(config, item.nodeid, whole=True) else "cases"
            seen[test] += 1
        groups[group].append(item)
    left_out = {group: len(groups[group]) for group in ("slow", "nightly", "cases")}
    if any(left_out.values()):
        config.stash[LEFT_OUT] = left_out
        config.hook.pytest_deselected(items=groups["slow"] + groups["nightly"] + groups["cases"])
    items[:] = sorted(groups["run"], key=lambda item: (*FIRST, item.path.name).index(item.path.name))


def is_named(config: pytest.Config, nodeid: str, whole: bool = False) -> bool:
    """Whether an argument of pytest names this case, its test or its class. With `whole`, only the case counts."""
    for argument in config.args:
        file, is_test, test = argument.partition("::")
        if is_test:
            path = os.path.relpath(Path(config.invocation_params.dir, file).resolve(), config.rootpath)
            name = f"{path}::{test}"
            if nodeid == name or ("[" not in test and not whole and nodeid.startswith((f"{name}[", f"{name}::"))):
                return True
    return False


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Gets the counts of left-out tests from a worker of pytest-xdist. Workers collect tests, this process reports."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left out", {})


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left out"] = session.config.stash.get(LEFT_OUT, {})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left_out := config.stash.get(LEFT_OUT, None):
        terminalreporter.write_line(
            f"Not run: {left_out['slow']} slow tests (make parts), {left_out['nightly']} nightly tests (make nightly), "
            f"{left_out['cases']} other cases of tests that ran"
        )
