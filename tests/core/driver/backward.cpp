// Runs the forward pass and then the gradient over the cases that forward.cpp runs too, and compares the gradient with
// its formulas written plainly.
//
//   backward CASES [FIRST]
#include "backward.h"

#include "check.h"

using namespace flashattn;
using namespace flashattn::driver;

namespace {

// Of a gradient's own size, beside what the rule allows: eight units of float32's last place. Where one key or row has
// all of the weight, a few large sums are all there is, and how far unfused is off at its worst is a matter of luck.
constexpr double kRelative = 1e-6;

// Now and then the same number for a whole row, or for all: what comes back from a sum is broadcast.
Tensor any_cotangent(const Case& c, Draw& draw, int columns) {
  if (draw.chance(10)) return Tensor(std::vector<int>(c.batch.size(), 1), 1, 1, 1, any_order(draw), 0);
  if (draw.chance(10)) return any_tensor(c, draw, c.heads(), c.query_len, 1);
  return any_tensor(c, draw, c.heads(), c.query_len, columns);
}

Cotangents draw_cotangents(const Case& c, Draw& draw) {
  Cotangents cotangents = {any_cotangent(c, draw, c.value_dim), any_cotangent(c, draw, 1), draw.chance(60)};
  const auto normal = [&](cpu::Dtype dtype) { return [&draw, dtype] { return rounded(draw.normal(), dtype); }; };
  fill(cotangents.out, c.batch_size(), c.heads(), c.query_len, c.value_dim, normal(c.dtype));
  fill(cotangents.lse, c.batch_size(), c.heads(), c.query_len, 1, normal(cpu::Dtype::float32));
  if (c.poison && draw.chance(30)) {
    cotangents.out.at(0, draw.below(c.heads()), draw.below(c.query_len), draw.below(c.value_dim)) = kNaN;
  }
  return cotangents;
}

void check_case(const Case& c, const Inputs& in, Draw& draw, Check& check) {
  Call call(c, in, draw);
  Cotangents cotangents = draw_cotangents(c, draw);
  std::vector<uint8_t> of_out = cotangents.out.in_memory(c.dtype),
                       of_lse = cotangents.lse.in_memory(cpu::Dtype::float32);
  const auto row_major = [&](int heads, int rows, int columns, cpu::Dtype dtype) {
    return Result(c, Tensor(c.batch, heads, rows, columns, {kHead, kRow, kColumn}, 0), heads, rows, columns, dtype);
  };
  Result query = row_major(c.heads(), c.query_len, c.head_dim, c.dtype),
         key = row_major(c.kv_heads, c.key_len, c.head_dim, c.dtype),
         value = row_major(c.kv_heads, c.key_len, c.value_dim, c.dtype),
         delta = row_major(c.heads(), c.query_len, 1, cpu::Dtype::float32);

  cpu::BackwardArgs args = {};
  args.forward = call.args;
  args.out_gradient = of_out.data();
  args.out_gradient_strides = cotangents.out.strides;
  args.lse_gradient = cotangents.of_lse ? reinterpret_cast<const float*>(of_lse.data()) : nullptr;
  args.lse_gradient_strides = cotangents.lse.strides;
  args.query_gradient = query.memory();
  args.key_gradient = key.memory();
  args.value_gradient = value.memory();
  args.delta = static_cast<float*>(delta.memory());
  cpu::backward(args);

  std::vector<double> out = call.out.numbers();
  Gradients truth = plain_gradients<double>(c, in, cotangents, out),
            unfused = plain_gradients<float>(c, in, cotangents, out);
  check.compare("query's gradient", query, truth.query, unfused.query, c.dtype, kRelative);
  check.compare("key's gradient", key, truth.key, unfused.key, c.dtype, kRelative);
  check.compare("value's gradient", value, truth.value, unfused.value, c.dtype, kRelative);
  check.compare("delta", delta, truth.delta, unfused.delta, cpu::Dtype::float32);
}

}  // namespace

int main(int argc, char** argv) {
  return check_cases(argc, argv, false, check_case);
}
