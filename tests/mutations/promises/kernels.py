"""Mutations that break the promises about GPU kernels.

The extension contains the text of the kernels' headers. So if a header changes, the extension must be built again.
"""

from . import CPP, Mutation

MUTATIONS: list[Mutation] = [
    Mutation(
        "a GPU's kernel writes lse where nobody has given it an array",
        f"{CPP}/gpu/kernels/epilogue.h",
        "    if (lse == nullptr) {\n      return;\n    }\n",
        "",
        "cuda/test_same_bits_on_cpu.py::test_a_call_that_nobody_asks_for_lse_of",
    ),
    Mutation(
        "the gradient has a row's maximum and the logarithm of its sum in one number",
        f"{CPP}/gpu/kernels/score_gradient.h",
        "return SavedRow{stats[0], precise_log2(row_sum), delta[query]};",
        "return SavedRow{stats[0] + M_LN2_F * precise_log2(row_sum), 0.0f, delta[query]};",
        "metal/test_metal_large_gradients.py::test_three_equal_keys_have_a_third_each",
    ),
    Mutation(
        "a count of threadgroups is cut off at 32 bits",
        f"{CPP}/gpu/arguments.cpp",
        "  if (n > kMost) {",
        "  if (n > kMost && n < 0) {",
        "metal/test_grids.py::test_more_threadgroups",
    ),
    Mutation(
        "lse has a natural logarithm of 2 with four digits",
        f"{CPP}/gpu/kernels/epilogue.h",
        "multiply_add(M_LN2_F, precise_log2",
        "multiply_add(0.6931f, precise_log2",
        "metal/test_metal_kernels.py::test_float32_is_within_2e_6_of_float64",
    ),
    Mutation(
        "soft-cap's derivative lacks a factor",
        f"{CPP}/gpu/kernels/visibility.h",
        "return (1 - tanh) * (1 + tanh);",
        "return 1 - tanh;",
        "metal/test_backward.py::test_grid",
    ),
    Mutation(
        "what two SIMD groups do without a barrier between them is no race",
        "tests/emulators/metal_on_cpu/runtime/memory.cpp",
        "if (past.simdgroup != now.simdgroup) return past.epoch >",
        "if (past.simdgroup != now.simdgroup) return 0 * past.epoch >",
        "metal/test_metal_mutations.py::test_is_noticed[reg: keys before they are there]",
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
        "float from_max = this->from_max[h];",
        "float from_max = 1;",
        "cuda/test_integer_tiles.py::test_is_float32s",
    ),
    Mutation(
        "blocks that share keys all read the first chunk",
        f"{CPP}/cuda/kernels/shared_keys.h",
        "later % split.num_chunks, split.num_chunks};",
        "0, split.num_chunks};",
        "cuda/test_shared_keys.py::test_the_result_is_that_of_all_keys",
    ),
    Mutation(
        "what blocks that share keys have left is not finite, and stays so",
        f"{CPP}/cuda/kernels/prefill_merge.cu",
        "if (__any_sync(~0u, probe != 0)) {",
        "if (__any_sync(~0u, probe > 0)) {",
        "cuda/test_shared_keys.py::test_large_scores_are_computed_again",
    ),
]
