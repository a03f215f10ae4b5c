"""Drawn calls return the same bits under transforms, leave inputs unchanged, and run the kernel that plan() names.

Exported calls may differ by rounding.
"""

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core import NoKernelError, plan, reset_stats, stats
from hypothesis import given
from hypothesis import strategies as st

from tests.core.strategies import cases, seeds
from tests.promises import promise

any_case = cases() | cases(quantised=True)

KERNELS = ["cpu_decode", "cpu_prefill", "metal_rowwise", "metal_decode_fast", "metal_prefill_tg", "auto"]


def equal(results, expected):
    """Whether all arrays are equal and none contains NaN."""
    return all(mx.array_equal(a, b) for a, b in zip(results, expected, strict=True))


def of_arrays(case):
    """The call as a function of its arrays."""
    return lambda *arrays: case.run(dict(zip(case.arrays, arrays, strict=True)))


def calls():
    return {kernel: n for kernel, n in stats().items() if n}


@promise("a call repeated gives the same bits, and leaves its inputs alone")
@given(any_case)
def test_twice_the_same_bits_and_inputs_untouched(case):
    before = [np.array(a.astype(mx.float32)) for a in case.arrays.values()]
    first = case.run()
    mx.eval(first)
    assert equal(case.run(), first)
    for a, values in zip(case.arrays.values(), before, strict=True):
        np.testing.assert_array_equal(np.array(a.astype(mx.float32)), values)


@promise("the kernel that plan() names runs, or an error has the reason that plan() names")
@given(any_case, st.sampled_from(KERNELS))
def test_plan_names_the_kernel_that_runs_or_the_reason_why_none_does(case, kernel):
    case.made_of["kernel"] = lambda a: kernel
    arguments = case.arguments()
    reset_stats()
    planned = plan(**arguments)
    assert not calls()
    if planned.kernel is None:
        with pytest.raises(NoKernelError) as refused:
            case.function(**arguments)
        assert str(refused.value) == f"[flash_attention] {planned.reason}"
        return
    out = case.function(**arguments)
    assert not calls()
    mx.eval(out)
    assert calls() == {planned.kernel: 1}


@promise("mx.compile changes no bit of a call")
@given(any_case, st.booleans())
def test_compile(case, shapeless):
    compiled = mx.compile(of_arrays(case), shapeless=shapeless)
    assert equal(compiled(*case.arrays.values()), case.run())


@promise("mx.vmap changes no bit of a call")
@given(any_case, st.data())
def test_vmap(case, data):
    """mx.vmap must work over any of the arrays (tensors, masks, ranges, trees, sinks), along any axis of each."""
    size = data.draw(st.integers(1, 3))
    names = list(case.arrays)
    mapped = data.draw(st.sets(st.sampled_from(names), min_size=1))
    axes = [data.draw(st.integers(0, case.arrays[name].ndim)) if name in mapped else None for name in names]

    def variant(name, i):  # the array's elements, rolled by i if vmap maps over the array
        a = case.arrays[name]
        return mx.roll(a.reshape(-1), i).reshape(a.shape) if name in mapped and a.size else a

    variants = [{name: variant(name, i) for name in names} for i in range(size)]
    stacked = [
        case.arrays[name] if axis is None else mx.stack([v[name] for v in variants], axis=axis)
        for name, axis in zip(names, axes, strict=True)
    ]
    out, lse = mx.vmap(of_arrays(case), in_axes=tuple(axes))(*stacked)
    for i, arrays in enumerate(variants):
        assert equal((out[i], lse[i]), case.run(arrays))


@promise("mx.checkpoint changes no bit of a call")
@given(cases(max_dim=80), seeds)
def test_checkpoint(case, seed):
    """mx.checkpoint must change no bit of out, of lse, or of the gradient of any array (masks are among the arrays)."""
    function, primals = of_arrays(case), list(case.arrays.values())
    key = mx.random.key(seed)
    cotangents = [mx.random.normal(a.shape, key=key).astype(a.dtype) for a in function(*primals)]
    plain = mx.vjp(function, primals, cotangents)
    checkpointed = mx.vjp(mx.checkpoint(function), primals, cotangents)
    assert all(equal(a, b) for a, b in zip(checkpointed, plain, strict=True))
