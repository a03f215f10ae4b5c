"""What is promised of the process, broken."""

from mutation import CPP, Mutation

MUTATIONS: list[Mutation] = [
    Mutation(
        "Ctrl-C ends no kernel",
        f"{CPP}/cpu/cancellation.cpp",
        "return requested_at != 0 && static_cast",
        "return requested_at < 0 && static_cast",
        "core/test_interrupt.py::test_what_a_cancelled_call_leaves",
    ),
    Mutation(
        "a cancelled call leaves what it has computed",
        f"{CPP}/cpu/cancellation.h",
        "catch (const Cancelled&) {\n    leave_nan();\n",
        "catch (const Cancelled&) {\n",
        "core/test_interrupt.py::test_what_a_cancelled_call_leaves",
    ),
    Mutation(
        "another mlx is not refused",
        f"{CPP}/bindings.cpp",
        "if (found != built) {",
        "if (found.empty()) {",
        "core/test_process.py::test_another_mlx_is_refused_before_anything_runs",
    ),
]
