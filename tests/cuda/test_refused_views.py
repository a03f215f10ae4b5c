"""A GPU refuses an array that begins in the middle of an element, and later calls work."""

import mlx.core as mx
import pytest
from flashattn_core import flash_attention

from tests.core.test_strides import in_the_middle_of_an_element

pytestmark = pytest.mark.usefixtures("requires_gpu")

REFUSED = "begins in the middle of an element, which a GPU cannot read; expected a view of bytes from a multiple of 2"


@pytest.mark.parametrize("place", ["query", "key", "value", "mask"])
def test_a_view_that_begins_in_the_middle_of_an_element(place):
    arrays = {name: mx.random.normal((1, 2, 130, 64)).astype(mx.bfloat16) for name in ("query", "key", "value")}
    arrays["mask"] = mx.random.normal((130, 130)).astype(mx.bfloat16)
    mx.eval(arrays)
    view = in_the_middle_of_an_element(arrays[place])
    with pytest.raises(ValueError, match=REFUSED):
        mx.eval(flash_attention(**arrays | {place: view}))
    assert mx.all(mx.isfinite(flash_attention(**arrays)))


def test_the_gradient_of_such_a_view():
    query = mx.random.normal((1, 2, 130, 64)).astype(mx.bfloat16)
    view = in_the_middle_of_an_element(query)
    with pytest.raises(ValueError, match=REFUSED):
        mx.eval(mx.grad(lambda x: flash_attention(x, query, query).sum())(view))
