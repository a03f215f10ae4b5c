"""pip uninstall leaves nothing behind, also after use; a start-up file that was forgotten is the one exception."""

import pytest

HOOK = "mlxlm-flash.pth"
USE = "import flashattn_core, mlxlm_flash_patch, flash_evals.cli, mlx_lm.models.qwen2"


@pytest.fixture
def used(environment, wheels):
    """The environment after use, to be emptied by the test; it is filled again afterwards."""
    environment.check("python", "-c", USE)
    yield environment
    (environment.site_packages / HOOK).unlink(missing_ok=True)
    environment.install(wheels)


def test_nothing_is_left(used):
    used.check("flash-eval", "perplexity", "--max-windows", "1")
    assert used.files() > used.without_us
    used.uninstall()
    assert used.files() == used.without_us
    assert [path for folder in (used.home, used.work) for path in folder.rglob("*") if path.is_file()] == []


def test_a_forgotten_start_up_file(used):
    """It stays and does nothing; if it is asked for, it says which file to delete."""
    used.check("mlxlm-flash", "hook", "install")
    used.check("python", "-c", USE, MLXLM_FLASH="1")
    used.uninstall()
    path = used.site_packages / HOOK
    assert used.files() - used.without_us == {str(path.relative_to(used.venv))}
    for flash in ("0", "1", "strict"):
        done = used.run("python", "-c", "import mlx_lm.models.qwen2; print('done')", MLXLM_FLASH=flash)
        assert (done.returncode, done.stdout) == (0, "done\n")
        assert done.stderr.count("\n") == done.stderr.count(f"Delete {path}\n") == (0 if flash == "0" else 1)
