"""Importing flashattn_core takes under 50 ms more than importing mlx, and loads only nanobind's backend besides mlx."""

import json
import re
import tomllib

from tests.core.programs import python
from tests.packaging.build_wheels import ROOT
from tests.promises import promise

LIMIT = 0.05  # seconds of processor time, which other programs do not affect
CODE = """
import json, sys, time
import mlx.core
before, start = set(sys.modules), time.process_time()
import flashattn_core
seconds = time.process_time() - start
packages = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps([seconds, sorted(packages - sys.stdlib_module_names)]))
"""


def measured():
    return json.loads(python(CODE).stdout)


@promise("importing flashattn_core takes under 50 ms beyond mlx")
def test_under_50_ms():
    assert min(measured()[0] for _ in range(5)) < LIMIT


def test_nothing_else_is_imported():
    """The import loads neither numpy nor mlx-lm, only the declared requirements and the standard library."""
    project = tomllib.loads((ROOT / "packages/flashattn-core/pyproject.toml").read_text())["project"]
    needed = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in project["dependencies"]}
    assert needed == {"mlx", "nanobind_backend"}
    assert {"mlx", *measured()[1]} == {"flashattn_core", *needed}
