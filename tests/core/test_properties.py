"""Cases that nobody thought of: shapes, strides, masks and options drawn by hypothesis, against the reference."""

import mlx.core as mx
import numpy as np
from flashattn_core import flash_attention
from flashattn_core.masks import Causal, KeyRange, SlidingWindow, Tree
from gradient_oracle import Call, assert_obeys_the_rule
from hypothesis import given
from hypothesis import strategies as st
from oracle import DTYPES, assert_matches_reference, to_numpy


@st.composite
def tensors(draw, rng, dtype, batch, heads, length, dim):
    """A tensor of the given shape in any of the layouts that views make."""
    order = draw(st.permutations(range(len(batch) + 3)))
    shape = (*batch, heads, length, dim)
    steps = [draw(st.sampled_from([1, 1, 1, 2, -1])) for _ in shape]
    stored = [shape[axis] * abs(steps[axis]) for axis in order]
    a = mx.array(rng.standard_normal(stored, dtype=np.float32)).astype(DTYPES[dtype])
    a = a.transpose(*np.argsort(order).tolist())
    return a[tuple(slice(None, None, step) for step in steps)]


@st.composite
def masks(draw, rng, dtype, batch, heads, length, key_len):
    parts = []
    bound = st.integers(-3, key_len + 3)
    if draw(st.booleans()):
        parts.append(Causal())
    if draw(st.booleans()):
        parts.append(SlidingWindow(draw(st.integers(1, key_len + 5))))
    if draw(st.booleans()):
        per_batch = draw(st.booleans()) and batch
        bounds = rng.integers(-3, key_len + 4, (2, *batch)).astype(np.int32)
        parts.append(KeyRange(*(mx.array(b) for b in bounds)) if per_batch else KeyRange(draw(bound), draw(bound)))
    if key_len and draw(st.booleans()):
        size = draw(st.integers(1, key_len))
        parts.append(Tree(mx.array(rng.random((*batch[: draw(st.integers(0, 1)) * len(batch)], size, size)) > 0.4)))
    target = (*batch, heads, length, key_len)
    for kind in draw(st.sampled_from([(), (), ("bool",), ("additive",), ("bool", "additive")])):
        ndim = draw(st.integers(0, len(target)))
        shape = tuple(n if draw(st.booleans()) else 1 for n in target[len(target) - ndim :])
        if kind == "bool":
            parts.append(mx.array(rng.random(shape) > 0.3))
        else:
            hidden = rng.random(shape) > 0.8
            parts.append(
                mx.array(np.where(hidden, -np.inf, rng.standard_normal(shape)).astype(np.float32)).astype(DTYPES[dtype])
            )
    if len(parts) < 2:
        return parts[0] if parts else None
    mask = Causal() if isinstance(parts[0], mx.array) else parts[0]
    for part in parts[1:] if mask is parts[0] else parts:
        mask = mask & part
    return mask


@st.composite
def cases(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from(["float32", "float16", "bfloat16"]))
    batch = draw(st.sampled_from([(), (1,), (2,), (3,), (2, 2)]))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 7]))
    length, key_len = draw(st.integers(1, 140)), draw(st.integers(0, 140))
    dim, value_dim = draw(st.integers(1, 80)), draw(st.integers(1, 80))
    query = draw(tensors(rng, dtype, batch, kv_heads * group, length, dim))
    key = draw(tensors(rng, dtype, batch, kv_heads, key_len, dim))
    value = draw(tensors(rng, dtype, batch, kv_heads, key_len, value_dim))
    options = {"mask": draw(masks(rng, dtype, batch, kv_heads * group, length, key_len))}
    if draw(st.booleans()):
        options["scale"] = draw(st.floats(-2, 2, width=32))
    if draw(st.booleans()):
        options["softcap"] = draw(st.floats(0.125, 100, width=32))
    if draw(st.booleans()):
        options["sinks"] = mx.array(rng.standard_normal(kv_heads * group) * 3).astype(DTYPES[dtype])
    if draw(st.booleans()):
        options["alibi_slopes"] = mx.array(rng.random(kv_heads * group), mx.float32)
    return query, key, value, options


@given(cases())
def test_agrees_with_the_reference(case):
    query, key, value, options = case
    assert_matches_reference(query, key, value, **options)


@given(cases(), st.data())
def test_gradients_agree_with_the_reference(case, data):
    query, key, value, options = case
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    *batch, heads, length, _ = query.shape
    dtype = {dtype: name for name, dtype in DTYPES.items()}[query.dtype]
    dout = data.draw(tensors(rng, dtype, tuple(batch), heads, length, value.shape[-1]))
    dlse = mx.array(rng.standard_normal((*batch, heads, length), dtype=np.float32))
    assert_obeys_the_rule(Call(query, key, value, dout, data.draw(st.sampled_from([None, dlse])), **options))


@given(st.integers(0, 2**32 - 1), st.integers(1, 70), st.integers(1, 140), st.floats(1, 1000))
def test_large_scores(seed, length, key_len, size):
    """Scores up to +-1000: weights of one or few keys, and no overflow."""
    rng = np.random.default_rng(seed)
    scores = rng.uniform(-size, size, (1, 1, length, key_len)).astype(np.float32)
    query, key = mx.zeros((1, 1, length, 4)), mx.zeros((1, 1, key_len, 4))
    value = mx.array(rng.standard_normal((1, 1, key_len, 8), dtype=np.float32))
    assert_matches_reference(query, key, value, mask=mx.array(scores))


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 300), st.integers(1, 299))
def test_parts_merge_by_their_lse(seed, length, key_len, cut):
    """Attention over all keys is the lse-weighted sum of attention over two parts: what lse is for."""
    rng = np.random.default_rng(seed)
    query, key, value = (
        mx.array(rng.standard_normal((1, 2, n, 16), dtype=np.float32)) for n in (length, key_len, key_len)
    )
    cut = min(cut, key_len)
    whole, whole_lse = flash_attention(query, key, value, return_lse=True)
    parts = [flash_attention(query, key, value, mask=r, return_lse=True) for r in (KeyRange(0, cut), KeyRange(cut))]
    lse = mx.logaddexp(parts[0][1], parts[1][1])
    merged = sum(out * mx.exp(part_lse - lse)[..., None] for out, part_lse in parts)
    np.testing.assert_allclose(to_numpy(lse), to_numpy(whole_lse), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(to_numpy(merged), to_numpy(whole), rtol=1e-4, atol=1e-5)
