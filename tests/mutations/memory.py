"""What is promised of memory, broken."""

from mutation import CPP, Mutation

MUTATIONS: list[Mutation] = [
    Mutation(
        "memory that MLX does not get is taken for granted",
        f"{CPP}/primitive.cpp",
        "output.nbytes() > 0 && !data.buffer().ptr()",
        "output.nbytes() > 0 && data.buffer().ptr() == &data",
        "core/test_allocation_failure.py::test_results_that_no_machine_holds",
    ),
    Mutation(
        "strides that reach beyond all memory pass the check",
        f"{CPP}/cpu/check.cpp",
        "if (last - first >= kMaxElements) {",
        "if (last - first >= kMaxElements && array.element_size == 0) {",
        "core/test_contract.py::test_each_violation_is_refused_and_its_neighbour_is_not",
    ),
]
