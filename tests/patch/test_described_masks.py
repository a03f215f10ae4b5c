"""The patch describes masks that mlx-lm builds as arrays. A description hides the same keys as the array does."""

import gc

import mlx.core as mx
import mlxlm_flash_patch as flash
import numpy as np
import pytest
from flashattn_core.masks import Mask
from flashattn_core.reference import visible_and_bias
from mlx_lm.models import base
from mlx_lm.models.cache import RotatingKVCache
from mlxlm_flash_patch import described_masks
from mlxlm_flash_patch.described_masks import description_of

from tests.promises import promise

HEADS, HEAD_DIM = 2, 32


def query(length, batch=1):
    return mx.zeros((batch, HEADS, length, HEAD_DIM))


def assert_says_the_same(description, array, batch, length, key_len):
    visible, _ = visible_and_bias((batch, HEADS, length, HEAD_DIM), key_len, description)
    assert np.array_equal(visible, np.broadcast_to(np.asarray(array), visible.shape))


@pytest.mark.rotate(1, default=10)
@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
@pytest.mark.parametrize("padding", ["none", "left", "right", "both"])
@pytest.mark.parametrize(("length", "offset"), [(1, 0), (1, 9), (7, 0), (7, 5), (20, 33)])
def test_create_causal_mask(length, offset, window, padding):
    """Padding may be negative, as in trimmed caches. It may also be longer than the keys."""
    left = mx.array([0, 3, -2, 60]) if padding in ("left", "both") else None
    right = mx.array([2, 0, 1, -1]) if padding in ("right", "both") else None
    with flash.enabled():
        mask = base.create_causal_mask(length, offset, window_size=window, left_padding=left, right_padding=right)
        description = description_of(mask, query(length, 4), offset + length)
    assert isinstance(description, Mask)
    assert_says_the_same(description, mask, 4, length, offset + length)


@pytest.mark.parametrize(("steps", "window"), [(9, 3), (50, 20), (99, 50)])
def test_a_single_query_of_a_rotating_cache(steps, window):
    """Only this test notices a missing description, because kernels give the same logits for the mask array."""
    cache = RotatingKVCache(100)
    cache.update_and_fetch(*(mx.zeros((1, HEADS, steps, HEAD_DIM)),) * 2)
    with flash.enabled():
        mask = cache.make_mask(1, window_size=window)
    description = description_of(mask, query(1), steps + 1)
    assert isinstance(description, Mask)
    assert_says_the_same(description, cache.make_mask(1, window_size=window), 1, 1, steps + 1)


@pytest.mark.parametrize(
    "given", [{"window_size": 0}, {"window_size": 2.5}, {"left_padding": mx.array([1.0])}], ids=str
)
def test_what_descriptions_cannot_say_stays_an_array(given):
    with flash.enabled():
        mask = base.create_causal_mask(4, **given)
    assert mx.array_equal(mask, base.create_causal_mask(4, **given))
    assert description_of(mask, query(4), 4) is mask


def described_mask(length=6, key_len=6):
    return base.create_causal_mask(length, key_len - length)


def knows(mask, length=6, key_len=6, batch=1):
    return isinstance(description_of(mask, query(length, batch), key_len), Mask)


@pytest.fixture
def patched():
    with flash.enabled():
        yield


@pytest.mark.usefixtures("patched")
class TestWhatIsRemembered:
    @promise("a mask's description is used only for its own call")
    def test_for_the_lengths_that_the_mask_was_made_for(self):
        mask = described_mask(6, 9)
        assert knows(mask, 6, 9)
        assert not knows(mask, 6, 10)
        assert not knows(mask, 5, 9)
        assert not knows(mask, 1, 9)

    def test_for_the_batch_of_its_padding(self):
        mask = base.create_causal_mask(6, left_padding=mx.array([1, 2]))
        assert knows(mask, batch=2)
        assert not knows(mask, batch=1)
        assert not knows(mask, batch=3)
        assert knows(described_mask(), batch=3)

    @pytest.mark.parametrize(
        "compute",
        [lambda m: m & m, lambda m: m[::-1], lambda m: mx.where(m, 0.0, -1.0), lambda m: m[None, None], mx.array],
        ids=["and", "slice", "where", "expand", "copy"],
    )
    def test_nothing_of_what_a_model_computes_from_it(self, compute):
        mask = described_mask()
        computed = compute(mask)
        assert knows(mask)
        assert not knows(computed)

    def test_nothing_once_it_is_evaluated(self):
        """A program may write to an evaluated mask through a NumPy view, which changes no id."""
        mask = described_mask()
        mx.eval(mask)
        assert not knows(mask)

    def test_nothing_once_it_is_written_to(self):
        """In-place operators keep the Python object, but free its C++ array. A new array may get the freed address."""
        mask = before = described_mask()
        for _ in range(3):
            mask &= mx.array([True, False, True, True, True, True])
            assert mask is before
            assert not knows(mask)
        mx.eval(mask)
        others = [mx.zeros((6, 6), mx.bool_) for _ in range(1000)]
        assert not any(knows(other) for other in others)
        mask = described_mask()
        mask[0, 0] = False
        assert not knows(mask)

    def test_padding_as_it_was_when_the_mask_was_made(self):
        padding = mx.array([1, 2])
        mask = base.create_causal_mask(6, left_padding=padding)
        padding += 3
        assert_says_the_same(description_of(mask, query(6, 2), 6), mask, 2, 6, 6)

    @pytest.mark.slow("2 seconds")
    def test_no_longer_than_the_array_lives(self):
        gc.collect()
        before = len(described_masks._remembered)
        masks = [base.create_causal_mask(6, offset, left_padding=mx.array([1])) for offset in range(10)]
        assert len(described_masks._remembered) == before + 10
        del masks
        gc.collect()
        assert len(described_masks._remembered) == before
