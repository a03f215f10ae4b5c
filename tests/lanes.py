"""Two lanes of tests. The default lane takes minutes. The long lane, `make test-all`, runs every test.

`@pytest.mark.long("reason")` keeps a test, or one case of it, for the long lane.
`@pytest.mark.rotate(n)` runs every n-th of a test's cases in the default lane, other ones after each commit, so that n
commits run them all. The long lane runs all of them; of `rotate(n, long=m)`, which would take it hours, every m-th.
`--all` with the file's name runs all of these, too. A case that is named whole on the command line always runs.
"""

import os
import subprocess
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, settings

WAITING = pytest.StashKey[dict[str, int]]()
# Files that take a minute, or build what others wait for, so that at the end no process waits for the other's.
FIRST = ("test_contract.py", "test_soak.py")


# The default lane draws few cases, the same until the next commit. The long lane draws others in each run.
# `pytest tests/core/test_properties.py tests/core/test_surface_*.py --hypothesis-profile=hours` takes hours.
settings.register_profile("default lane", deadline=None, max_examples=40, derandomize=False)
settings.register_profile("long lane", deadline=None, max_examples=200, derandomize="CI" in os.environ)
settings.register_profile("hours", deadline=None, max_examples=10_000, suppress_health_check=list(HealthCheck))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="the long lane")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long(reason): runs in the long lane alone")
    config.addinivalue_line("markers", "rotate(n, long=1): a lane runs every n-th case, other ones after each commit")
    if not config.getoption("--hypothesis-profile"):
        settings.load_profile("long lane" if config.getoption("--all") else "default lane")
    if not config.getoption("--all") and config.getoption("--hypothesis-seed") is None:
        hypothesis.core.global_force_seed = turn()


def turn() -> int:
    """The number of the last commit; 0 outside of a checkout."""
    count = ["git", "-C", str(Path(__file__).parent), "rev-list", "--count", "HEAD"]
    try:
        return int(subprocess.run(count, capture_output=True, text=True, check=True).stdout)
    except (OSError, subprocess.CalledProcessError):
        return 0


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_long = config.getoption("--all")
    now, seen = turn(), Counter[str]()
    parts: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        marks = item.iter_markers("rotate")
        every = max((mark.kwargs.get("long", 1) if is_long else mark.args[0] for mark in marks), default=1)
        lane = "default"
        if item.get_closest_marker("long") and not is_long:
            lane = "long"
        elif every > 1:
            test = item.nodeid.partition("[")[0]
            lane = "default" if seen[test] % every == now % every else "rotate"
            seen[test] += 1
        named = any("[" in name and item.nodeid.endswith(name.removeprefix("tests/")) for name in config.args)
        named |= is_long and any(name.endswith(item.path.name) for name in config.args)
        parts["default" if named else lane].append(item)
    waiting = {"long": len(parts["long"]), "rotate": len(parts["rotate"])}
    if any(waiting.values()):
        config.stash[WAITING] = waiting
        config.hook.pytest_deselected(items=parts["long"] + parts["rotate"])
        items[:] = sorted(parts["default"], key=lambda item: (*FIRST, item.path.name).index(item.path.name))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A process of pytest-xdist ends: it has collected the tests, and this one reports."""
    node.config.stash[WAITING] = getattr(node, "workeroutput", {}).get("waiting", {})


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["waiting"] = session.config.stash.get(WAITING, {})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if waiting := config.stash.get(WAITING, None):
        lane = "long" if config.getoption("--all") else "default"
        terminalreporter.write_line(
            f"{lane} lane: {waiting['long']} tests wait for the long lane (make test-all), "
            f"{waiting['rotate']} cases for their turn after another commit"
        )
