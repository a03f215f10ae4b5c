"""pip uninstall leaves nothing behind, also after use; a start-up file that was forgotten is the one exception."""

import pytest
from mlxlm_flash_patch import hook
from virtual_environment import Environment


@pytest.mark.long("installs the three wheels")
def test_nothing_is_left(environment):
    environment.check("python", "-c", "import flashattn_core, mlxlm_flash_patch, flash_evals.cli, mlx_lm.models.qwen2")
    environment.check("flash-eval", "perplexity", "--max-windows", "1")
    assert environment.files() > environment.without_us
    environment.uninstall()
    assert environment.files() == environment.without_us
    places = (environment.home, environment.work)
    assert [path for folder in places for path in folder.rglob("*") if path.is_file()] == []


def test_a_forgotten_start_up_file(tmp_path, monkeypatch):
    """Without the packages it does nothing; if it is asked for, it says which file to delete."""
    empty = Environment(tmp_path)
    monkeypatch.setattr(hook, "path", lambda: empty.site_packages / hook.NAME)
    path = hook.install()
    for flash in ("0", "1", "strict"):
        done = empty.run("python", "-c", "print('done')", MLXLM_FLASH=flash)
        assert (done.returncode, done.stdout) == (0, "done\n")
        assert done.stderr.count("\n") == done.stderr.count(f"Delete {path}\n") == (0 if flash == "0" else 1)
