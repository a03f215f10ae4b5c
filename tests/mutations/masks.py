"""What is promised of masks, broken."""

from mutation import CORE, CPP, Mutation

MUTATIONS: list[Mutation] = [
    Mutation(
        "a window shows one key more",
        f"{CORE}/masks.py",
        "min(window or INT32_MAX, operator.index(part.window))",
        "min(window or INT32_MAX, operator.index(part.window) + 1)",
        "core/test_masks.py::test_window_is_itself_and_those_before",
    ),
    Mutation(
        "the start of a key range is ignored",
        f"{CORE}/masks.py",
        "return Lowered(causal, window, start, stop,",
        "return Lowered(causal, window, None, stop,",
        "core/test_masks.py::test_key_range",
    ),
    Mutation(
        "of two key ranges the second counts alone",
        f"{CORE}/masks.py",
        "start_here if start is None else mx.maximum(start, start_here)",
        "start_here",
        "core/test_masks.py::test_two_of_a_kind_intersect",
    ),
    Mutation(
        "a window in a decode step hides a run of keys too many",
        f"{CPP}/cpu/attention.cpp",
        "params.key_len} - params.query_len - params.window + 1;",
        "params.key_len} - params.query_len - params.window + 512;",
        "core/test_decode_equals_prefill.py::test_rows",
    ),
]
