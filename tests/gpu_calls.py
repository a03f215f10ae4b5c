"""Describes the launches of forward passes on a GPU. Tests give the sizes of a call. Its arrays contain zeros."""

import mlx.core as mx
from flashattn_core.arguments import lowered

from tests import launches


def lowered_call(
    *,
    batch=1,
    heads=4,
    kv_heads=2,
    length=100,
    keys=300,
    dim=64,
    value_dim=None,
    dtype=mx.bfloat16,
    mask="causal",
    is_huge=False,
    key_layout=lambda key: key,
    **options,
):
    """A call with these sizes.

    With `is_huge`, each array is a single number in memory, broadcast to the array's shape. Hopper's kernels cannot
    read such arrays.
    """

    def array(*shape):
        return mx.broadcast_to(mx.zeros(1, dtype), shape) if is_huge else mx.zeros(shape, dtype)

    key, value = (array(batch, kv_heads, keys, columns) for columns in (dim, value_dim or dim))
    if options.get("bits"):
        key, value = (mx.quantize(x, options["group_size"], options["bits"]) for x in (key, value))
    return lowered(array(batch, heads, length, dim), key_layout(key), value, None, mask, **options)


def while_traced(asked, dim=64, dtype=mx.bfloat16, length=100, **options):
    """Returns asked(arguments) of a causal call while mx.grad traces the call."""
    key, answers = mx.zeros((1, 2, 300, dim), dtype), []

    def function(query):
        answers.append(asked(lowered(query, key, key, None, "causal", **options)))
        return query.sum()

    mx.grad(function)(mx.zeros((1, 4, length, dim), dtype))
    return answers[0]


def described(form, **sizes):
    """The launches of a call with these sizes. `form`: a kernel and its suffixes, as launches.form() takes them."""
    kernel, precision, gpu = launches.form(form)
    with gpu:
        return launches.forward(lowered_call(kernel=kernel, **precision, **sizes), kernel.partition("_")[0])
