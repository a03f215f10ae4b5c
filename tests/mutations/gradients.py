"""What is promised of gradients, broken."""

from mutation import CPP, PATCH, Mutation

MUTATIONS: list[Mutation] = [
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
]
