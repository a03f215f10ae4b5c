"""Attention's share of the time: which calls are seen, by which arm, and what is timed of them."""

import importlib
import signal
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import mlx.core as mx
import pytest
from flash_evals import attention_share, measure
from flash_evals.attention_share import Stopwatch, watching
from flash_evals.measure import ARMS
from mlx_lm.models import qwen2
from mlx_lm.models.base import scaled_dot_product_attention
from mlxlm_flash_patch.direct import StandIn
from mlxlm_flash_patch.places import places
from mlxlm_flash_patch.registry import is_mlx_lm
from model_configs import config, prepared


@pytest.fixture(autouse=True)
def restored():
    """mlx-lm is as it was after each test."""
    yield
    assert all(place.is_original(place.held) for place in places() if is_mlx_lm(place.module))


def small(model_type):
    """The forward pass of a random model of two layers."""
    module = importlib.import_module(f"mlx_lm.models.{model_type}")
    model = prepared(module.Model(module.ModelArgs.from_dict(config(model_type))))
    return lambda: mx.eval(model(mx.arange(12)[None]))


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize(
    ("model_type", "calls"),
    [
        ("qwen2", 2),  # through the function that models share
        ("plamo2", 1),  # through MLX's own, and one layer has none
        ("gear", 2),  # written out, in a function
        ("phi3small", 2),  # one layer of each
        ("gemma2", 0),  # written out in one with the projections
    ],
)
def test_calls_that_are_seen(model_type, calls, arm):
    work, watch = small(model_type), Stopwatch()
    with measure.arm(arm), watching(watch):
        work()
    assert watch.calls == calls
    assert (watch.seconds > 0) is (calls > 0)


@pytest.mark.parametrize("arm", ARMS)
def test_the_share_is_a_part(loaded, arm):
    share = attention_share.attention_share(arm, lambda: mx.eval(loaded.model(mx.arange(64)[None])))
    assert share is not None
    assert 0 < share < 1
    assert attention_share.attention_share(arm, lambda: None) is None  # without attention


def test_an_interrupt_leaves_nothing_behind():
    with pytest.raises(KeyboardInterrupt):
        attention_share.attention_share("on", partial(signal.raise_signal, signal.SIGINT))
    assert qwen2.scaled_dot_product_attention is scaled_dot_product_attention


def test_watching_changes_nothing(loaded):
    """The results are the same, and flash runs as often."""
    tokens, did = mx.arange(64)[None], measure.Flash()

    def work(watch):
        with watch:
            logits = loaded.model(tokens)
            mx.eval(logits)
        return logits

    plain, watched = (
        measure.run("on", partial(work, watch), did)[0] for watch in (nullcontext(), watching(Stopwatch()))
    )
    assert mx.array_equal(watched, plain)
    assert did == measure.Flash({"cpu_prefill": 4})


def test_what_goes_in_is_waited_for_before_and_what_comes_out_after(monkeypatch):
    """By a clock that goes while attention is at work, and while the rest is."""
    now, evaluated = [0.0], []

    def go(seconds):
        now[0] += seconds

    def evaluate(*arrays):
        evaluated.append(arrays)
        go(1 if len(arrays) == 1 and isinstance(arrays[0], tuple) else 10)

    def attention(*arguments, **others):
        go(5)
        return scaled_dot_product_attention(*arguments, **others)

    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(attention_share, "mx", StandIn(mx, eval=evaluate))
    monkeypatch.setattr(attention_share, "time", clock)
    monkeypatch.setattr(measure, "time", clock)
    monkeypatch.setattr(qwen2, "scaled_dot_product_attention", attention)
    q, k, v = (mx.zeros((1, 2, 3, 8)) for _ in range(3))
    mask = mx.zeros((3, 3))

    def work():
        go(14)
        qwen2.scaled_dot_product_attention(q, k, v, None, 1.0, mask)

    share = attention_share.attention_share("off", work)
    [inputs], [output] = evaluated
    assert all(any(each is array for each in inputs) for array in (q, k, v))
    assert not any(each is mask for each in inputs)  # flash attention never needs most of them
    assert output.shape == q.shape
    assert share == (5 + 10) / (14 + 1 + 5 + 10)
