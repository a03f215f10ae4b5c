"""mlxlm-flash tune: what it measures, shows and keeps."""

import json
import os
from dataclasses import replace

import mlx.core as mx
import pytest
from click.testing import CliRunner
from flashattn_core import NoKernelError
from flashattn_core.tuned import Call
from mlxlm_flash_patch import tune
from mlxlm_flash_patch.cli import cli
from model_configs import config

SHORT = [
    Call("bfloat16", 4, 2, 64, 1, 90),
    Call("float32", 4, 2, 64, 20, 20, window=9),
    Call("float16", 4, 2, 64, 3, 90, sinks=True),
    Call("bfloat16", 4, 2, 64, 1, 90, bits=4),
    Call("float32", 4, 2, 64, 20, 40, batch_size=2, padded=True),
    Call("float32", 4, 2, 64, 20, 40, softcap=True),
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


def test_quantised_keys_without_mlx_lms_own_attention_on_cuda(monkeypatch):
    """MLX's CUDA build multiplies by them wrong, or not at all."""
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    assert "mlx" not in tune.measure(SHORT[3]).seconds
    assert "mlx" in tune.measure(SHORT[0]).seconds


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


@pytest.mark.parametrize("end", [KeyboardInterrupt, MemoryError])
def test_whatever_ends_it_keeps_what_is_done(tmp_path, monkeypatch, end):
    measure, done = tune.measure, []

    def ended(call):
        if len(done) == 2:
            raise end
        done.append(call)
        return measure(call)

    monkeypatch.setattr(tune, "measure", ended)
    run()
    assert len(json.loads((tmp_path / "tuned.json").read_text())["calls"]) == 2


def test_what_was_measured_before_stays():
    run()
    before = run("--show").output
    after = run("--quick").output
    assert after.splitlines()[1 - len(SHORT) :] == before.splitlines()[1 - len(SHORT) :]


def test_a_table_that_cannot_be_read_is_not_lost(tmp_path):
    (tmp_path / "tuned.json").write_text("half of it")
    assert "delete it" in str(run().exception)
    assert (tmp_path / "tuned.json").read_text() == "half of it"


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_measured(monkeypatch):
    monkeypatch.setenv("FLASHATTN_CACHE", "/dev/null")
    monkeypatch.setattr(tune, "measure", None)
    assert "/dev/null" in str(run().exception)


@pytest.mark.parametrize("error", [NoKernelError("it is wrong here"), RuntimeError("no memory")], ids=str)
def test_a_kernel_that_fails_is_left_out_and_named(monkeypatch, capsys, error):
    def fails():
        raise error

    contestants = tune._contestants
    monkeypatch.setattr(tune, "_contestants", lambda call: [("broken", fails), *contestants(call)])
    assert tune.measure(SHORT[0]).seconds.keys() == {"cpu_prefill", "cpu_decode", "mlx"}
    assert f"{SHORT[0]}: broken is left out: {error}" in capsys.readouterr().err


# --- Of a model -----------------------------------------------------------------------------------------------


def layers(model_type, **changes):
    """Without lengths."""
    made = tune.calls_of({**config(model_type), **changes})
    return {replace(call, query_len=1, key_len=1) for call in made}


def test_the_shapes_of_a_model():
    assert layers("qwen2") == {Call("bfloat16", 4, 2, 16, 1, 1)}
    assert layers("qwen2", torch_dtype="float16") == {Call("float16", 4, 2, 16, 1, 1)}


def test_layers_of_several_kinds():
    window = config("gpt_oss")["sliding_window"]
    plain = Call("bfloat16", 4, 2, 16, 1, 1, sinks=True)
    assert layers("gpt_oss") == {plain, replace(plain, window=window)}
    assert all(call.softcap for call in layers("gemma2"))


def test_a_model_by_its_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config("qwen2")))
    assert "4/2x16, 1 x 128, bfloat16: cpu_decode" in run("--model", str(tmp_path)).output


@pytest.mark.parametrize(
    ("configuration", "says"),
    [
        ({"model_type": "no_such"}, "no_such"),
        ({"model_type": "mamba"}, "mlx-lm makes no model of this configuration"),
        ({}, "model_type"),
    ],
    ids=str,
)
def test_a_model_that_is_none(tmp_path, configuration, says):
    (tmp_path / "config.json").write_text(json.dumps(configuration))
    assert says in str(run("--model", str(tmp_path)).exception)


def test_quick_is_not_of_a_model(tmp_path):
    assert "do not go together" in str(run("--quick", "--model", str(tmp_path)).exception)


def test_a_cache_of_a_window_holds_no_more_than_it():
    whole = CALLS(quick=False)
    assert len(set(whole)) == len(whole) > len(CALLS(quick=True)) > 10
    assert all(call.key_len <= call.window - 1 + call.query_len for call in whole if call.window)
