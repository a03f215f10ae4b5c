"""pip uninstall leaves nothing behind, even after the packages have been used."""

import pytest

from tests.packaging.build_wheels import PACKAGES
from tests.promises import promise


@promise("uninstalling leaves nothing")
@pytest.mark.nightly("installs the three wheels")
def test_nothing_is_left(environment):
    environment.check("python", "-c", "import flashattn_core, mlxlm_flash_patch, flash_evals.cli, mlx_lm.models.qwen2")
    environment.check("flash-eval", "perplexity", "--max-windows", "1")
    assert environment.files() > environment.without_us
    environment.check("pip", "uninstall", "--quiet", "--yes", *PACKAGES)
    assert environment.files() == environment.without_us
    places = (environment.home, environment.work)
    assert [path for folder in places for path in folder.rglob("*") if path.is_file()] == []
