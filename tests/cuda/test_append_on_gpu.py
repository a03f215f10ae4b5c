"""On a GPU, the patch's quantised caches hold the bytes that mlx-lm's own code writes, and models the same tokens."""

import mlx.core as mx
import mlxlm_flash_patch as flash
import pytest
from flashattn_core import _ext, storage
from mlx_lm.generate import generate_step
from mlx_lm.models import base
from mlx_lm.models.cache import QuantizedKVCache

from tests.core.test_quantised import GROUP_SIZES, normal
from tests.cuda.test_append import LAYOUTS, each_bits, special
from tests.memory import peak_beyond
from tests.patch.model_configs import config, random_model

pytestmark = pytest.mark.usefixtures("requires_gpu")


@pytest.fixture(autouse=True)
def appended(monkeypatch):
    """Counts the calls that the kernel computes."""
    calls = []

    def append(*arguments):
        read = original(*arguments)
        calls.append(read is not None)
        return read

    original = storage.append
    monkeypatch.setattr(storage, "append", append)
    return calls


def arrays(cache):
    return [*cache.keys, *cache.values]


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert mx.array_equal(mx.flatten(one).view(mx.uint8), mx.flatten(other).view(mx.uint8))


def prefilled(rng, dtype, group_size, bits, length=230, shape=(2, 3)):
    """Two caches with the same rows. shape: of sequences and heads."""
    rows = normal(rng, *shape, length, 256, dtype=dtype)
    caches = [QuantizedKVCache(group_size, bits) for _ in range(2)]
    mx.eval([cache.update_and_fetch(rows, rows) for cache in caches])
    return caches


@pytest.mark.parametrize("shape", [(2, 3), (1, 1)], ids=str)
@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@each_bits
def test_same_bytes(rng, appended, bits, dtype, group_size, is_held, shape):
    """The last step fills the cache. is_held: somebody has an array with the same memory, whose content must stay."""
    ours, own = prefilled(rng, dtype, group_size, bits, shape=shape)
    for i, length in enumerate((1, 1, 16, 2, 5, 1)):
        keys = mx.array(special(rng, *shape, length, 256, group_size=group_size)).astype(dtype)
        keys = list(LAYOUTS.values())[i % len(LAYOUTS)](keys)
        values = normal(rng, *shape, length, 256, dtype=dtype)
        held = [x[..., 7:40, :] for x in arrays(ours)[:: 1 + i % 2]] if is_held else []
        mx.eval(copies := [mx.contiguous(x + 0) for x in held])
        with flash.enabled():
            found = ours.update_and_fetch(keys, values)
        expected = own.update_and_fetch(keys, values)
        assert_same((x for rows in found for x in rows), (x for rows in expected for x in rows))
        assert_same(arrays(ours), arrays(own))
        assert_same(held, copies)
    assert appended == [True] * 6


@pytest.mark.parametrize(("queries", "length"), [(1, 1), (20, 5)])
@each_bits
def test_several_steps_in_one_evaluation(rng, appended, bits, queries, length):
    """Attention reads the cache's arrays, of which it ignores the unused rows. Nobody evaluates the rows returned."""
    ours, own = prefilled(rng, mx.bfloat16, 64, bits)
    for cache in (ours, own):
        cache.keys[1][..., 230:, :] = cache.values[1][..., 230:, :] = mx.nan
    pairs = []
    for _ in range(3):
        query, rows = (normal(rng, 2, *x, 256, dtype=mx.bfloat16) for x in ((6, queries), (3, length)))
        own_read = own.update_and_fetch(rows, rows + 1)
        with flash.enabled():
            read = ours.update_and_fetch(rows, rows + 1)
            pairs += [[base.scaled_dot_product_attention(query, *x, own, 0.1, "causal") for x in (read, own_read)]]
    assert mx.all(mx.stack([mx.array_equal(*pair) for pair in pairs]))
    assert all(_ext.is_unevaluated(x) for x in (*read[0], *read[1]))
    assert_same((x for rows in read for x in rows), (x for rows in own_read for x in rows))
    assert_same(arrays(ours), arrays(own))
    assert appended == [True] * 3


@pytest.mark.parametrize("attends", [False, True])
def test_writes_in_place(rng, appended, attends):
    ours, _ = prefilled(rng, mx.bfloat16, 64, 8, length=4000)
    rows = normal(rng, 2, 3, 1, 256, dtype=mx.bfloat16)

    def step():
        read = ours.update_and_fetch(rows, rows)
        return base.scaled_dot_product_attention(rows, *read, ours, 0.1, None) if attends else read

    with flash.enabled():
        mx.eval(step())
        assert peak_beyond(step) < ours.keys[0].nbytes / 2
    assert appended == [True, True]


def test_traced_rows_are_left_to_mlx(rng, appended):
    ours, own = prefilled(rng, mx.float16, 64, 8)
    rows = normal(rng, 2, 3, 1, 256, dtype=mx.float16)

    def loss(rows):
        ours.update_and_fetch(rows, rows)
        return mx.sum(rows)

    with flash.enabled():
        mx.eval(mx.grad(loss)(rows))
    own.update_and_fetch(rows, rows)
    assert appended == [False]
    assert_same(arrays(ours), arrays(own))


@each_bits
def test_same_tokens(appended, bits):
    model = random_model("qwen2", {**config("qwen2"), "hidden_size": 512}, mx.bfloat16)
    prompt = mx.random.randint(0, 97, (300,), key=mx.random.key(0))
    options = {"max_tokens": 60, "kv_bits": bits, "kv_group_size": 32, "quantized_kv_start": 0}

    def tokens():
        return [int(token) for token, _ in generate_step(prompt, model, **options)]

    with flash.enabled():
        found = tokens()
        assert sum(appended) > 50
        storage.append = lambda *_: None  # the fixture restores it
        assert found == tokens()
