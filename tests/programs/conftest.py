"""Fixtures for tests with other programs: their environments, and results of scripts that run there."""

import json
from collections import Counter
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.programs.environments import SCRIPTS, Environment, kernels_of


class Arms:
    """Runs a script's cases in three processes: with stock MLX ("off"), after enable() ("on"), and under
    `mlxlm-flash run` ("run"). check() compares the results. `pytest -s` prints the differences."""

    def __init__(self, environment: Environment, script: str, folder: Path) -> None:
        self.folder = folder
        for arm in ("off", "on", "run"):
            (folder / arm).mkdir()
        path = SCRIPTS / f"{script}.py"
        self.off = json.loads(environment.check("python", path, "off", folder / "off").stdout)
        self.on = json.loads(environment.check("python", path, "on", folder / "on").stdout)
        self.run_kernels = kernels_of(environment.check("mlxlm-flash", "run", path, "off", folder / "run"))

    def check(self, case, kernels, tolerance=1e-5):
        """The run "on" must use exactly these kernels. The results of "on" and "run" must equal those of stock MLX."""
        for arm in ("on", "run"):
            assert self.error(case, arm) < tolerance
        assert self.kernels(case) == kernels
        assert self.run_kernels == sum((Counter(each["kernels"]) for each in self.on.values()), Counter())

    def arrays(self, arm, case):
        return mx.load(str(self.folder / arm / f"{case}.npz"))

    def error(self, case, arm):
        """The largest difference from stock MLX in any array, relative to the largest number of that array."""
        off, on = self.arrays("off", case), self.arrays(arm, case)
        kinds = [{name: (a.shape, a.dtype) for name, a in arrays.items()} for arrays in (off, on)]
        assert kinds[0] == kinds[1]
        error = np.max([(mx.abs(a - on[name]).max() / mx.abs(a).max()).item() for name, a in off.items()])
        print(f"{case}: the results differ by {error:.1e}")
        return error

    def kernels(self, case):
        """How often each kernel ran in "on". No call may have fallen back."""
        assert self.on[case]["fallbacks"] == {}
        return self.on[case]["kernels"]


@pytest.fixture(scope="session")
def environment_of(wheel):
    """Returns a function that makes an environment with the given requirements and this project's wheels."""
    wheels = [wheel("flashattn-core"), wheel("mlxlm-flash-patch")]
    return lambda *requirements: Environment(wheels, *requirements)


@pytest.fixture(scope="session")
def arms_of(environment_of, tmp_path_factory):
    """Returns a function that runs a script in an environment with the given requirements."""
    return lambda script, *requirements: Arms(environment_of(*requirements), script, tmp_path_factory.mktemp(script))
