"""Breaks one promise after the other, and runs the test that must notice: `python tests/mutations.py [WORD ...]`.

Each row of MUTATIONS is a change of a line or two by which a promise of docs/reliability.md no longer holds. The last
commit is cloned into a folder of its own, built there, and must pass all the tests named; then one row at a time is
changed, built where it is C++, tested, and changed back. WORDs take the rows whose promise contains one of them. Needs
git and uv; about a minute for each row in C++, seconds for the others. Exit code 1 if a test does not notice.
"""

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]

CORE = "packages/flashattn-core/src/flashattn_core"
CPP = "packages/flashattn-core/csrc"
PATCH = "packages/mlxlm-flash-patch/src/mlxlm_flash_patch"
EVALS = "packages/evals/src/flash_evals"


@dataclass(frozen=True)
class Mutation:
    broken: str  # what no longer holds, in words: the row in docs/reliability.md
    file: str
    old: str  # occurs once
    new: str
    test: str  # in tests/, as pytest names it

    @property
    def is_cpp(self) -> bool:
        return Path(self.file).suffix in (".h", ".cpp")


MUTATIONS = [
    # masks
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
    # results
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
    # gradients
    Mutation(
        "the gradient of sinks has the wrong sign",
        f"{CPP}/gradient.cpp",
        "mx::array terms = mx::negative(mx::multiply(mx::exp(logits, stream), delta, stream), stream);",
        "mx::array terms = mx::multiply(mx::exp(logits, stream), delta, stream);",
        "core/test_gradients.py::test_extreme_sinks",
    ),
    Mutation(
        "NaN in a hidden key reaches a gradient",
        f"{CPP}/cpu/backward_kernels.cpp",
        "store(tile.score_gradient + at, hidden ? broadcast(0) : gradient);",
        "store(tile.score_gradient + at, gradient);",
        "core/test_gradients.py::test_hidden_nan_reaches_nothing",
    ),
    Mutation(
        "the gradient of a mask is taken by attention that has none",
        f"{PATCH}/route.py",
        "        return TRACED_MASK\n",
        "        pass\n",
        "patch/test_gradients.py::test_the_gradient_of_a_mask_is_mlx_lms_own",
    ),
    # process
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
    Mutation(
        "arrays that begin in the middle of an element are read as they are",
        f"{CPP}/primitive.cpp",
        "% input.itemsize() == 0",
        "% 1 == 0",
        "core/test_strides.py::test_views_that_begin_in_the_middle_of_an_element",
    ),
    Mutation(
        "another mlx is not refused",
        f"{CPP}/bindings.cpp",
        "if (found != built) {",
        "if (found.empty()) {",
        "core/test_process.py::test_another_mlx_is_refused_before_anything_runs",
    ),
    Mutation(
        "calls are not counted",
        f"{CPP}/counts.cpp",
        "fetch_add(1, std::memory_order_relaxed)",
        "fetch_add(0, std::memory_order_relaxed)",
        "core/test_plan.py::test_the_kernel_that_plan_names_is_the_one_that_runs",
    ),
    # patch
    Mutation(
        "disable() puts mlx-lm's object back whatever is there",
        f"{PATCH}/patch.py",
        "elif not wanted and held is place.ours:",
        "elif not wanted and place.key in _taken:",
        "patch/test_foreign.py::test_put_over_ours_meanwhile",
    ),
    Mutation(
        "the end of an inner block ends the outer one",
        f"{PATCH}/patch.py",
        "_end([request])",
        "_end(list(_requests))",
        "patch/test_enabled_block.py::test_an_inner_block_does_not_switch_off_an_outer_one",
    ),
    Mutation(
        "a module that is imported later is not patched",
        f"{PATCH}/patch.py",
        "_arrivals.listen(route.open)",
        "_arrivals.listen(False)",
        "patch/test_arrivals.py::test_imported_later",
    ),
    Mutation(
        "unpatch_model() leaves the patched classes",
        f"{PATCH}/instance.py",
        "_original_classes.get(type(module), type(module))",
        "type(module)",
        "patch/test_patch_model.py::test_this_model_and_no_other",
    ),
    Mutation(
        "fallbacks are not counted",
        f"{PATCH}/route.py",
        "route.fallbacks[reason] += 1",
        "route.fallbacks[reason] = 1",
        "patch/test_fallbacks.py::test_warned_once_for_each_reason_and_counted_each_time",
    ),
    Mutation(
        "strict lets a fallback pass",
        f"{PATCH}/route.py",
        "    if route.strict:\n",
        "    if route.strict is None:\n",
        "patch/test_strict.py::test_a_fallback_raises",
    ),
    Mutation(
        "another signature of mlx-lm's function is accepted",
        f"{PATCH}/places.py",
        "    registry.check_signature(original, tested=routed_attention)\n",
        "",
        "patch/test_signature.py::test_refused",
    ),
    Mutation(
        "a mask is taken for one of other lengths",
        f"{PATCH}/described_masks.py",
        "known is None or known.lengths != (query.shape[-2], key_len)",
        "known is None",
        "patch/test_described_masks.py::TestWhatIsRemembered::test_for_the_lengths_that_the_mask_was_made_for",
    ),
    # evaluation
    Mutation(
        "a resumed run counts windows twice",
        f"{EVALS}/perplexity.py",
        "plan[resumed:]",
        "plan",
        "evals/test_resume.py::test_it_goes_on_behind_what_the_file_holds",
    ),
    Mutation(
        "tokens at the edge of two windows are scored twice",
        f"{EVALS}/scoring.py",
        "        scored = end + 1\n",
        "        scored = end if result[1:] == [] and end > 1 else end + 1\n",
        "evals/test_windows.py::test_each_token_but_the_first_is_scored_once_and_in_order",
    ),
    Mutation(
        "Ctrl-C loses what was measured",
        f"{EVALS}/perplexity.py",
        "except (Exception, KeyboardInterrupt) as error:",
        "except Exception as error:",
        "evals/test_interrupted.py::test_perplexity",
    ),
    Mutation(
        "flash attention in the arm that is off goes unnoticed",
        f"{EVALS}/measure.py",
        'if name == "off" and ran:',
        'if name == "off" and not ran:',
        "evals/test_measure.py::test_a_process_that_is_patched_already_has_no_off_arm",
    ),
    Mutation(
        "costs are summed in float32",
        f"{EVALS}/scoring.py",
        "weights.sum(axis=-1, dtype=np.float64)",
        "np.cumsum(weights, axis=-1)[:, -1]",
        "evals/test_scoring.py::test_token_nll_of_a_large_vocabulary",
    ),
]


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def build(folder: Path) -> None:
    done = run(folder, "uv", "sync", "-q", "--reinstall-package", "flashattn-core")
    if done.returncode:
        raise SystemExit(f"it does not build:\n{done.stderr}")


def failing(folder: Path, *tests: str) -> str:
    """The first failing test's line, or an empty string. Whatever else pytest complains of ends the program."""
    files = [f"tests/{test}" for test in tests]
    done = run(folder, ".venv/bin/python", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files)
    line = next((line for line in done.stdout.splitlines() if line.startswith("FAILED")), "")
    if done.returncode != bool(line):
        raise SystemExit(f"pytest does not run:\n{done.stdout}{done.stderr}")
    return line


def noticed(folder: Path, mutation: Mutation) -> str:
    file = folder / mutation.file
    text = file.read_text()
    try:
        file.write_text(text.replace(mutation.old, mutation.new))
        if mutation.is_cpp:
            build(folder)
        return failing(folder, mutation.test)
    finally:
        file.write_text(text)


def main(*words: str) -> int:
    chosen = [m for m in MUTATIONS if not words or any(word in m.broken for word in words)]
    missed = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "clone")
        run(ROOT, "git", "clone", "-q", str(ROOT), str(folder))
        build(folder)
        if line := failing(folder, *dict.fromkeys(mutation.test for mutation in chosen)):
            raise SystemExit(f"fails with nothing broken: {line}")
        for mutation in sorted(chosen, key=lambda m: m.is_cpp):  # C++ last: the build is then that of no other
            line = noticed(folder, mutation)
            missed += not line
            print(f"{'noticed' if line else 'MISSED '}  {mutation.broken}  {line or mutation.test}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
