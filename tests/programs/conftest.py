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

    def check(self, case, kernels, tolerance):
        """ "on" must use exactly these kernels, and no fallback. "on" and "run" must give the results of stock MLX."""
        for arm in ("on", "run"):
            assert self.error(case, arm) < tolerance
        assert self.on[case] == {"kernels": kernels, "fallbacks": {}}
        assert self.run_kernels == sum((Counter(each["kernels"]) for each in self.on.values()), Counter())

    def error(self, case, arm):
        """The largest difference from stock MLX in any array, relative to the largest number of that array."""
        off, on = (mx.load(str(self.folder / each / f"{case}.npz")) for each in ("off", arm))
        kinds = [{name: (a.shape, a.dtype) for name, a in arrays.items()} for arrays in (off, on)]
        assert kinds[0] == kinds[1]
        error = np.max([(mx.abs(a - on[name]).max() / mx.abs(a).max()).item() for name, a in off.items()])
        print(f"{case}: the results differ by {error:.1e}")
        return error


@pytest.fixture(scope="session")
def environment_of(wheel):
    """Returns a function that makes an environment with the given requirements and this project's wheels."""
    wheels = [wheel("flashattn-core"), wheel("mlxlm-flash-patch")]
    return lambda *requirements: Environment(wheels, *requirements)


@pytest.fixture(scope="session")
def arms_of(environment_of, tmp_path_factory):
    """Returns a function that runs a script in an environment with the given requirements."""
    return lambda script, *requirements: Arms(environment_of(*requirements), script, tmp_path_factory.mktemp(script))
