"""mlxlm-flash tune measures kernels beside MLX's own attention, and writes what they cost. Here it times a CPU."""

import json
import os
from functools import partial
from types import SimpleNamespace

import mlx.core as mx
import pytest
from click.testing import CliRunner
from flashattn_core import _ext
from mlx.utils import tree_flatten
from mlxlm_flash_patch import coverage, tune
from mlxlm_flash_patch.cli import cli
from mlxlm_flash_patch.tune import Measured

from tests.patch.model_configs import config
from tests.promises import promise

SIZES = {"heads": 4, "kv_heads": 2, "query_len": 9, "key_len": 9}
PROMPT = _ext.Call(mx.float32, 16, **SIZES, given={"causal": None}, rounds=True)
STEP = PROMPT.with_lengths(1, 9)
A100 = _ext.Device("cuda", 80)


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """Pretends that MLX's default device is an A100."""
    monkeypatch.setenv("FLASHATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx, "device_info", lambda device: {"device_name": "An A100"})
    stand_ins = {"device_of": lambda device: A100, "costs_file": lambda device: str(tmp_path / "costs" / "a100.def")}
    monkeypatch.setattr(tune, "_ext", SimpleNamespace(**vars(_ext) | stand_ins))
    return tmp_path


def run():
    return CliRunner().invoke(cli, ["tune"], standalone_mode=False)


def test_on_a_cpu_there_is_nothing_to_time():
    done = run()
    assert done.exception.exit_code == 2
    assert str(done.exception) == "MLX's default device is a CPU, where there is nothing to time"


def test_each_call_is_one_that_mlx_fuses_on_some_gpu():
    devices = [A100, _ext.Device("metal")]
    choices = {call: [_ext.choose(call, device) for device in devices] for call in tune.CALLS}
    assert all(any(choice.mlx for choice in each) for each in choices.values())
    kernels = {choice.variant.kernel.name for each in choices.values() for choice in each}
    assert kernels >= {"cuda_prefill", "cuda_decode", "metal_decode_fast", "metal_decode_parallel", "metal_prefill_tg"}


def test_both_compute_the_same(monkeypatch):
    for is_traced in (False, True):
        call = _ext.Call(mx.float32, 16, **SIZES, given={"causal": None}, is_traced=is_traced)
        monkeypatch.setattr(mx, "default_device", lambda: mx.cpu)
        ours, mlx = (tune._calls(call, attend)(1) for attend in (tune._ours, tune._mlx))
        for (_, one), (_, other) in zip(tree_flatten(ours), tree_flatten(mlx), strict=True):
            assert mx.allclose(one, other, atol=1e-5)


@promise("mlxlm-flash tune takes a kernel's highest cost")
def test_a_kernel_costs_what_its_slowest_call_does(gpu):
    found = (("cuda_prefill", 0.75), ("cuda_prefill", 0.5), ("cuda_decode", 1.5))
    text = tune.costs([Measured(kernel, cost, "") for kernel, cost in found])
    assert text == (
        '{Kernel::cuda_prefill, 80, 0.750, "An A100, mlxlm-flash tune"},\n'
        '{Kernel::cuda_decode, 80, 1.500, "An A100, mlxlm-flash tune"},\n'
    )
    tuned = _ext.Device("cuda", 80, costs=text)
    assert _ext.cost_of(_ext.Kernel.cuda_prefill, tuned) == (0.75, "An A100, mlxlm-flash tune")


@promise("mlxlm-flash tune writes a file that the user alone may read")
def test_the_command_prints_each_call_and_writes_the_file(gpu, monkeypatch):
    """On this machine's clock, a call of ours takes one millisecond, and one of MLX's two. MLX fuses no decode step."""
    now = [0.0]

    def passes(attend, count):
        now[0] += count * (0.002 if attend is tune._mlx else 0.001)
        return mx.array(0)

    def choose(call, device):
        return SimpleNamespace(mlx=None if call == STEP else 1, variant=_ext.Variant(_ext.Kernel.cuda_prefill))

    monkeypatch.setattr(tune, "CALLS", (PROMPT, STEP, PROMPT))
    monkeypatch.setattr(tune, "_calls", lambda call, attend: partial(passes, attend))
    monkeypatch.setattr(tune, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(tune._ext, "choose", choose)
    before = os.umask(0)
    try:
        done = run()
    finally:
        os.umask(before)
    file = gpu / "costs" / "a100.def"
    line = "cuda_prefill, 4/2x16, 9 x 9: 1,000.0 µs, MLX's own 2,000.0 µs, cost 0.50"
    assert done.output.splitlines()[:2] == [line] * 2
    assert done.output.endswith(f"{file.read_text()}written to {file}\n")
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_without_a_cache_folder_it_says_so(gpu, monkeypatch):
    monkeypatch.setattr(tune, "CALLS", ())
    monkeypatch.setattr(tune._ext, "costs_file", lambda device: "")
    assert "there is no cache folder: set FLASHATTN_CACHE or HOME" in str(run().exception)


# --- A model's calls -------------------------------------------------------------------------------------------


@pytest.fixture
def seen(tmp_path):
    """seen(model_type, **changes): the attention calls of a model with this configuration."""

    def calls(model_type, **changes):
        (tmp_path / "config.json").write_text(json.dumps({**config(model_type), **changes}))
        return coverage.attention_of(str(tmp_path))[0]

    return calls


def test_the_shapes_of_a_model(seen):
    found = {(call.dtype, call.heads, call.kv_heads, call.head_dim) for call in seen("qwen2")}
    assert found == {(mx.bfloat16, 4, 2, 16)}
    assert {call.dtype for call in seen("qwen2", torch_dtype="float16")} == {mx.float16}


def test_layers_of_several_kinds(seen):
    window = config("gpt_oss")["sliding_window"]
    assert {(call.window, "sinks" in call.given) for call in seen("gpt_oss")} == {(0, True), (window, True)}
    assert all("softcap" in call.given for call in seen("gemma2"))
    assert {call.window for call in seen("gpt_oss", sliding_window=1000)} == {0, 1000}  # the prompt is longer
