"""What is promised of the patch, broken."""

from mutation import PATCH, Mutation

MUTATIONS: list[Mutation] = [
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
]
