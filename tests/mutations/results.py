"""What is promised of results, broken."""

from mutation import CPP, Mutation

MUTATIONS: list[Mutation] = [
    Mutation(
        "soft-cap is ignored in a decode step that nothing is hidden from",
        f"{CPP}/cpu/kernels.cpp",
        "hides || p.softcap > 0 || args.alibi_slopes",
        "hides || (p.softcap > 0 && !scratch.few_rows) || args.alibi_slopes",
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
        "values.in_place(scratch.value_columns) &&\n                         sees_all(args, scratch.bands[0], tile);",
        "values.in_place(scratch.value_columns);",
        "core/test_hidden_nan.py",
    ),
    Mutation(
        "tiles that are hidden whole are read",
        f"{CPP}/cpu/kernels.cpp",
        "for (int first = larger(any.begin, block.key_begin); first < end;",
        "for (int first = block.key_begin; first < end;",
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
        f"{CPP}/cpu/attention.cpp",
        "constexpr int kKeysPerRun = 512;",
        "const int kKeysPerRun = 512 / num_threads();",
        "core/test_determinism.py::test_any_number_of_threads",
    ),
    Mutation(
        "arrays that begin in the middle of an element are read as they are",
        f"{CPP}/primitive.cpp",
        "% input.itemsize() == 0",
        "% 1 == 0",
        "core/test_strides.py::test_views_that_begin_in_the_middle_of_an_element",
    ),
    Mutation(
        "calls are not counted",
        f"{CPP}/counts.cpp",
        "fetch_add(1, std::memory_order_relaxed)",
        "fetch_add(0, std::memory_order_relaxed)",
        "core/test_plan.py::test_the_kernel_that_plan_names_is_the_one_that_runs",
    ),
]
