"""Quantised caches store exactly the rows that mlx-lm's own class of cache stores, each quantised once.

Each test does the same to a cache of mlx-lm in 16 bits and to ours. mx.quantize() works row by row, so the quantised
rows of the one are the rows of the other. Only rows that no token has, zeros, have other scales; they are compared
dequantised.
"""

import copy

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_lm
from mlxlm_flash_patch import caches
from mlxlm_flash_patch.caches import quantized
from mlxlm_flash_patch.caches.kv_bits import KVBits
from mlxlm_flash_patch.caches.waiting import quantised

from tests.patch.arms import normal
from tests.promises import promise

STEPS = (9, 1, 1, 5, 1, 300, 1, 1, 1, 7, 1)  # more than 256, the tokens for which mlx-lm allocates memory at a time
PADDING = [0, 4, 7]
SINGLE = {
    "plain": mlx_lm.KVCache,
    "rotating": lambda: mlx_lm.RotatingKVCache(12),
    "rotating, keep": lambda: mlx_lm.RotatingKVCache(12, keep=4),
    "rotating, not full": lambda: mlx_lm.RotatingKVCache(400),
    "chunked": lambda: mlx_lm.ChunkedKVCache(16),
}
BATCH = {
    "plain": lambda padding: mlx_lm.BatchKVCache(padding),
    "rotating": lambda padding: mlx_lm.BatchRotatingKVCache(12, padding),
    "rotating, not full": lambda padding: mlx_lm.BatchRotatingKVCache(400, padding),
}


@pytest.fixture(params=[(8, 64), (4, 32)], ids=["8 bits", "4 bits"])
def kv(request):
    return KVBits(*request.param)


def drawn(seed, batch, length):
    """New keys and values. Their numbers of elements differ."""
    return [normal(10 * seed + i, batch, 2, length, dim, dtype=mx.bfloat16) for i, dim in ((0, 128), (1, 64))]


OURS = {cls.own: cls for cls in (*quantized.CLASSES, *quantized.BATCHES[:2])}


class Pair:
    """A cache of mlx-lm in 16 bits, and ours. Methods act on both, and compare what both hold."""

    def __init__(self, own, ours, kv):
        self.own, self.ours, self.kv, self.seed = own, ours, kv, 0

    @classmethod
    def of(cls, own, kv):
        return cls(own, quantised(copy.deepcopy(own), kv, OURS[type(own)]), kv)

    def rows(self, own, ours):
        """Checks that `ours` are the rows of `own`, (keys, values), quantised."""
        how = {"group_size": self.kv.group_size, "bits": self.kv.bits}
        for array, stored in zip(own, ours, strict=True):
            expected = mx.quantize(array, **how)
            assert mx.array_equal(mx.dequantize(*stored, **how), mx.dequantize(*expected, **how))
            weights = mx.where(mx.abs(array).max(-1, keepdims=True) > 0, stored[0], expected[0])
            assert mx.array_equal(weights, expected[0])

    def same(self):
        scalars = {"keys", "values", "bits", "group_size", "kv"}
        for name in vars(self.own).keys() - scalars:
            one, other = getattr(self.own, name), getattr(self.ours, name)
            assert mx.array_equal(one, other) if isinstance(one, mx.array) else one == other, name
        if self.own.keys is not None:
            self.rows((self.own.keys, self.own.values), (self.ours.keys, self.ours.values))
            self.rows(self.own.keys_and_values(), self.ours.keys_and_values())

    def write(self, *lengths, batch=1):
        for length in lengths:
            self.seed += 1
            new = drawn(self.seed, batch, length)
            self.rows(self.own.update_and_fetch(*new), self.ours.update_and_fetch(*new))
            self.do("maybe_trim_front")
            self.same()

    def do(self, name, *arguments, **options):
        if not hasattr(self.own, name):
            return None
        one, other = (getattr(cache, name)(*arguments, **options) for cache in (self.own, self.ours))
        assert one == other or hasattr(one, "state")
        return Pair(one, other, self.kv)


@promise("a quantised cache holds the rows of mlx-lm's cache, each quantised once")
@pytest.mark.parametrize("make", SINGLE.values(), ids=SINGLE)
def test_written_rows(make, kv):
    pair = Pair.of(make(), kv)
    pair.write(*STEPS)
    assert type(pair.ours).__name__.endswith("KVCache")
    assert type(pair.ours).__name__ in caches.__all__
    assert isinstance(pair.ours, type(pair.own) if type(pair.own) is not mlx_lm.KVCache else mlx_lm.QuantizedKVCache)


@pytest.mark.parametrize("make", SINGLE.values(), ids=SINGLE)
def test_trim(make, kv):
    """Removed tokens make room for others, as in speculative decoding and in the server's prompt cache."""
    pair = Pair.of(make(), kv)
    pair.write(8, 1)
    assert pair.own.is_trimmable() == pair.ours.is_trimmable()
    pair.do("trim", 3)
    pair.write(5, 1, 1)
    pair.do("trim", 100)
    pair.write(2)


@pytest.mark.parametrize("make", BATCH.values(), ids=BATCH)
def test_batches(make, kv):
    pair = Pair.of(make(PADDING), kv)
    pair.write(*STEPS, batch=3)
    pair.do("filter", mx.array([2, 0]))
    pair.same()
    pair.write(1, 6, 1, batch=2)
    pair.do("trim", 1)
    pair.write(1, batch=2)


@promise("batches of quantised caches merge, grow and shrink without rounding again")
@pytest.mark.parametrize("lengths", [(3, 30, 11), (0, 5, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("name", ["plain", "rotating", "rotating, not full"])
def test_merge_extract_and_extend(name, lengths, kv):
    """What the server does with caches: it merges some, adds others to the batch, and extracts each when it ends."""
    pairs = [Pair.of(SINGLE[name](), kv) for _ in lengths]
    for pair, length in zip(pairs, lengths, strict=True):
        pair.write(*[length] * bool(length), *[1] * bool(length))
    own, ours = ([getattr(pair, side) for pair in pairs] for side in ("own", "ours"))
    batch = Pair(own[0].merge(own), ours[0].merge(ours), kv)
    batch.same()
    batch.write(1, 4, 1, batch=3)
    others = Pair(own[1].merge(own[1:]), ours[1].merge(ours[1:]), kv)
    batch.own.extend(others.own)
    batch.ours.extend(others.ours)
    batch.same()
    batch.write(1, 1, batch=5)
    for i in range(5):
        one = batch.do("extract", i)
        one.same()
        one.write(1, 2)


@pytest.mark.parametrize("name", ["plain", "rotating"])
def test_16_bits_until_there_are_enough_tokens(name, kv):
    """A batch has 16 bits until its longest sequence has enough tokens, or until one with quantised rows joins it."""
    long, short = (Pair.of(SINGLE[name](), KVBits(kv.bits, kv.group_size, start=10)) for _ in range(2))
    new = drawn(0, 1, 10)
    long.own.update_and_fetch(*new)
    assert mx.array_equal(long.ours.update_and_fetch(*new)[0], new[0])
    batch = long.ours.merge([copy.deepcopy(long.ours), short.ours])
    for cache in (long.ours, short.ours, batch, batch.extract(0)):
        assert not hasattr(cache, "bits")
        assert getattr(mlx_lm, type(cache).__name__) in type(cache).__mro__  # a file names mlx-lm's class
    long.write(1)
    for joined in (long.ours.merge([short.ours, long.ours]), short.ours.merge([short.ours, long.ours])):
        assert (joined.bits, joined.group_size) == (kv.bits, kv.group_size)
    assert not hasattr(short.ours, "bits")
    batch.extend(joined)
    assert batch.bits == kv.bits
