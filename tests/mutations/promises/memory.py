"""Mutations that break the promises about memory."""

from . import CORE, CPP, PATCH, Mutation

MUTATIONS: list[Mutation] = [
    Mutation(
        "a call on CUDA writes scratch that the one before still reads",
        f"{CPP}/cuda/launch.cpp",
        "if (scratch.binding == binding) role = Role::output;",
        "if (scratch.binding == binding && launches.launches.empty()) role = Role::output;",
        "cuda/test_cuda_scratch.py::test_of_gradients",
    ),
    Mutation(
        "memory that MLX does not get is taken for granted",
        f"{CPP}/dispatch/memory.cpp",
        "output.nbytes() > 0 && !pointer_of(data)",
        "output.nbytes() > 0 && pointer_of(data) == &data",
        "core/test_allocation_failure.py::test_results_that_no_machine_holds",
    ),
    Mutation(
        "strides that reach beyond all memory pass the check",
        "tests/core/driver/contract.cpp",
        "if (last - first >= kMaxElements) {",
        "if (last - first >= kMaxElements && array.columns < 0) {",
        "core/test_contract.py::test_each_violation_is_refused_and_its_neighbour_is_not",
    ),
    Mutation(
        "a bool array is broadcast to L*S",
        f"{CORE}/masks.py",
        '_only("bool array", lowered.get("visible"), part)',
        '_only("bool array", lowered.get("visible"), part | mx.zeros(2 * part.shape[-1:], mx.bool_))',
        "core/test_memory.py::test_extra_memory_is_the_outputs",
    ),
    Mutation(
        "a loop that is over is not freed",
        f"{CPP}/cpu/threads.cpp",
        "Job job{body, count};",
        "Job& job = *new Job{body, count};",
        "core/test_memory.py::test_nothing_grows",
    ),
    Mutation(
        "the sums of a 16-bit gradient take twice the memory",
        f"{CPP}/cpu/backward.cpp",
        "lower = std::make_unique_for_overwrite<uint16_t[]>(rows * p.head_dim);",
        "lower = std::make_unique<uint16_t[]>(2 * rows * p.head_dim);",
        "core/test_memory.py::test_many_query_heads_of_one_key_head",
    ),
    Mutation(
        "the merge of runs looks at one run too many",
        f"{CPP}/cpu/forward.cpp",
        "slot < taken + count; ++slot",
        "slot <= taken + count; ++slot",
        "core/test_sanitizers.py::test_no_report",
    ),
    Mutation(
        "a decode step keeps what each run of keys leaves until the last one is done",
        f"{CPP}/cpu/forward.cpp",
        "int64_t most = std::max(",
        "int64_t most = all_heads * runs + std::max(",
        "core/test_memory.py::test_a_decode_step_keeps_the_results_of_a_few_runs_of_keys",
    ),
    Mutation(
        "a GPU's decode step keeps what each chunk of keys leaves, however many rows there are",
        f"{CPP}/gpu/split.h",
        "chunks = std::min(chunks, kMaxPartials",
        "chunks = std::min(chunks, 1000 * kMaxPartials",
        "metal/test_metal_scratch.py::test_of_decode_steps",
    ),
    Mutation(
        "what a mask says is found again where L is S alone",
        f"{PATCH}/described_masks.py",
        "known.lengths != (query.shape[-2], key_len)",
        "known.lengths != (key_len, query.shape[-2])",
        "patch/test_mask_memory.py::test_a_prompt_in_two_pieces",
    ),
    Mutation(
        "a module that is imported while the patch is on keeps it",
        f"{PATCH}/patch_points.py",
        "    exchange(list(_original_of.items()))\n",
        "",
        "patch/test_soak.py::test_all_ways_and_all_that_comes_between",
    ),
    Mutation(
        "what a call's kernel is told is not freed",
        f"{CPP}/op/forward.cpp",
        "cpu::AttentionArgs args = forward_args(call, named, by_name(outputs));",
        "cpu::AttentionArgs& args = *new auto(forward_args(call, named, by_name(outputs)));",
        "core/test_memory.py::test_nothing_grows",
    ),
]
