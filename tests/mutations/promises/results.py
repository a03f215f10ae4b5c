"""Mutations that break the promises about results."""

from . import CORE, CPP, Mutation

MUTATIONS: list[Mutation] = [
    Mutation(
        "soft-cap is ignored in a decode step that nothing is hidden from",
        f"{CPP}/cpu/kernels.cpp",
        "hides || changes_scores(args)",
        "hides || (changes_scores(args) && !scratch.few_rows)",
        "core/test_options.py::test_against_reference",
    ),
    Mutation(
        "sinks are ignored in decode steps",
        f"{CPP}/cpu/kernels.cpp",
        "if (args.sinks && !saw_nothing) {",
        "if (args.sinks && !saw_nothing && p.query_len > 8) {",
        "core/test_decode_equals_prefill.py::test_rows",
    ),
    Mutation(
        "lse is a logarithm to base 2",
        f"{CPP}/cpu/kernels.cpp",
        "row_max + __builtin_logf(row_sum)",
        "row_max + __builtin_log2f(row_sum)",
        "core/test_grid.py::test_grid",
    ),
    Mutation(
        "a row that sees nothing is divided by its sum of 0",
        f"{CPP}/cpu/kernels.cpp",
        "saw_nothing ? 0.0f : output_scale / row_sum",
        "output_scale / row_sum",
        "core/test_rows_that_see_nothing.py::test_zero_and_minus_infinity",
    ),
    Mutation(
        "values are read in place where some are hidden",
        f"{CPP}/cpu/kernels.cpp",
        "values.in_place(scratch.value_columns) &&\n"
        "                         sees_all(args, block, scratch.bands[0], tile);",
        "values.in_place(scratch.value_columns);",
        "core/test_hidden_nan.py::test_hidden_from_all",
    ),
    Mutation(
        "tiles that are hidden whole are read",
        f"{CPP}/cpu/kernels.cpp",
        "Span remaining = {larger(any.begin, block.key_begin), ",
        "Span remaining = {block.key_begin, ",
        "core/test_skipped_tiles.py::test_hidden_memory_is_not_touched",
    ),
    Mutation(
        "query heads read the wrong key/value head",
        f"{CPP}/cpu/rows.h",
        "return block.head_begin / larger(1, group);",
        "return block.head_begin % args.params.num_kv_heads + 0 * group;",
        "core/test_batch_and_heads.py::test_query_head_reads_its_groups_kv_head",
    ),
    Mutation(
        "how a decode step is cut depends on the number of threads",
        f"{CPP}/cpu/forward.cpp",
        "constexpr int kChunkLen = 512;",
        "const int kChunkLen = 512 / num_threads();",
        "core/test_threads.py::test_any_number_of_threads",
    ),
    Mutation(
        "a decode step forgets what earlier rounds of runs have left",
        f"{CPP}/cpu/forward.cpp",
        "begin = end, taken = 1) {",
        "begin = end) {",
        "core/test_decode_equals_prefill.py::test_so_where_results_of_runs_are_merged_in_rounds",
    ),
    Mutation(
        "arrays that begin in the middle of an element are read as they are",
        f"{CPP}/dispatch/memory.cpp",
        "% input.itemsize() == 0",
        "% 1 == 0",
        "core/test_strides.py::test_the_cpu_copies_views_that_begin_in_the_middle_of_an_element",
    ),
    Mutation(
        "calls are not counted",
        f"{CPP}/op/counts.h",
        "fetch_add(1, std::memory_order_relaxed)",
        "fetch_add(0, std::memory_order_relaxed)",
        "core/test_plan.py::test_the_kernel_that_plan_names_is_the_one_that_runs",
    ),
    Mutation(
        "the default scale is that of the values' size",
        f"{CPP}/request/arguments.cpp",
        "std::sqrt(static_cast<float>(params.head_dim))",
        "std::sqrt(static_cast<float>(params.value_dim))",
        "core/test_properties.py::test_agrees_with_the_reference",
    ),
    Mutation(
        "bfloat16 results in the middle between two numbers are rounded up",
        f"{CPP}/cpu/dtype.h",
        "(bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16",
        "(bits + 0x8000u) >> 16",
        "core/test_dtypes.py::test_stores_round_as_mlx_casts_do",
    ),
    Mutation(
        "scores of float16 inputs are float16",
        f"{CPP}/cpu/kernels.cpp",
        "    bool hides = !sees_all(args, block, band, keys);",
        """    for (int k = 0; args.dtype == Dtype::float16 && k < seen_count * band.padded_rows; ++k) {
      half_t narrow;
      from_float(scratch.scores[k], &narrow);
      scratch.scores[k] = to_float(narrow);
    }
    bool hides = !sees_all(args, block, band, keys);""",
        "core/test_dtypes.py::test_float16_scores_do_not_overflow",
    ),
    Mutation(
        "the queries of a decode step are one block of rows",
        f"{CPP}/cpu/forward.cpp",
        "for_each_query(cut.block(params, i), [&](const RowBlock& block) { isa.attend(args, block); });",
        "isa.attend(args, cut.block(params, i));",
        "core/test_decode_equals_prefill.py::test_each_of_several_has_the_bits_that_it_has_alone",
    ),
    Mutation(
        "a decode step without keys computes nothing",
        f"{CPP}/cpu/forward.cpp",
        "std::max(1, (params.key_len + kChunkLen - 1) / kChunkLen - first_chunk)",
        "(params.key_len + kChunkLen - 1) / kChunkLen - first_chunk",
        "core/test_rows_that_see_nothing.py::test_no_keys",
    ),
    Mutation(
        "scales and biases of quantised values are exchanged",
        f"{CORE}/arguments.py",
        'value, given["value_scales"], given["value_biases"] = _quantized("value", value)',
        'value, given["value_biases"], given["value_scales"] = _quantized("value", value)',
        "core/test_quantised.py::test_equals_the_dequantised",
    ),
    Mutation(
        "the baseline is taken where nothing else is asked for",
        f"{CPP}/cpu/isa.cpp",
        """  const char* wanted = std::getenv("FLASHATTN_CPU_ISA");
""",
        """  const char* asked_for = std::getenv("FLASHATTN_CPU_ISA");
  const char* wanted = asked_for ? asked_for : "baseline";
""",
        "core/test_instruction_sets.py::test_the_best_is_taken",
    ),
    Mutation(
        "AVX2 is taken by processors that lack it",
        f"{CPP}/cpu/isa.cpp",
        '__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")',
        "true",
        "core/test_instruction_sets.py::test_a_lesser_processor_meets_nothing_that_it_lacks",
    ),
    Mutation(
        "NEON is compiled as if no number was infinite",
        f"{CPP}/cpu/CMakeLists.txt",
        'add_instruction_set(neon "NEON")',
        'add_instruction_set(neon "NEON" -ffinite-math-only)',
        "core/test_instruction_sets.py::test_arm_over_the_options",
    ),
    Mutation(
        "vmap exchanges the mapped axis with the first one",
        f"{CPP}/op/primitive.cpp",
        "mx::moveaxis(input, axes[i], 0, stream)",
        "mx::swapaxes(input, axes[i], 0, stream)",
        "core/test_surface_transforms.py::test_vmap",
    ),
    Mutation(
        "scores are multiplied by log2(e) before the maximum is subtracted",
        f"{CPP}/cpu/kernels.cpp",
        "exp2((load(scores + i) - reference) * kLog2e)",
        "exp2(load(scores + i) * kLog2e - reference * kLog2e)",
        "core/test_large_scores.py::test_scores_that_differ_by_1",
    ),
    Mutation(
        "a soft-cap of 0 is taken for none",
        f"{CORE}/arguments.py",
        "if softcap < _SMALLEST_SOFTCAP:",
        "if 0 != softcap < _SMALLEST_SOFTCAP:",
        "core/test_errors.py::test_arguments",
    ),
    Mutation(
        "values of fewer keys than there are pass the checks",
        f"{CPP}/request/checks.cpp",
        "value.shape(kRow) != key.shape(kRow)",
        "value.shape(kRow) > key.shape(kRow)",
        "core/test_errors.py::test_shapes",
    ),
    Mutation(
        "plan() does not look at its stream",
        f"{CORE}/plan.py",
        '_backend("plan", device, options.get("stream"))',
        '_backend("plan", device, None)',
        "core/test_surface_refusals.py::test_one_broken_argument_is_named",
    ),
    Mutation(
        "under vmap inputs of fewer dimensions broadcast along the wrong ones",
        f"{CPP}/op/primitive.cpp",
        "missing.push_back(1 + static_cast<int>(missing.size()));",
        "missing.push_back(static_cast<int>(missing.size()));",
        "core/test_surface_transforms.py::test_vmap",
    ),
    Mutation(
        "masks and sinks are of query's dtype or refused",
        f"{CPP}/request/checks.cpp",
        "mx::promote_types(given.dtype(), query_dtype) != query_dtype",
        "given.dtype() != query_dtype",
        "core/test_surface_mlx.py::test_takes_what_mlx_takes_and_agrees",
    ),
    Mutation(
        "results pass through numbers that are 2^30 times smaller",
        f"{CPP}/cpu/kernels.cpp",
        "load(output + c) * normalise)",
        "load(output + c) * (normalise * 0x1p-30f) * 0x1p30f)",
        "core/test_denormals.py::test_values",
    ),
    Mutation(
        "where a key lies in memory is counted in 32 bits",
        f"{CPP}/cpu/rows.h",
        "kv_head_of(args, block) * strides.head + first * strides.row;",
        "kv_head_of(args, block) * strides.head + static_cast<int>(first * strides.row);",
        "core/test_huge_shapes.py::test_rows_further_apart_than_32_bits_count",
    ),
]
