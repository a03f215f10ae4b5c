"""Attention's share of the time: what is timed of the calls that `observe` shows, which tests/patch tests."""

from types import SimpleNamespace

import mlx.core as mx
import pytest
from flash_evals import attention_share, measure
from flash_evals.measure import ARMS
from mlx_lm.models import qwen2
from mlx_lm.models.base import scaled_dot_product_attention


@pytest.mark.parametrize("arm", ARMS)
def test_the_share_is_a_part(loaded, arm):
    share = attention_share.attention_share(arm, lambda: mx.eval(loaded.model(mx.arange(64)[None])))
    assert share is not None
    assert 0 < share < 1
    assert attention_share.attention_share(arm, lambda: None) is None  # without attention


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
    monkeypatch.setattr(attention_share, "mx", SimpleNamespace(eval=evaluate, array=mx.array))
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
