"""What is promised of the kernels for GPUs, broken.

The extension brings the kernels' texts: what changes here are headers, and with them it is built again.
"""

from .mutation import CPP, Mutation

MUTATIONS: list[Mutation] = [
    Mutation(
        "a GPU's kernel writes lse where nobody has given it an array",
        f"{CPP}/gpu/kernels/epilogue.h",
        "    if (lse == nullptr) {\n      return;\n    }\n",
        "",
        "cuda/test_same_bits_on_cpu.py::test_a_call_that_nobody_asks_for_lse_of",
    ),
    Mutation(
        "lse has a natural logarithm of 2 with four digits",
        f"{CPP}/gpu/kernels/epilogue.h",
        "M_LN2_F * (softmax.row_max",
        "0.6931f * (softmax.row_max",
        "metal/test_kernels.py::test_float32_is_within_2e_6_of_float64",
    ),
    Mutation(
        "soft-cap's derivative lacks a factor",
        f"{CPP}/gpu/kernels/visibility.h",
        "? (1 - scaled) * (1 + scaled) :",
        "? 1 - scaled :",
        "metal/test_backward.py::test_grid",
    ),
    Mutation(
        "what two SIMD groups do without a barrier between them is no race",
        "tests/metal/metal_on_cpu/runtime/memory.cpp",
        "if (past.simdgroup != now.simdgroup) return past.epoch >",
        "if (past.simdgroup != now.simdgroup) return 0 * past.epoch >",
        "metal/test_mutations.py::test_is_noticed",
    ),
    Mutation(
        "keys that a causal mask hides from a whole tile are read and multiplied",
        f"{CPP}/gpu/kernels/visibility.h",
        "return KeySpan{seen(first).begin, seen(last).end};",
        "return KeySpan{seen(first).begin, keys.end};",
        "metal/test_counts.py::test_prefill_beside_steel_attention",
    ),
    Mutation(
        "the output of 4 and 8 bits beside 16-bit queries is left above the maximum that its sums are from",
        f"{CPP}/cuda/kernels/integer_rows.h",
        "constexpr float kFromMax = power_of_two(-int(kBelowMax));",
        "constexpr float kFromMax = 1;",
        "cuda/test_integer_tiles.py::test_is_float32s",
    ),
]
