// Runs the forward or the backward pass of one case and compares the results with the plain formulas.
#pragma once

#include "backward.h"
#include "compare.h"

namespace flashattn::driver {

inline void check_forward(const Case& c, const Inputs& in, Draw& draw, Check& check) {
  CpuCall call(c, in, draw);
  call.run();
  Outputs truth = plain_attention<double>(c, in), unfused = plain_attention<float>(c, in);
  check.compare("out", call.out, truth.out, unfused.out, c.dtype);
  check.compare("lse", call.lse, truth.lse, unfused.lse, Dtype::float32);
}

// At times a cotangent is broadcast along its columns or along all axes, like the gradient of a sum.
inline Tensor any_cotangent(const Case& c, Draw& draw, int columns) {
  if (draw.chance(10)) return Tensor(broadcast_batch(c), 1, 1, 1, kRowMajor);
  if (draw.chance(10)) return any_tensor(c, draw, c.heads(), c.query_len, 1);
  return any_tensor(c, draw, c.heads(), c.query_len, columns);
}

inline Cotangents draw_cotangents(const Case& c, Draw& draw) {
  Cotangents cotangents = {any_cotangent(c, draw, c.value_dim), any_cotangent(c, draw, 1)};
  bool uses_lse = draw.chance(60);  // MLX passes a cotangent of zeros for a loss that does not depend on lse
  const auto normal = [&](Dtype dtype) { return [&draw, dtype] { return rounded(draw.normal(), dtype); }; };
  fill(cotangents.out, c.batch_size(), c.heads(), c.query_len, c.value_dim, normal(c.dtype));
  fill(cotangents.lse, c.batch_size(), c.heads(), c.query_len, 1, normal(Dtype::float32));
  if (!uses_lse) fill(cotangents.lse, c.batch_size(), c.heads(), c.query_len, 1, [] { return 0.0; });
  if (c.poison && c.rows() > 0 && draw.chance(30)) {
    cotangents.out.at(0, draw.below(c.heads()), draw.below(c.query_len), draw.below(c.value_dim)) = kNaN;
  }
  return cotangents;
}

// The gradient of a call. `args` points to the memory of the other members and of the call.
struct GradientCall {
  Cotangents cotangents;
  std::vector<uint8_t> of_out, of_lse;
  Result query, key, value, delta;
  cpu::BackwardArgs args = {};

  GradientCall(const Case& c, const CpuCall& call, const Cotangents& back)
      : cotangents(back),
        of_out(cotangents.out.in_memory(c.dtype)),
        of_lse(cotangents.lse.in_memory(Dtype::float32)),
        query(row_major(c, c.heads(), c.query_len, c.head_dim, c.dtype)),
        key(row_major(c, c.kv_heads, c.key_len, c.head_dim, c.dtype)),
        value(row_major(c, c.kv_heads, c.key_len, c.value_dim, c.dtype)),
        delta(row_major(c, c.heads(), c.query_len, 1, Dtype::float32)) {
    args.forward = call.args;
    args.decoded = c.decode;
    args.exact_out = c.dtype == Dtype::float32 ? static_cast<const float*>(call.args.out) : call.args.exact_out;
    args.out_gradient = cotangents.out.first(of_out, format(c.dtype).bytes);
    args.out_gradient_strides = cotangents.out.strides;
    args.lse_gradient = reinterpret_cast<const float*>(cotangents.lse.first(of_lse, 4));
    args.lse_gradient_strides = cotangents.lse.strides;
    args.query_gradient = query.first();
    args.key_gradient = key.first();
    args.value_gradient = value.first();
    args.delta = static_cast<float*>(delta.first());
  }
  GradientCall(const GradientCall&) = delete;

  void run() { cpu::backward(args); }
  std::vector<Result*> results() { return {&query, &key, &value, &delta}; }

 private:
  static Result row_major(const Case& c, int heads, int rows, int columns, Dtype dtype) {
    return Result(c, Tensor(c.batch, heads, rows, columns, kRowMajor), heads, rows, columns, dtype);
  }
};

inline void check_backward(const Case& c, const Inputs& in, Draw& draw, Check& check) {
  // Allows about eight more units in float32's last place, because the unfused formula's error may be small by luck.
  // That happens if one key or row has all of the weight, because a gradient then has only a few large sums.
  constexpr double kRelative = 1e-6;
  CpuCall call(c, in, draw, true);
  call.run();
  Outputs exact_outputs = plain_attention<double>(c, in), unfused_outputs = plain_attention<float>(c, in);
  if (c.dtype != Dtype::float32) {
    check.compare("exact_out", call.exact_out, exact_outputs.out, unfused_outputs.out, Dtype::float32);
  }
  GradientCall gradients(c, call, draw_cotangents(c, draw));
  gradients.run();
  Gradients truth = plain_gradients<double>(c, in, gradients.cotangents, exact_outputs.out),
            unfused = plain_gradients<float>(c, in, gradients.cotangents, unfused_outputs.out);
  check.compare("query's gradient", gradients.query, truth.query, unfused.query, c.dtype, kRelative);
  check.compare("key's gradient", gradients.key, truth.key, unfused.key, c.dtype, kRelative);
  check.compare("value's gradient", gradients.value, truth.value, unfused.value, c.dtype, kRelative);
  check.compare("delta", gradients.delta, truth.delta, unfused.delta, Dtype::float32, kRelative);
}

}  // namespace flashattn::driver
