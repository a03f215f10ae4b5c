"""A pytest plugin. Its last line counts executed and cached launches. With --all, it executes every launch again."""

from typing import Any

import pytest

from .program import Program


def pytest_configure(config: pytest.Config) -> None:
    Program.remembers = not config.getoption("--all")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["launches"] = dict(Program.runs)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Adds the numbers of launches that a worker process of pytest-xdist has counted."""
    Program.runs.update(getattr(node, "workeroutput", {}).get("launches", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if Program.runs:
        terminalreporter.write_line(
            f"Metal kernels on the CPU: {Program.runs['executed']} launches were made, {Program.runs['remembered']} "
            "are known from an earlier run of the same program on the same inputs"
        )
