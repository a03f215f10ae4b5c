"""What is promised of evaluation, broken."""

from mutation import EVALS, Mutation

MUTATIONS: list[Mutation] = [
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
