"""mlxlm-flash tune: what it measures, shows and keeps."""

import json
import os

import mlx.core as mx
import pytest
from click.testing import CliRunner
from flashattn_core.tuned import Call
from mlxlm_flash_patch import tune
from mlxlm_flash_patch.cli import cli

SHORT = [
    Call("bfloat16", 4, 2, 64, 1, 90),
    Call("float32", 4, 2, 64, 20, 20, window=9),
    Call("float16", 4, 2, 64, 3, 90, sinks=True),
    Call("bfloat16", 4, 2, 64, 1, 90, bits=4),
]


CALLS = tune.calls


@pytest.fixture(autouse=True)
def few(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(tune, "calls", lambda quick: SHORT[: 1 if quick else None])
    monkeypatch.setattr(tune, "TRIAL_SECONDS", 1e-4)


def run(*arguments):
    return CliRunner().invoke(cli, ["tune", *arguments], standalone_mode=False, catch_exceptions=True)


@pytest.mark.parametrize("call", SHORT, ids=str)
def test_each_kernel_that_takes_a_call_and_mlx_lms_own_attention(call):
    found = tune.measure(call)
    kernels = {"cpu_prefill", "mlx"} | ({"cpu_decode"} if call.query_len <= 8 else set())
    assert found.seconds.keys() == found.bytes.keys() == kernels
    assert all(0 < seconds < 1 for seconds in found.seconds.values())


def test_mlx_lms_own_attention_is_the_same_function():
    """All contestants compute the same thing."""
    for call in SHORT:
        results = [attend().astype(mx.float32) for _, attend in tune._contestants(call)]
        for result in results[1:]:
            assert mx.allclose(result, results[0], atol=2e-2)


def test_what_is_measured_is_shown_again(tmp_path):
    first = run()
    assert first.exception is None
    assert "4/2x64, 1 x 90, bfloat16: cpu_decode" in first.output
    assert len(json.loads((tmp_path / "tuned.json").read_text())["calls"]) == len(SHORT)
    assert run("--show").output in first.output


def test_quick_measures_less(tmp_path):
    run("--quick")
    assert len(json.loads((tmp_path / "tuned.json").read_text())["calls"]) == 1


def test_nothing_to_show():
    assert "nothing was measured on this device" in str(run("--show").exception)
    assert os.listdir(os.environ["FLASHATTN_CACHE"]) == []


def test_ctrl_c_keeps_what_is_done(tmp_path, monkeypatch):
    measure, done = tune.measure, []

    def interrupted(call):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(call)
        return measure(call)

    monkeypatch.setattr(tune, "measure", interrupted)
    run()
    assert len(json.loads((tmp_path / "tuned.json").read_text())["calls"]) == 2


def test_a_cache_of_a_window_holds_no_more_than_it():
    whole = CALLS(quick=False)
    assert len(set(whole)) == len(whole) > len(CALLS(quick=True)) > 10
    assert all(call.key_len <= call.window - 1 + call.query_len for call in whole if call.window)
