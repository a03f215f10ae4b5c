"""mx.export_function writes attention to a file. MLX alone can run the file, and gets the same results."""

import sys

import mlx.core as mx
import pytest
from flashattn_core import flash_attention, quantized_flash_attention, reset_stats, stats
from flashattn_core.masks import Causal, KeyRange, SlidingWindow, Tree

from tests.core.oracle import DTYPES, draw
from tests.core.programs import run
from tests.promises import promise

ALONE = """
import sys
import mlx.core as mx

function, inputs, result = sys.argv[1:]
given = mx.load(inputs)
outputs = mx.import_function(function)(*[given[str(i)] for i in range(len(given))])
mx.save_safetensors(result, {str(i): a for i, a in enumerate(outputs)})
assert "flashattn_core" not in sys.modules
"""


def imported(folder, *inputs):
    """Returns the exported function's results in a process that imports MLX alone.

    The arrays are saved as safetensors, because MLX's threads read .npz files through a Python file object. They abort
    a program that ends before they have released this object.
    """
    files = folder / "f.mlxfn", folder / "inputs.safetensors", folder / "result.safetensors"
    mx.save_safetensors(str(files[1]), {str(i): a for i, a in enumerate(inputs)})
    run(sys.executable, "-c", ALONE, *files)
    result = mx.load(str(files[2]))
    return [result[str(i)] for i in range(len(result))]


def assert_agree(got, expected, tolerance=1e-5):
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        assert mx.allclose(a, b, rtol=tolerance, atol=tolerance)


@promise("exported functions give the same results without this package")
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_read_without_this_package(rng, dtype, tmp_path):
    """The call has every mask and option that fits into one call."""
    arrays = draw(rng, batch=(2,), heads=4, kv_heads=2, length=9, key_len=12, value_dim=24, dtype=dtype)
    mask = mx.array(rng.random((9, 12)) > 0.3)
    bias = mx.array(rng.standard_normal((4, 1, 12))).astype(DTYPES[dtype])
    numbers = mx.array(rng.random(4))

    def attend(query, key, value, mask, bias, numbers):
        masks = SlidingWindow(7) & KeyRange(mx.array([0, 3])) & Tree.from_parents([-1, 0, 0]) & mask & bias
        sinks = numbers.astype(query.dtype)
        options = {"softcap": 3.0, "sinks": sinks, "alibi_slopes": numbers, "return_lse": True}
        return flash_attention(query, key, value, 0.4, masks, **options)

    mx.export_function(str(tmp_path / "f.mlxfn"), attend, *arrays, mask, bias, numbers)
    reset_stats()
    expected = attend(*arrays, mask, bias, numbers)
    mx.eval(expected)
    assert sum(stats().values()) == 1  # the export has ended, so the kernel runs
    got = imported(tmp_path, *arrays, mask, bias, numbers)
    assert_agree(got, expected, {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[dtype])


@promise("shapeless exported functions work for other shapes")
@pytest.mark.parametrize(
    "mask",
    [
        None,
        "causal",
        SlidingWindow(3),
        KeyRange(1, 6),
        Causal() & Tree.from_parents([-1, 0, 0, 1]),
        Causal() & mx.array(1.0),
    ],
    ids=["none", "causal", "window", "range", "tree", "additive"],
)
def test_shapeless(rng, mask, tmp_path):
    """The exported function must work for other batches, lengths and head_dims, down to one query."""
    attend = lambda q, k, v: flash_attention(q, k, v, mask=mask, alibi_slopes=mx.array([0.5, -0.5]))  # noqa: E731
    path = str(tmp_path / "f.mlxfn")
    mx.export_function(path, attend, *draw(rng, batch=(2,), length=5, key_len=7), shapeless=True)
    function = mx.import_function(path)
    lengths = [(2, 5, 7), (3, 9, 40), (1, 1, 33), (1, 33, 4), (1, 1, 4)]
    for batch, length, key_len in lengths + ([(1, 1, 1), (1, 3, 1), (1, 3, 0)] if mask == "causal" else []):
        arrays = draw(rng, batch=(batch,), length=length, key_len=key_len, dim=7 * length)
        assert_agree(function(*arrays), [attend(*arrays)])


@pytest.mark.parametrize("bits", [None, 8])
def test_shapes_that_it_keeps(rng, bits, tmp_path):
    """Numbers of grouped heads, and the shape of quantised keys. Both calls have as many elements."""

    def arrays(batch, heads):
        shapes = {"batch": (batch,), "heads": heads if bits else 4, "kv_heads": heads, "dim": 64}
        query, *stored = draw(rng, length=3, key_len=5, **shapes)
        return [query, *(part for x in stored for part in (mx.quantize(x, bits=bits) if bits else [x]))]

    def attend(query, *stored):
        if bits:
            return quantized_flash_attention(query, stored[:3], stored[3:])
        return flash_attention(query, *stored)

    path = str(tmp_path / "f.mlxfn")
    mx.export_function(path, attend, *arrays(1, 2), shapeless=True)
    mx.eval(mx.import_function(path)(*arrays(1, 2)))
    with pytest.raises(ValueError, match="Cannot reshape"):
        mx.import_function(path)(*arrays(2, 1))
