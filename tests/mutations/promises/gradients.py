"""What is promised of gradients, broken."""

from .mutation import CORE, CPP, PATCH, Mutation

MUTATIONS: list[Mutation] = [
    Mutation(
        "the gradient of sinks has the wrong sign",
        f"{CPP}/op/sinks_gradient.cpp",
        "mx::array terms = mx::negative(mx::multiply(weights, delta, stream), stream);",
        "mx::array terms = mx::multiply(weights, delta, stream);",
        "core/test_gradients.py::test_by_finite_differences",
    ),
    Mutation(
        "a sink's weight is exp(sink - lse)",
        f"{CPP}/op/sinks_gradient.cpp",
        "zero, mx::divide(mx::exp(exponent, s), row_sum, s), s);",
        "zero, mx::exp(mx::subtract(sink, *saved.lse, s), s), s);",
        "core/test_gradients.py::test_a_sink_beside_a_score_as_large",
    ),
    Mutation(
        "NaN in a hidden key reaches a gradient",
        f"{CPP}/cpu/backward_kernels.cpp",
        "store(tile.score_gradient + at, hidden ? broadcast(0) : gradient);",
        "store(tile.score_gradient + at, gradient);",
        "core/test_gradients.py::test_hidden_nan_reaches_nothing",
    ),
    Mutation(
        "a mask that wants a gradient gets the gradient of a mask that only hides",
        f"{CPP}/op/derivatives.cpp",
        "result[part.places[i]] = gradients[i];",
        "result[part.places[i]] = mx::zeros_like(gradients[i]);",
        "core/test_mask_gradients.py::test_additive_mask",
    ),
    Mutation(
        "a mask that only hides has a gradient",
        f"{CPP}/op/derivatives.cpp",
        "result.push_back(mx::zeros_like(primals[argument]));",
        "result.push_back(mx::ones_like(primals[argument]));",
        "core/test_mask_gradients.py::test_what_only_hides_has_zeros",
    ),
    Mutation(
        "a tangent of the values alone is forgotten",
        f"{CPP}/op/unfused.cpp",
        "Input::value_scales, Input::value_biases, options, s);",
        "Input::value_scales, Input::value_biases, options, s);\n  value = mx::stop_gradient(value, s);",
        "core/test_jvp.py::test_of_out_and_lse",
    ),
    Mutation(
        "the second derivative of sinks is left out",
        f"{CPP}/op/sinks_gradient.cpp",
        "return mx::multiply(mx::stop_gradient(weights, s), one, s);",
        "return mx::stop_gradient(weights, s);",
        "core/test_second_derivatives.py::test_hessian_times_vector",
    ),
    Mutation(
        "a function that is exported keeps a primitive that MLX cannot write",
        f"{CPP}/op/exporting.cpp",
        "search.found = search.found ||",
        "search.found = false &&",
        "core/test_export.py::test_it_is_read_without_this_package",
    ),
    Mutation(
        "an exported function has the lengths that it was exported with",
        f"{CPP}/op/unfused.cpp",
        "return mx::cumsum(ones, 0, after, /*inclusive=*/false, s);",
        "return mx::cumsum(mx::ones({tensor.shape(kRow)}, mx::int32, s), 0, after, /*inclusive=*/false, s);",
        "core/test_export.py::test_shapeless",
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
        "core/test_mask_gradients.py::test_additive_mask",
    ),
    Mutation(
        "with the patch no gradient reaches the keys",
        f"{PATCH}/route.py",
        "out = _ext.quick(queries, keys, values, scale,",
        "out = _ext.quick(queries, mx.stop_gradient(keys), values, scale,",
        "patch/test_gradients.py::test_training_is_the_same",
    ),
]
