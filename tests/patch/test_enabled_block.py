"""enabled() blocks nest, end after exceptions, and work in several threads."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import mlxlm_flash_patch as flash
import pytest
from mlx_lm.models import base, llama, qwen2
from mlxlm_flash_patch import patch_points

from tests.patch.arms import is_in
from tests.promises import promise


def test_enable_and_disable_within_a_block(original):
    """enable() inside a block outlives the block. disable() ends all blocks."""
    with flash.enabled():
        flash.enable()
    assert is_in()
    with flash.enabled():
        flash.disable()
        assert base.scaled_dot_product_attention is original
    assert not is_in()


def test_an_inner_block_may_be_stricter_but_not_laxer(tiny, tokens):
    with flash.enabled():
        with flash.enabled(strict=True):
            assert flash.status().strict
            with flash.enabled(strict=False):
                assert flash.status().strict
            tiny()(tokens()).tolist()
        assert not flash.status().strict


@promise("blocks nest, and end in any order")
def test_blocks_that_end_out_of_order():
    first, second = flash.enabled(), flash.enabled(strict=True)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert is_in()
    assert flash.status().strict
    with pytest.raises(flash.FlashNeverRanError):
        second.__exit__(None, None, None)
    assert not is_in()


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("strict", [False, True])
def test_an_exception_inside(error, strict, original):
    """An exception inside a block reaches the caller, even if the block is strict and no kernel ran."""
    with pytest.raises(error), flash.enabled(strict=strict):
        raise error
    assert qwen2.scaled_dot_product_attention is original


@promise("an interrupt while functions are exchanged restores all of them")
@pytest.mark.parametrize("strict", [False, True])
def test_an_interrupt_while_functions_are_exchanged(strict, monkeypatch, original):
    """If Ctrl-C comes while enabled() replaces functions, MLX and mlx-lm get all their own functions back."""

    def interrupted(instead):
        monkeypatch.undo()
        patch_points._rebind(dict(list(instead.items())[:3]))
        assert base.scaled_dot_product_attention is not original
        raise KeyboardInterrupt

    monkeypatch.setattr(patch_points, "_rebind", interrupted)
    with pytest.raises(KeyboardInterrupt), flash.enabled(strict=strict):
        pytest.fail("the block ran")
    assert not flash.status().enabled
    assert base.scaled_dot_product_attention is qwen2.scaled_dot_product_attention is original


@pytest.fixture
def restless():
    """Makes Python switch between threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@promise("blocks work in several threads")
@pytest.mark.usefixtures("restless")
def test_many_threads(original):
    """If threads' blocks overlap at random, the patch is on while any block is open, and off after the last."""
    start = threading.Barrier(8)

    def work(module):
        start.wait()
        for _ in range(50):
            with flash.enabled():
                assert is_in()
                assert module.scaled_dot_product_attention is not original

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, [qwen2, llama] * 4))
    assert not is_in()
