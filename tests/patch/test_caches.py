"""With every cache of mlx-lm, the patch keeps the logits of a model. No kernel gets an L*S mask array."""

import mlx.core as mx
import mlxlm_flash_patch as flash
import pytest
from mlx_lm.models import cache as mlx_caches
from mlxlm_flash_patch import router

from tests.patch.arms import batch_caches, close, logits, off_and_on
from tests.promises import promise

pytestmark = pytest.mark.usefixtures("masks")

STEPS = [9, 1, 1, 6, 1, 1, 1, 1, 1, 1, 1, 10, 1, 1, 1, 1, 1, 1]  # tokens per call
PADDING = [0, 3, 7]
CACHES = {
    "KVCache": mlx_caches.KVCache,
    "ConcatenateKVCache": mlx_caches.ConcatenateKVCache,
    "ChunkedKVCache": lambda: mlx_caches.ChunkedKVCache(13),
    "RotatingKVCache": lambda: mlx_caches.RotatingKVCache(64),
    "RotatingKVCache, wrapped": lambda: mlx_caches.RotatingKVCache(12),
    "RotatingKVCache, wrapped, keep": lambda: mlx_caches.RotatingKVCache(12, keep=4),
}


@pytest.fixture
def masks(monkeypatch):
    """Lists the masks that kernels get. At the end of the test, no mask for more than one query may be an array."""
    seen = []
    own_quick, own_lowered = router.for_quick, router.lowered

    def quick(mask):
        seen.append(mask)
        return own_quick(mask)

    def lowered(queries, keys, values, scale, mask, **options):
        seen.append(mask)
        return own_lowered(queries, keys, values, scale, mask, **options)

    monkeypatch.setattr(router, "for_quick", quick)
    monkeypatch.setattr(router, "lowered", lowered)
    yield seen
    assert not [m for m in seen if isinstance(m, mx.array) and m.ndim > 1 and m.shape[-2] > 1]


def assert_the_same(run, rows=lambda logits: logits):
    """run() gives the same logits with the patch as without, and with the patch all attention is flash attention."""
    off, on = off_and_on(run)
    assert close(rows(on), rows(off))
    long = sum(length > 8 for length in STEPS)
    assert flash.status().calls == {"cpu_prefill": 2 * long, "cpu_decode": 2 * (len(STEPS) - long)}


@promise("each of mlx-lm's caches gives the same logits")
@pytest.mark.rotate(1, default=4)
@pytest.mark.parametrize("batch", [1, 2], ids=lambda n: f"B{n}")
@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
def test_plain(tiny, tokens, cache, batch):
    model, x = tiny(), tokens(batch, sum(STEPS))
    assert_the_same(lambda: logits(model, x, [cache() for _ in model.layers], *STEPS))


@pytest.mark.parametrize(("max_kv_size", "keep"), [(10, 0), (14, 0), (12, 4)])
def test_windows_smaller_than_the_rotating_cache(tiny, tokens, max_kv_size, keep):
    """Here even a single query has a mask. Its window is one range of the cache, or two ranges if it wraps around."""
    model, x = tiny("llama"), tokens(1, sum(STEPS))  # Llama has a window of 8 tokens here
    assert_the_same(
        lambda: logits(model, x, [mlx_caches.RotatingKVCache(max_kv_size, keep) for _ in model.layers], *STEPS)
    )


@promise("padded batches give the same logits")
@pytest.mark.rotate(1, default=4)
@pytest.mark.parametrize("max_size", [None, 64, 12], ids=lambda n: f"max_kv_size {n}")
def test_batches_with_left_padding(architecture, tiny, tokens, masks, max_size):
    """Padding queries see no key, so their logits are not compared."""
    model, x = tiny(architecture), tokens(3, sum(STEPS))
    assert_the_same(
        lambda: logits(model, x, batch_caches(model, PADDING, max_size), *STEPS),
        lambda logits: mx.concatenate([row[padding:] for row, padding in zip(logits, PADDING, strict=True)]),
    )
    assert any(not isinstance(mask, mx.array | str | None) for mask in masks)
