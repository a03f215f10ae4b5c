"""Importing flashattn_core costs under 50 ms beyond mlx, and brings in nothing else but nanobind's backend."""

import json

LIMIT = 0.05  # seconds of processor time, so that what other programs take does not count
CODE = """
import json, sys, time
import mlx.core
before, start = set(sys.modules), time.process_time()
import flashattn_core
seconds = time.process_time() - start
packages = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps([seconds, sorted(packages - sys.stdlib_module_names)]))
"""


def measured(environment):
    return json.loads(environment.check("python", "-c", CODE))


def test_under_50_ms(environment):
    assert min(measured(environment)[0] for _ in range(5)) < LIMIT


def test_nothing_else_is_imported(environment):
    """Not numpy, not mlx-lm; only that, and what is Python's own."""
    assert measured(environment)[1] == ["flashattn_core", "nanobind_backend"]
