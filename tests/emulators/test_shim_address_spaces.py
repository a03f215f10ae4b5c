"""A pointer must stay in its address space. A pointer without an address space is an error, as in Apple's compiler."""

import pytest

from tests.emulators.metal_on_cpu import AddressSpaceError, check_address_spaces
from tests.emulators.small_kernels import PREAMBLE

KERNEL = """struct Params {{ int n; float s; }};
static inline float dot_product(threadgroup const float* a, device const float* b, int n) {{
  float r = 0; for (int i = 0; i < n; i++) r += a[i] * b[i]; return r; }}
struct Loader {{ const device float* from; threadgroup float* to;
  Loader(const device float* f, threadgroup float* t) : from(f), to(t) {{}} void load(int i) {{ to[i] = from[i]; }} }};
template <typename T> [[kernel]] void k(device const T* a [[buffer(0)]], device T* out [[buffer(1)]],
    constant Params& p [[buffer(2)]],
    uint lane [[thread_index_in_simdgroup]]) {{
  threadgroup float x[32];
  x[lane] = a[lane];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_float8x8 m;
  {body}
}}
template [[host_name("k_float")]] [[kernel]] decltype(k<float>) k<float>;
"""

BAD = {
    "out[lane] = dot_product(a, x, p.n);": "no matching function for call to 'dot_product'",
    "device float* q = x; out[lane] = q[0];": "cannot initialize",
    "p.n = 3;": "read-only",
    "threadgroup float* y = (threadgroup float*)a; out[lane] = y[0];": "mismatching address spaces",
    "float* y = x; out[lane] = y[0];": "a pointer without an address space",
    "Loader loader(x, a); loader.load(lane);": "no matching constructor",
    "device T* q = a; out[lane] = q[0];": "cannot initialize",
    "constant float* q = out; out[lane] = q[0];": "cannot initialize",
    "float own[4] = {0}; device float* q = own; out[lane] = q[0];": "cannot initialize",
    "out = x;": "assigning",
    "float own[2]; float* y = own; out[lane] = y[0];": "kernels.metal:13: a pointer without an address space",
}


@pytest.mark.parametrize("body", BAD)
def test_wrong(body):
    with pytest.raises(AddressSpaceError, match=BAD[body]) as caught:
        check_address_spaces(PREAMBLE + KERNEL.format(body=body))
    assert "kernels.metal:13" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "float sum(float* values) { return values[0]; }",
        "float sum(const float& value) { return value; }",
        "struct Row { float* values; };",
        "template <typename T> struct Row { T* values; }; void use() { Row<float> row; (void)row; }",
    ],
)
def test_pointers_need_an_address_space(text):
    with pytest.raises(AddressSpaceError, match=r"kernels\.metal:1: a pointer without an address space"):
        check_address_spaces(PREAMBLE + text)
