"""mlxlm-flash tune chooses a kernel for each kind of call that models make, and prints a line for it."""

import json
from dataclasses import replace

import mlx.core as mx
import pytest
from click.testing import CliRunner
from flashattn_core import NoKernelError
from flashattn_core.decide import Decision
from mlxlm_flash_patch import tune
from mlxlm_flash_patch.cli import cli
from mlxlm_flash_patch.tune import Call

from tests.patch.model_configs import config

SHORT = [
    Call("bfloat16", 4, 2, 64, 1, 90),
    Call("float32", 4, 2, 64, 20, 20, window=9),
    Call("float16", 4, 2, 64, 3, 90, sinks=True),
    Call("bfloat16", 4, 2, 64, 1, 90, bits=4),
    Call("float32", 4, 2, 64, 20, 40, batch_size=2, padded=True),
    Call("float32", 4, 2, 64, 1, 40, batch_size=2, window=9, padded=True),
    Call("float32", 4, 2, 64, 20, 40, softcap=True),
]


def run(*arguments):
    return CliRunner().invoke(cli, ["tune", *arguments], standalone_mode=False)


@pytest.fixture
def gpu(monkeypatch):
    """gpu(decide): pretends that there is a GPU whose kernels decide() chooses. Returns the calls decide() gets."""

    def play(decide):
        asked = []

        def settle(arguments):
            asked.append(tune._call_of(arguments))
            return decide(asked[-1])

        monkeypatch.setattr(tune, "decide", settle)
        monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
        return asked

    return play


# --- The calls -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", SHORT, ids=str)
def test_the_arguments_of_a_call_have_its_sizes(call):
    assert tune._call_of(call.arguments()) == call


def test_calls_have_the_precision_that_the_patch_asks_for():
    assert all(call.arguments().rounds for call in SHORT)


def test_a_window_that_hides_nothing_is_none():
    call = Call("float16", 4, 2, 64, 8, 90, window=90)
    assert tune._call_of(call.arguments()) == replace(call, window=0)


def test_a_cache_of_a_window_holds_no_more_than_it():
    whole = tune.calls(quick=False)
    assert len(set(whole)) == len(whole) > len(tune.calls(quick=True)) > 10
    assert all(call.key_len <= call.window - 1 + call.query_len for call in whole if call.window)


@pytest.mark.parametrize("quick", [False, True], ids=["all", "quick"])
def test_kinds_of_calls(quick):
    wanted = tune.calls(quick)
    assert {call.dtype for call in wanted} == {"bfloat16", "float32"}
    assert {call.bits for call in wanted} == {0, 4, 8}
    assert any(call.query_len == 1 for call in wanted)
    assert any(call.query_len > 1000 for call in wanted)
    for has in ("window", "softcap", "sinks", "padded"):
        assert any(getattr(call, has) for call in wanted), has


# --- What is printed -------------------------------------------------------------------------------------------

PROMPT = Call("bfloat16", 4, 2, 64, 100, 100)
TIMES = {"a_kernel": [0.0002, 0.0003], "mlx": [0.0001, 0.00012], "another": [0.01, 1.5]}
DECISIONS = {
    "MLX's own": (Decision("a_kernel", times=TIMES), "MLX's own attention (MLX 120.0 µs, a_kernel 300.0 µs, another"),
    "a kernel": (
        Decision("a_kernel", times={**TIMES, "mlx": [0.0002, 0.0004]}),
        "a_kernel (a_kernel 300.0 µs, MLX 400.0 µs, another 1,500,000.0 µs)",
    ),
    "no times": (Decision("a_kernel"), "a_kernel"),
    "wrong": (Decision(None, ["a_kernel"], "a_kernel is wrong here"), "a_kernel is wrong here"),
}


@pytest.mark.parametrize(("decision", "says"), DECISIONS.values(), ids=DECISIONS)
def test_a_line_names_what_calls_take_and_the_times(gpu, decision, says):
    gpu(lambda call: decision)
    [line] = tune.lines([PROMPT])
    words, _, taken = line.partition(": ")
    assert words == "bfloat16 4/2x64, 128 x 128, causal, rounded once"
    assert taken.startswith(says)
    assert ("(" in taken) == bool(decision.times)


def test_a_call_without_a_kernel_is_said_and_passed_over(gpu):
    def decide(call):
        if call == PROMPT:
            raise NoKernelError("no kernels for the moon")
        return Decision("a_kernel")

    asked = gpu(decide)
    assert list(tune.lines([PROMPT, SHORT[0]])) == [
        "bfloat16 4/2x64, 128 x 128, causal, rounded once: no kernels for the moon",
        "bfloat16 4/2x64, 1 x 128, rounded once: a_kernel",
    ]
    assert asked == [PROMPT, SHORT[0]]


def test_on_a_cpu_there_is_nothing_to_choose():
    done = run()
    assert done.exception.exit_code == 2
    assert str(done.exception) == "MLX's default device is a CPU, where there is nothing to time"
    with pytest.raises(ValueError, match="nothing to time"):
        list(tune.lines(SHORT))


@pytest.mark.parametrize("option", [[], ["--quick"]], ids=["all", "quick"])
def test_the_command_settles_all_calls(gpu, monkeypatch, option):
    monkeypatch.setattr(tune, "calls", lambda quick: SHORT[: 1 if quick else None])
    asked = gpu(lambda call: Decision("a_kernel"))
    done = run(*option)
    assert done.exception is None
    assert asked == SHORT[: 1 if option else None]
    assert done.output.splitlines()[0] == "bfloat16 4/2x64, 1 x 128, rounded once: a_kernel"
    assert len(done.output.splitlines()) == len(asked)


# --- A model's calls -------------------------------------------------------------------------------------------


@pytest.fixture
def of(tmp_path):
    """of(model_type, **changes): the attention calls of a model with this configuration."""

    def calls(model_type, **changes):
        (tmp_path / "config.json").write_text(json.dumps({**config(model_type), **changes}))
        return tune.calls_of(str(tmp_path))

    return calls


@pytest.fixture
def layers(of):
    """layers(model_type, **changes): the calls that of() returns, with all lengths set to 1."""
    return lambda *about, **changes: {replace(call, query_len=1, key_len=1) for call in of(*about, **changes)}


def test_the_shapes_of_a_model(layers):
    assert layers("qwen2") == {Call("bfloat16", 4, 2, 16, 1, 1)}
    assert layers("qwen2", torch_dtype="float16") == {Call("float16", 4, 2, 16, 1, 1)}


def test_layers_of_several_kinds(layers):
    window = config("gpt_oss")["sliding_window"]
    plain = Call("bfloat16", 4, 2, 16, 1, 1, sinks=True)
    assert layers("gpt_oss") == {plain, replace(plain, window=window)}
    assert all(call.softcap for call in layers("gemma2"))


def test_the_lengths_of_a_model(of):
    made = of("gpt_oss")
    assert {(call.query_len, call.key_len) for call in made if not call.window} == set(tune.LENGTHS)
    assert all(call.key_len <= call.window - 1 + call.query_len for call in made if call.window)


def test_a_model_by_its_folder(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "LENGTHS", ((1, 128),))
    asked = gpu(lambda call: Decision("a_kernel"))
    (tmp_path / "config.json").write_text(json.dumps(config("qwen2")))
    assert run("--model", str(tmp_path)).output == "bfloat16 4/2x16, 1 x 128, rounded once: a_kernel\n"
    assert asked == [Call("bfloat16", 4, 2, 16, 1, 128)]


@pytest.mark.parametrize(
    ("configuration", "says"),
    [
        ({"model_type": "no_such"}, "no_such"),
        ({"model_type": "mamba"}, "mlx-lm cannot build a model from "),
        ({}, "model_type"),
    ],
    ids=str,
)
def test_a_model_that_is_none(tmp_path, configuration, says):
    (tmp_path / "config.json").write_text(json.dumps(configuration))
    assert says in str(run("--model", str(tmp_path)).exception)


def test_quick_is_not_of_a_model(tmp_path):
    assert "--quick cannot be combined with --model" in str(run("--quick", "--model", str(tmp_path)).exception)
