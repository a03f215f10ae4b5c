"""Where the kernel appends rows to quantised caches, these hold the same bytes as with mlx-lm's own code.

A GPU is not needed: MLX's operations stand in for the kernel.
"""

import mlx.core as mx
import mlxlm_flash_patch as flash
import pytest
from flashattn_core import storage
from mlx_lm.models.cache import QuantizedKVCache
from mlxlm_flash_patch.caches import BatchQuantizedKVCache

KV = {"group_size": 32, "bits": 4}
LENGTHS = (250, 1, 3, 1, 1, 1, 40, 1)  # the first five steps fill the 256 rows, so mlx-lm adds rows in the sixth


@pytest.fixture
def appended(monkeypatch):
    """Replaces the kernel. Returns the list of the numbers of rows that its stand-in has appended."""
    lengths = []

    def append(keys, values, new, offset, group_size, bits):
        end = offset + new[0].shape[2]
        if end - offset > 16 or end > keys[0].shape[2]:
            return None
        lengths.append(end - offset)
        for arrays, rows in zip((keys, values), new, strict=True):
            for array, one in zip(arrays, mx.quantize(rows, group_size=group_size, bits=bits), strict=True):
                array[..., offset:end, :] = one
        return tuple(tuple(x[..., :end, :] for x in arrays) for arrays in (keys, values))

    monkeypatch.setattr(storage, "append", append)
    return lengths


def rows(length, dim, batch=1):
    return mx.random.normal((batch, 2, length, dim), dtype=mx.bfloat16)


def assert_same(one, other):
    assert all(mx.array_equal(x, y) for pair in zip(one, other, strict=True) for x, y in zip(*pair, strict=True))


@pytest.mark.parametrize("kind", [tuple, list])
def test_mlx_lms_cache(appended, kind):
    ours, own = QuantizedKVCache(**KV), QuantizedKVCache(**KV)
    update = QuantizedKVCache.update_and_fetch
    for length in LENGTHS:
        new = rows(length, 64), rows(length, 32)
        with flash.enabled():
            found = ours.update_and_fetch(*new)
        assert_same(found, update(own, *new))
        assert_same((ours.keys, ours.values), (own.keys, own.values))
        assert ours.offset == own.offset
        ours.keys, ours.values = kind(ours.keys), kind(ours.values)
    assert appended == [1, 3, 1, 1, 1]
    assert isinstance(ours.keys, kind)


def test_another_librarys_subclass_returns_what_it_wants(appended):
    class Last(QuantizedKVCache):
        def keys_and_values(self):
            return "the last rows"

    cache = Last(**KV)
    with flash.enabled():
        assert [cache.update_and_fetch(rows(1, 32), rows(1, 32)) for _ in range(2)] == ["the last rows"] * 2
    assert appended == [1]


def test_only_while_the_patch_is_on(appended):
    cache = QuantizedKVCache(**KV)
    with flash.enabled():
        patched = QuantizedKVCache.update_and_fetch
    for update in (patched, QuantizedKVCache.update_and_fetch):
        for _ in range(2):
            update(cache, rows(1, 32), rows(1, 32))
    assert appended == []
    assert patched is not QuantizedKVCache.update_and_fetch


def test_batch(appended):
    ours, own = (BatchQuantizedKVCache([0, 3], **KV) for _ in range(2))
    for length in LENGTHS:
        new = rows(length, 64, 2), rows(length, 32, 2)
        with flash.enabled():
            found = ours.update_and_fetch(*new)
        assert_same(found, own.update_and_fetch(*new))
        assert_same((ours.keys, ours.values), (own.keys, own.values))
        assert ours.offset.tolist() == own.offset.tolist()
        assert ours._idx == own._idx
    assert appended == [1, 3, 1, 1, 1]


def test_the_cpu_has_no_kernel():
    with mx.stream(mx.cpu):
        stored = mx.quantize(rows(8, 32), **KV)
        before = [mx.array(x) for x in stored]
        assert storage.append(stored, stored, (rows(1, 32), rows(1, 32)), 3, 32, 4) is None
    assert all(map(mx.array_equal, stored, before))
