"""status() returns the state of the patch as data and as text."""

import mlx.core as mx
import mlxlm_flash_patch as flash
import pytest
from mlx_lm.models import qwen2
from mlxlm_flash_patch.patch_points import POINTS


def test_on(tiny, tokens):
    model, q = tiny(), mx.zeros((1, 1, 1, 600))
    with flash.enabled():
        model(tokens()).tolist()
        model(tokens(1, 1)).tolist()
        with pytest.warns(flash.FlashFallbackWarning):
            qwen2.scaled_dot_product_attention(q, q, q, None, 1.0, None)
        flash.patch_model(model)
        now = flash.status()
    assert str(now).splitlines()[:2] == [
        f"flash attention on · functions replaced: {len(POINTS)} · models patched: 1",
        "calls: cpu_decode 2, cpu_prefill 2 · fallbacks: head_dim over 512 1",
    ]


def test_when_counting_begins(tiny, tokens):
    """Counts start again when the patch is switched on, but not in a nested block or at a second enable()."""
    for _ in range(2):
        with flash.enabled():
            tiny()(tokens()).tolist()
        assert flash.status().calls == {"cpu_prefill": 2}
    flash.enable()
    tiny()(tokens()).tolist()
    flash.enable()
    with flash.enabled():
        tiny()(tokens()).tolist()
    assert flash.status().calls == {"cpu_prefill": 4}


@pytest.mark.parametrize("program", ["mlxlm_flash_patch.cli status", "flash_evals.cli demo-model"])
def test_a_full_disk_is_one_line(command, program):
    module, name = program.split()
    code = f"import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1); from {module} import main; main()"
    done = command("python", "-c", code, name, env={"PYTHONUNBUFFERED": ""})
    assert (done.returncode, done.stderr) == (2, "Error: [Errno 28] No space left on device\n")
