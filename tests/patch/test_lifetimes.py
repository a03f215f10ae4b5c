"""A call is flash attention if the patch is on when the program makes it, or when MLX traces it."""

import os
import warnings

import mlx.core as mx
import mlxlm_flash_patch as flash
from mlx_lm.models import base


def test_a_forked_child(original):
    """A forked child starts with its parent's patch. disable() in the child does not affect the parent."""
    flash.enable()
    with warnings.catch_warnings():  # Python 3.12 warns of forks while threads run, and MLX has threads
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        patched = flash.status().enabled and base.scaled_dot_product_attention is not original
        flash.disable()
        os._exit(0 if patched and base.scaled_dot_product_attention is original else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert base.scaled_dot_product_attention is not original
    assert flash.status().enabled


def test_a_compiled_function_keeps_what_it_was_traced_with(tiny, tokens):
    """A compiled graph keeps the attention that it was traced with, whether the patch is on or off when it runs.

    status() counts the graph's kernels in any case. MLX caches one graph per function, so the test has two functions.
    """
    model, x = tiny(), tokens()
    before, meanwhile = mx.compile(lambda x: model(x)), mx.compile(lambda x: model(x))
    mx.eval(before(x))
    with flash.enabled():
        mx.eval(meanwhile(x))
        mx.eval(before(x))
        assert flash.status().calls == {"cpu_prefill": 2}
    mx.eval(meanwhile(x))
    assert flash.status().calls == {"cpu_prefill": 4}
