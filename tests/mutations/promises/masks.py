"""What is promised of masks, broken."""

from .mutation import CORE, CPP, Mutation

MUTATIONS: list[Mutation] = [
    Mutation(
        "a window shows one key more",
        f"{CORE}/masks.py",
        "INT32_MAX), operator.index(part.window))",
        "INT32_MAX), operator.index(part.window) + 1)",
        "core/test_masks.py::test_window_is_itself_and_those_before",
    ),
    Mutation(
        "the start of a key range is ignored",
        f"{CORE}/masks.py",
        "            start = _int32(part.start)\n",
        "            start = mx.array(0)\n",
        "core/test_masks.py::test_key_range",
    ),
    Mutation(
        "of two key ranges the second counts alone",
        f"{CORE}/masks.py",
        'mx.maximum(lowered["key_start"], start)',
        "start",
        "core/test_masks.py::test_two_of_a_kind_intersect",
    ),
    Mutation(
        "a window in a decode step hides a run of keys too many",
        f"{CPP}/call/spans.h",
        "p.key_len} - p.query_len - p.window + 1;",
        "p.key_len} - p.query_len - p.window + 512;",
        "core/test_decode_equals_prefill.py::test_rows",
    ),
    Mutation(
        "causal is aligned at the upper left",
        f"{CPP}/call/spans.h",
        "end = diagonal + 1;",
        "end = int64_t{query} + 1;",
        "core/test_masks.py::test_causal",
    ),
    Mutation(
        "a node of a tree sees its parent, and nothing before that",
        f"{CORE}/masks.py",
        "row = list(rows[parent]) if parent >= 0 else [False] * len(parents)",
        "row = [other == parent for other in range(len(parents))]",
        "core/test_masks.py::test_tree_from_parents_sees_itself_and_ancestors",
    ),
    Mutation(
        "the bits of a tree are packed from the other end",
        f"{CORE}/masks.py",
        "mx.array(1, mx.uint32), mx.arange(32, dtype=mx.uint32)",
        "mx.array(1, mx.uint32), mx.arange(31, -1, -1, dtype=mx.uint32)",
        "core/test_masks.py::test_tree",
    ),
    Mutation(
        "an array's dimension of 1 is not broadcast",
        f"{CPP}/op/strides.cpp",
        "return axis < 0 || array.shape(axis) == 1 ? 0 : array.strides(axis);",
        "return axis < 0 ? 0 : array.strides(axis);",
        "core/test_array_masks.py::test_broadcasts",
    ),
    Mutation(
        "hidden NaN is multiplied by 0",
        f"{CPP}/cpu/kernels.cpp",
        "if (zero[i] == 0) continue;",
        "if (!(zero[i] > 0)) continue;",
        "core/test_hidden_nan.py::test_hidden_from_all",
    ),
    Mutation(
        "NaN in the gradient of one row reaches the values that the row does not see",
        f"{CPP}/cpu/backward_kernels.cpp",
        "bool seen = tile.score_gradient[at] - tile.score_gradient[at] != 0;",
        "bool seen = rows.scores[at] >= 0;",
        "core/test_nan_in_every_position.py::test_it_reaches_what_depends_on_it",
    ),
]
