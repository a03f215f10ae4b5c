"""`mlxlm-flash run --kv-bits` quantises a program's KV caches, and prints what they held."""

import shutil
from pathlib import Path

import mlx_lm
import pytest

from tests.promises import promise

MAKE = """
import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

class Model:
    layers = [0]
    def __call__(self, tokens, cache):
        cache[0].update_and_fetch(*[mx.zeros((1, 2, tokens.shape[1], 128), mx.float16)] * 2)

model = Model()
caches = [make_prompt_cache(model) for _ in range(3)]
for cache in caches:
    model(mx.zeros((1, 1000)), cache)
del caches[1:], cache
print(type(caches[0][0]).__name__)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "make.py"
    path.write_text(MAKE)
    return path


@pytest.mark.parametrize(("bits", "held"), [("8", 1.67), ("4", 0.88)])
def test_what_the_caches_held(command, script, bits, held):
    """The last line has the most that the caches held. Here three held 1,024 tokens, and one is left at the end.

    A token has a key and a value of 128 elements in each of two heads. For 64 elements there are two 16-bit numbers.
    """
    done = command("mlxlm-flash", "run", "--kv-bits", bits, script)
    assert done.stdout == "QuantizedKVCache\n"
    first, *_, last = done.stderr.splitlines()
    assert f", KV caches of {bits} bits: mlx " in first
    assert last == f"[mlxlm-flash] quantised KV caches held at most {held} MB; in 16 bits: 3.15 MB"
    assert held == round(3 * 1024 * 2 * 2 * (128 * int(bits) / 8 + 2 * 2 * 2) / 1e6, 2)


@promise("kv_bits with an untested release of mlx-lm is an error before the program starts")
@pytest.mark.slow("starts programs")
def test_another_release_of_mlx_lm(command, tmp_path):
    """The program does not start."""
    folder = tmp_path / "mlx_lm"
    shutil.copytree(Path(mlx_lm.__file__).parent, folder)
    with (folder / "models" / "cache.py").open("a") as file:
        file.write("# a change\n")
    (tmp_path / "script.py").write_text("print('started')")
    run = ("mlxlm-flash", "run", "--kv-bits", "8", tmp_path / "script.py")
    done = command(*run, env={"PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: [enable] kv_bits expects the caches of mlx-lm 0.32.0 to 0.32.2: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow("starts programs")
def test_without_flash_attention(command, script):
    done = command("mlxlm-flash", "run", "--kv-bits", "8", script, flash="0")
    assert done.stdout == "KVCache\n"
    assert (
        done.stderr.splitlines()[0] == "[mlxlm-flash] flash attention off: MLXLM_FLASH=0, and --kv-bits has no effect"
    )


@pytest.mark.slow("starts programs")
@pytest.mark.parametrize("arguments", [("--kv-bits", "16"), ("--kv-group-size", "48"), ("--quantized-kv-start", "-1")])
def test_bad_options(command, script, arguments):
    done = command("mlxlm-flash", "run", *arguments, script)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"Invalid value for '{arguments[0]}'" in done.stderr
