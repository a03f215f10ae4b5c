"""What is promised of gradients, broken."""

from .mutation import CORE, CPP, PATCH, Mutation

MUTATIONS: list[Mutation] = [
    Mutation(
        "the gradient of sinks has the wrong sign",
        f"{CPP}/op/gradient.cpp",
        "mx::array terms = mx::negative(mx::multiply(mx::exp(logits, stream), delta, stream), stream);",
        "mx::array terms = mx::multiply(mx::exp(logits, stream), delta, stream);",
        "core/test_gradients.py::test_by_finite_differences",
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
        f"{PATCH}/obstacles.py",
        '        return f"{TRACED} of an additive mask"\n',
        "        pass\n",
        "patch/test_gradients.py::test_the_gradient_of_a_mask_is_mlx_lms_own",
    ),
    Mutation(
        "the gradient of out is read by the strides of out",
        f"{CPP}/op/cpu_call.cpp",
        ".out_gradient_strides = strides_of(further.out_gradient, batch_dims, kTensorAxes),",
        ".out_gradient_strides = strides_of(further.saved.out, batch_dims, kTensorAxes),",
        "core/test_gradients.py::test_strided",
    ),
    Mutation(
        "the rows of a band are as many as there are threads for",
        f"{CPP}/cpu/backward.cpp",
        "int queries = std::max(1, max_rows / heads);",
        "int queries = std::max(1, max_rows / heads / num_threads());",
        "core/test_threads.py::test_any_number_of_threads",
    ),
    Mutation(
        "probabilities are exp(score) / exp(lse) in the backward pass",
        f"{CPP}/cpu/backward_kernels.cpp",
        "vfloat probability = exp2((score - load(tile.row_max + lane)) * kLog2e - log2_sum);",
        "vfloat probability = exp2(score * kLog2e) / exp2(load(tile.row_max + lane) * kLog2e + log2_sum);",
        "core/test_gradients.py::TestAdversarial::test_lse_beyond_what_exp_can_take",
    ),
    Mutation(
        "the gradient of an additive mask is 0 without a word",
        f"{CORE}/arguments.py",
        "given: Any = lower(mask)",
        "given: Any = {k: mx.stop_gradient(a) if k == 'bias' else a for k, a in lower(mask).items()}",
        "core/test_gradients.py::test_what_has_no_gradient_says_so",
    ),
    Mutation(
        "with the patch no gradient reaches the keys",
        f"{PATCH}/route.py",
        "return attention(queries, keys, values, scale,",
        "return attention(queries, mx.stop_gradient(keys), values, scale,",
        "patch/test_gradients.py::test_training_is_the_same",
    ),
]
