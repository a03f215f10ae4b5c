"""Importing flashattn_core loads only nanobind's backend besides mlx, so it takes little longer."""

import json
import re
import tomllib

from tests.core.programs import python
from tests.packaging.build_wheels import ROOT
from tests.promises import promise

CODE = """
import json, sys
import mlx.core
before = set(sys.modules)
import flashattn_core
packages = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps(sorted(packages - sys.stdlib_module_names)))
"""


@promise("importing flashattn_core loads only mlx and nanobind's backend")
def test_nothing_else_is_imported():
    """The import loads neither numpy nor mlx-lm, only the declared requirements and the standard library."""
    project = tomllib.loads((ROOT / "packages/flashattn-core/pyproject.toml").read_text())["project"]
    needed = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in project["dependencies"]}
    assert needed == {"mlx", "nanobind_backend"}
    assert {"mlx", *json.loads(python(CODE).stdout)} == {"flashattn_core", *needed}
