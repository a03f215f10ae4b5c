"""Fixtures of the tests of other programs: each has an environment, and a script, run without flash attention, with
it, and under `mlxlm-flash run`.
"""

import json
from collections import Counter
from pathlib import Path

import mlx.core as mx
import pytest

from tests.programs.environments import SCRIPTS, Environment, kernels_of


class Arms:
    """The results of a script's cases in three processes: stock MLX, enable(), and `mlxlm-flash run` of stock MLX.

    `pytest -s` shows the figures.
    """

    def __init__(self, environment: Environment, script: str, folder: Path) -> None:
        self.folder = folder
        for arm in ("off", "on", "run"):
            (folder / arm).mkdir()
        path = SCRIPTS / f"{script}.py"
        self.off = json.loads(environment.check("python", path, "off", folder / "off").stdout)
        self.on = json.loads(environment.check("python", path, "on", folder / "on").stdout)
        self.run_kernels = kernels_of(environment.check("mlxlm-flash", "run", path, "off", folder / "run"))

    def arrays(self, arm, case):
        return mx.load(str(self.folder / arm / f"{case}.npz"))

    def error(self, case, arm="on"):
        """The largest difference from stock MLX, relative to the largest number of its array."""
        off, on = self.arrays("off", case), self.arrays(arm, case)
        assert off.keys() == on.keys()
        error = max(difference(off[name], on[name]) for name in off)
        print(f"{case}: the results differ by {error:.1e}")
        return error

    def not_finite(self, case, arm):
        """How many numbers are NaN or infinite."""
        return sum((~mx.isfinite(array)).sum().item() for array in self.arrays(arm, case).values())

    def kernels(self, case):
        """How often each kernel ran. No call may have fallen back."""
        assert self.on[case]["fallbacks"] == {}
        return self.on[case]["kernels"]

    def memory(self, case):
        """The peak memory without flash attention and with it, in MB."""
        off, on = (arm[case]["peak"] / 1e6 for arm in (self.off, self.on))
        print(f"{case}: {off:.0f} MB without flash attention, {on:.0f} MB with it")
        return off, on

    def all_kernels(self):
        """How often each kernel ran in all cases."""
        return sum((Counter(case["kernels"]) for case in self.on.values()), Counter())


def difference(off, on):
    assert (off.shape, off.dtype) == (on.shape, on.dtype)
    return (mx.abs(off - on).max() / mx.abs(off).max()).item()


@pytest.fixture(scope="session")
def environment_of(wheel):
    """environment_of(*requirements): an environment with these requirements and this project's wheels."""
    wheels = [wheel("flashattn-core"), wheel("mlxlm-flash-patch")]
    return lambda *requirements, **options: Environment(wheels, *requirements, **options)


@pytest.fixture(scope="session")
def arms_of(environment_of, tmp_path_factory):
    """arms_of(script, *requirements): the results of the script's cases."""
    return lambda script, *requirements, **options: Arms(
        environment_of(*requirements, **options), script, tmp_path_factory.mktemp(script)
    )
