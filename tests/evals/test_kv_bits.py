"""`flash-eval speed` and `flash-eval perplexity` measure with quantised KV caches, in both arms."""

import re
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest
from flash_evals.results.speed_result import Case
from flash_evals.work import generation, models
from mlx.utils import tree_flatten

KV = ("--kv-bits", 8, "--kv-group-size", 32)


@pytest.fixture
def wide(make_model):
    """A model whose heads have 32 elements, so that a group of 32 fits."""
    return make_model(hidden_size=128, head_dim=32)


def test_speed(run_command, wide):
    result = run_command("speed", "--model", wide, "-p", 16, "-g", 4, "-d", "0,40", "-b", "1,3", "-r", 1, *KV)
    assert [test["test"] for test in result["results"]][-1] == "tg4 x3 @ d40"
    settings = result["settings"]
    assert (settings["kv_bits"], settings["kv_group_size"], settings["quantized_kv_start"]) == (8, 32, 0)
    assert " · KV caches of 8 bits · " in result["page"].splitlines()[0]
    assert result["flash"]["fallbacks"] == {}


def test_an_arm_that_cannot_run(run_command, refused, report, wide, text_file, monkeypatch):
    """On CUDA mlx-lm's own attention over quantised caches raises. The other arm is measured nevertheless."""
    error = RuntimeError("[quantized_matmul] No implementation for problem shape")
    monkeypatch.setattr(mx, "quantized_matmul", Mock(side_effect=error))
    result = run_command("speed", "--model", wide, "-p", 16, "-g", 4, "-d", 20, "-r", 2, *KV)
    for test in result["results"]:
        assert test["failed"] == {"off": str(error)}
        assert (test["off"], test["ratio"], [trial["off"] for trial in test["trials"]]) == (None, None, [None] * 2)
        assert test["on"]["tokens_per_s"] > 0
        assert test["on"]["attention_share"] > 0
    assert result["flash"]["calls"]["cpu_decode"] > 0
    line = result["page"].splitlines()[-3]
    assert line.startswith(f"tg4 @ d20    {error}   ")
    page = report({name: part for name, part in result.items() if name != "page"})
    assert str(error) in page.text
    monkeypatch.setattr(generation, "run", Mock(side_effect=error))
    line = refused("speed", "--model", wide, "-p", 16, "-g", 0, "-d", 0, *KV)
    assert line == f"Error: pp16 fails with the patch off: {error}; and with the patch on: {error}"
    line = refused("perplexity", "--model", wide, "--dataset", text_file, "--context", 24, *KV)
    assert line == f"Error: a batch fails with the patch off (--arm on runs the patch alone): {error}"


def test_perplexity(run_command, wide):
    """Quantised caches change the perplexity, in both arms alike."""
    options = ("perplexity", "--model", wide, "--max-windows", 8)
    plain = run_command(*options)
    costs = []
    for bits in (8, 4):
        result = run_command(*options, "--kv-bits", bits, "--kv-group-size", 32)
        assert f", KV cache of {bits} bits · " in result["page"]
        assert result["settings"]["kv_bits"] == bits
        assert result["off"]["ppl"] == pytest.approx(result["on"]["ppl"], rel=1e-4)
        assert result["flash"]["fallbacks"] == {}
        costs.append(abs(np.log(result["on"]["ppl"] / plain["on"]["ppl"])))
    assert 0 < costs[0] < costs[1] < 0.1


@pytest.mark.parametrize("kv", [{}, {"kv_bits": 8, "kv_group_size": 32}], ids=["plain", "quantised"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_trial_has_a_cache_of_its_own(wide, batch_size, kv):
    """A trial appends to a copy of the filled cache, so the next trial finds the cache unchanged. The copy's buffers
    are allocated before the trial, because otherwise the trial's time and memory would include copying the cache.
    """
    loaded = models.load(str(wide))
    cache = generation.filled_cache(loaded, np.arange(10), **kv)
    arrays = [array for _, array in tree_flatten([(layer.keys, layer.values) for layer in cache])]
    before = [np.array(array[..., :11, :]) for array in arrays]
    mx.synchronize()
    active = mx.get_active_memory()
    test, tokens = Case("generation", 4, 10, batch_size), np.ones((batch_size, 1), int)
    work = generation.prepared([loaded], None, test, tokens, [cache])
    assert mx.get_active_memory() - active >= batch_size * sum(array.nbytes for array in before) * 10 / 11
    work()
    assert [layer.offset for layer in cache] == [10, 10]
    for a, b in zip(before, arrays, strict=True):
        np.testing.assert_array_equal(a, np.array(b[..., :11, :]))


def test_caches_that_cannot_be_quantised(run_command, model_folder):
    """A warning names the layers. Here heads have fewer elements than a group."""
    with pytest.warns(UserWarning, match=re.escape("kv_bits=8: some caches stay as they are: layers 0-1 ([quantize]")):
        run_command("perplexity", "--model", model_folder, "--max-windows", 1, "--kv-bits", 8)
