"""New rows of a quantised cache get the bits of mx.quantize() in MLX's build for CUDA, and the other rows stay."""

import mlx.core as mx
import numpy as np
import pytest

from tests import launches
from tests.core.oracle import DTYPES
from tests.core.test_quantised import GROUP_SIZES
from tests.emulators.metal_on_cpu import Undefined
from tests.metal.metal_attention import as_numpy, execute, to_mlx
from tests.metal.planted_faults import Fault, assert_is_noticed

pytestmark = pytest.mark.usefixtures("requires_clang")

BITS = (4, 8)
ARRAYS = [f"{of}_{part}" for of in ("key", "value") for part in ("words", "scales", "biases")]
BATCH, HEADS, CAPACITY = 2, 3, 75
each_bits = pytest.mark.parametrize("bits", BITS)
each_group_size = pytest.mark.parametrize("group_size", GROUP_SIZES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)

# How the memory of new rows is ordered. Each function returns an array with the same elements as its argument.
LAYOUTS = {
    "contiguous": lambda x: x,
    "of all heads": lambda x: mx.contiguous(x.swapaxes(1, 2)).swapaxes(1, 2),  # as after a projection
    "columns apart": lambda x: mx.contiguous(mx.repeat(x, 2, axis=-1))[..., ::2],
    "backwards": lambda x: mx.contiguous(x[..., ::-1, ::-1])[..., ::-1, ::-1],
}


def special(rng, *shape, group_size):
    """Rows whose groups are equal, zero, of one sign, large or tiny, or halves of a step."""
    x = rng.standard_normal(shape).astype(np.float32)
    kinds = [
        lambda x: np.full_like(x, x.flat[0]),
        np.zeros_like,
        lambda x: -np.abs(x) - 1,
        lambda x: np.abs(x) + 1,
        lambda x: x * 6e4 / np.abs(x).max(),
        lambda x: x * np.float32(3e-8),
        lambda x: np.concatenate([[15.0], np.arange(1, x.size) % 16 - 0.5]).astype(np.float32),
        lambda x: np.concatenate([[-255.0], 0.5 - np.arange(1, x.size) % 256]).astype(np.float32),
        lambda x: np.where(x < 0, np.float32(-0.0), x),
        lambda x: x,
    ]
    groups = x.reshape(-1, group_size)
    for i in range(len(groups)):
        groups[i] = kinds[i % len(kinds)](groups[i])
    return groups.reshape(shape)


def half_away(x):
    """roundf(): NumPy rounds halves to even."""
    return np.copysign(np.floor(np.abs(x.astype(np.float64)) + 0.5), x).astype(np.float32)


def expected(rows, group_size, bits, rounded=half_away):
    """Words, scales and biases as MLX's CUDA kernel computes them, in float32."""
    most = np.float32(2**bits - 1)
    x = np.array(rows.astype(mx.float32)).reshape(-1, group_size)
    smallest, largest = x.min(-1), np.maximum(x.max(-1), 0)
    width = np.maximum((largest - smallest) / most, np.float32(1e-7))
    from_smallest = np.abs(smallest) > np.abs(largest)
    edge, width = np.where(from_smallest, smallest, largest), np.where(from_smallest, width, -width)
    steps = rounded(edge / width)
    with np.errstate(divide="ignore", invalid="ignore"):
        width, edge = np.where(steps == 0, width, edge / steps), np.where(steps == 0, np.float32(0), edge)
    numbers = np.minimum(rounded((x - edge[:, None]) / width[:, None]), most).astype(np.uint32)
    words = (numbers.reshape(-1, 32 // bits) << np.arange(0, 32, bits, dtype=np.uint32)).sum(-1, dtype=np.uint32)
    parts = mx.array(words), *(mx.array(each).astype(rows.dtype) for each in (width, edge))
    return [part.reshape(*rows.shape[:-1], -1) for part in parts]


def cache(rng, dim, dtype, group_size, bits):
    """Words, scales and biases of a cache that is full."""
    rows = mx.array(rng.standard_normal((BATCH, HEADS, CAPACITY, dim))).astype(dtype)
    return mx.quantize(rows, group_size=group_size, bits=bits, stream=mx.cpu)


def new_rows(draw, rng, dim, dtype, length=2, group_size=32):
    return mx.array(draw(rng, BATCH, HEADS, length, dim, group_size=group_size)).astype(dtype)


def normal(rng, *shape, group_size):
    return rng.standard_normal(shape).astype(np.float32)


def appended(stored, keys, values, offset, group_size, bits, in_place=(False,) * 6, edit=lambda text: text):
    """Runs the kernel on the CPU, and returns the six arrays."""
    described = launches.append(stored, keys, values, offset, group_size, bits, in_place)
    written = {}
    for name, x, is_overwritten in zip(described[0]["outputs"], map(as_numpy, stored), in_place, strict=True):
        written[name] = x.copy() if is_overwritten else Undefined(x.shape, x.dtype)
    execute(described, written, "forward", edit, "cuda")
    return [to_mlx(written[name], x.dtype) for name, x in zip(described[0]["outputs"], stored, strict=True)]


def assert_appends(stored, keys, values, offset, group_size, bits, **options):
    found = appended(stored, keys, values, offset, group_size, bits, **options)
    new = (*expected(keys, group_size, bits), *expected(values, group_size, bits))
    for name, one, old, rows in zip(ARRAYS, found, stored, new, strict=True):
        right = as_numpy(old).copy()
        right[..., offset : offset + keys.shape[2], :] = as_numpy(rows)
        bytes_of = [np.ascontiguousarray(x).view(np.uint8) for x in (as_numpy(one), right)]
        np.testing.assert_array_equal(*bytes_of, err_msg=name)


@each_bits
@each_group_size
@each_dtype
def test_bits_are_mlxs(rng, dtype, group_size, bits):
    """Draws rows with every special value, and rows of other lengths, offsets and head_dims for keys and values."""
    dim, value_dim, dtype = group_size * 2, max(group_size, 96 // group_size * group_size), DTYPES[dtype]
    stored = [x for d in (dim, value_dim) for x in cache(rng, d, dtype, group_size, bits)]
    for draw, length, offset in ((special, 16, 4), (normal, 1, 0), (normal, 5, 7)):
        rows = [new_rows(draw, rng, d, dtype, length, group_size) for d in (dim, value_dim)]
        for in_place in ((True,) * 6, (False,) * 6, (True, False, False, False, True, False)):
            assert_appends(stored, *rows, offset, group_size, bits, in_place=in_place)


@pytest.mark.parametrize("layout", LAYOUTS)
@each_dtype
def test_strides(rng, dtype, layout):
    dtype = DTYPES[dtype]
    stored = [x for _ in range(2) for x in cache(rng, 64, dtype, 32, 4)]
    keys, values = (LAYOUTS[layout](new_rows(normal, rng, 64, dtype, 3)) for _ in range(2))
    assert_appends(stored, keys, values, 9, 32, 4, in_place=(True,) * 6)


@each_bits
@each_group_size
@each_dtype
def test_expected_is_what_mlx_computes_on_the_cpu(rng, dtype, group_size, bits):
    """On the CPU, MLX rounds halves to even. It also differs in groups without a positive element."""
    rows = mx.concatenate(
        [new_rows(draw, rng, 256, DTYPES[dtype], 16, group_size) for draw in (normal, special)], axis=2
    )
    rows = mx.where(mx.arange(256) % group_size == 7, 0.5, rows).astype(rows.dtype)
    mlx = mx.quantize(rows, group_size=group_size, bits=bits, stream=mx.cpu)
    for one, other in zip(expected(rows, group_size, bits, rounded=np.rint), mlx, strict=True):
        np.testing.assert_array_equal(as_numpy(one), as_numpy(other))


def test_nan_and_infinity(rng):
    """A NaN becomes the largest number, and scale and bias are those of the other elements, as in MLX's kernel."""
    stored = [x for _ in range(2) for x in cache(rng, 32, mx.float32, 32, 8)]
    rows = new_rows(normal, rng, 32, mx.float32, 1)
    nan, others, infinite = (mx.where(mx.arange(32) == 5, x, rows) for x in (mx.nan, 0, mx.inf))
    words, *groups = appended(stored, nan, rows, 3, 32, 8)[:3]
    assert all(mx.array_equal(x[:, :, 3:4], y) for x, y in zip(groups, expected(others, 32, 8)[1:], strict=True))
    assert mx.all(words.view(mx.uint8)[:, :, 3, 5] == 255)
    words, scales, _ = appended(stored, infinite, rows, 3, 32, 8)[:3]
    assert mx.all(mx.isnan(scales[:, :, 3]))
    assert mx.all(words[:, :, 3] == 2**32 - 1)


FAULTS = [
    ("roundf((own[i] - edge) / width)", "roundf((own[i] - edge) / float(T(width)))"),
    ("largest = 0;", "largest = -INFINITY;"),
    ("fmaxf((largest - smallest) / kMost, 1e-7f)", "((largest - smallest) / kMost)"),
    ("if (steps != 0)", "if (true)"),
    ("i * Sizes::bits)", "i)"),
    ("j < begin || ", ""),
    ("position * strides.row", "position"),
    ("if (old == nullptr) return;", "if (old == nullptr || part > 0) return;"),
]


@pytest.mark.parametrize(("right", "wrong"), FAULTS, ids=[right for right, _ in FAULTS])
def test_is_noticed(rng, right, wrong):
    stored = [x for _ in range(2) for x in cache(rng, 64, mx.bfloat16, 64, 4)]
    keys, values = (new_rows(draw, rng, 64, mx.bfloat16, 16, 64) for draw in (special, normal))
    call = (stored, keys, LAYOUTS["of all heads"](values), 3, 64, 4)
    assert_is_noticed(Fault("cuda_append", right, wrong), lambda edit: assert_appends(*call, edit=edit))
