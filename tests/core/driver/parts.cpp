// Prints how much of the processor's peak each part of the CPU kernels reaches, on one thread with operands in the
// caches. It includes the kernels' text, because their parts are not declared anywhere else. docs/dev/cpu.md shows its
// output.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <initializer_list>
#include <random>
#include <vector>

#include "backward_kernels.cpp"
#include "block_map_kernels.cpp"
#include "kernels.cpp"
#include "roofline_loops.cpp"

using namespace flashattn;
using namespace flashattn::cpu;
using namespace flashattn::cpu::FLASHATTN_ISA;

namespace {

constexpr int kHeads = 7;

// The least time of many short calls, because other programs use the machine, too.
template <typename Call>
double seconds(Call call) {
  using Clock = std::chrono::steady_clock;
  double least = 1;
  for (auto start = Clock::now(); Clock::now() - start < std::chrono::milliseconds(200);) {
    auto begin = Clock::now();
    call();
    least = std::min(least, std::chrono::duration<double>(Clock::now() - begin).count());
  }
  return least;
}

Strides row_major(int64_t rows, int64_t columns) {
  return {.column = 1, .row = columns, .head = rows * columns, .batch = {}};
}

struct Calls {
  std::vector<float> query, key, value, out, lse, stats, gradient;
  BackwardArgs args = {};

  Calls(int queries, int keys, int dim)
      : query(numbers(kHeads * queries * dim)),
        key(numbers(keys * dim)),
        value(numbers(keys * dim)),
        out(numbers(kHeads * queries * dim)),
        lse(kHeads * queries),
        stats(2 * kHeads * queries, 1.0f),
        gradient(2 * (kHeads * queries + keys) * dim) {
    AttentionArgs& a = args.forward;
    AttentionParams& p = a.params;
    p.batch_size = 1;
    p.num_heads = kHeads;
    p.num_kv_heads = 1;
    p.query_len = queries;
    p.key_len = keys;
    p.head_dim = p.value_dim = dim;
    p.scale = 1 / __builtin_sqrtf(static_cast<float>(dim));
    a.query = query.data();
    a.key = key.data();
    a.value = value.data();
    a.out = out.data();
    a.lse = lse.data();
    a.row_stats = stats.data();
    p.query = p.out = args.out_gradient_strides = row_major(queries, dim);
    p.key = p.value = row_major(keys, dim);
    p.lse = row_major(queries, 1);
    p.row_stats = row_major(queries, 2);
  }

 private:
  static std::vector<float> numbers(int count) {
    static std::minstd_rand random(1);
    std::vector<float> all(count);
    for (float& each : all) each = std::normal_distribution<float>()(random);
    return all;
  }
};

double peak() {
  constexpr int64_t kSteps = 5000;
  volatile float result = 0;
  return kSteps * roofline_loops.flops_per_step / seconds([&] { result = roofline_loops.multiply_add(kSteps); });
}

void print_forward(int dim) {
  int queries = 32768 / dim / kHeads;
  Calls calls(queries, 2 * kKeyTile, dim);
  const AttentionArgs& args = calls.args.forward;
  RowBlock block = {0, 0, kHeads, 0, queries, 0, args.params.key_len, false};
  Scratch& s = kept_scratch;
  double whole = seconds([&] { attend(args, block); });
  s.prepare(block.rows(), args.params, false);
  load_rows(s, args, block);
  const Band& band = s.bands[1];
  double pack = seconds([&] { pack_values(s, PlainRows<float>{calls.value.data(), dim, 1, dim}, kKeyTile); });
  double scores = seconds([&] {
    multiply(Left{calls.key.data(), dim, 1}, Packed{s.query + int64_t{band.first} * dim, dim, band.padded_rows, 0},
             kKeyTile, dim, band.padded_rows, {s.scores, band.padded_rows, nullptr});
  });
  double softmax = seconds([&] { online_softmax(s, band, kKeyTile); });
  double output = seconds([&] {
    multiply(Left{s.scores, 1, band.padded_rows}, Packed{s.value, kKeyTile, dim, 0}, band.rows, kKeyTile, dim,
             {s.output, dim, s.rescale + band.first});
  });
  double flops = 2.0 * dim * band.rows * kKeyTile, best = peak();
  double ideal = 2 * flops / best;
  std::printf(
      "head_dim %d: block %.0f%%, first product %.0f%%, second %.0f%% of the peak; softmax %.0f%%, packing %.0f%% of "
      "the "
      "products' least time\n",
      dim, 100 * 4.0 * dim * block.rows() * args.params.key_len / whole / best, 100 * flops / scores / best,
      100 * flops / output / best, 100 * softmax / ideal, 100 * pack / ideal * band.rows / block.rows());
}

// With 32 bits keys are float32, with 16 bfloat16, and with fewer quantised.
void print_decode(int dim, int bits) {
  constexpr int kKeys = 512, kGroup = 64;
  Calls calls(1, kKeys, dim);
  AttentionArgs& args = calls.args.forward;
  std::vector<bfloat_t> query(kHeads * dim), keys(kKeys * dim), scales(kKeys * dim / kGroup);
  for (bfloat_t& each : scales) from_float(0.01f, &each);
  for (int i = 0; i < kHeads * dim; ++i) from_float(calls.query[i], &query[i]);
  for (int i = 0; i < kKeys * dim; ++i) from_float(calls.key[i], &keys[i]);
  if (bits < 32) {
    args.dtype = args.group_dtype = Dtype::bfloat16;
    args.query = query.data();
    args.key = args.value = keys.data();
  }
  if (bits < 16) {
    AttentionParams& p = args.params;
    p.bits = bits;
    p.group_size = kGroup;
    p.key = p.value = row_major(kKeys, dim * bits / 32);
    args.key_scales = args.key_biases = args.value_scales = args.value_biases = scales.data();
    p.key_scales = p.key_biases = p.value_scales = p.value_biases = row_major(kKeys, dim / kGroup);
  }
  RowBlock block = {0, 0, kHeads, 0, 1, 0, kKeys, true};
  std::vector<float> partial(kHeads * partial_row_size(dim));
  double time = seconds([&] { attend_partial(args, block, partial.data()); });
  std::printf("head_dim %d: decode with %d bits %.0f%%\n", dim, bits, 100 * 4.0 * dim * kHeads * kKeys / time / peak());
}

struct NoTurns final : Turns {
  void wait(int, int) override {}
  void done(int) override {}
};

void print_backward(int dim) {
  constexpr int kQueries = 96;
  Calls calls(kQueries, 2 * kKeyTile, dim);
  BackwardArgs& args = calls.args;
  std::vector<float> delta(kHeads * kQueries);
  args.exact_out = calls.out.data();
  args.out_gradient = calls.out.data();
  args.query_gradient = calls.gradient.data();
  args.key_gradient = calls.gradient.data() + calls.query.size();
  args.value_gradient = calls.gradient.data() + calls.query.size() + calls.key.size();
  args.delta = delta.data();
  std::vector<RowBand> bands;
  for (int i = 0; i < kQueries; i += kBandRows / kHeads) {
    RowBlock block = {0, 0, kHeads, i, smaller(kBandRows / kHeads, kQueries - i), 0, 2 * kKeyTile, false};
    bands.push_back({block, 0, 3});
  }
  KeyTile keys = {0, 0, 1, kKeyTile, 2 * kKeyTile, bands.data(), static_cast<int>(bands.size()), nullptr};
  NoTurns turns;
  double time = seconds([&] { attend_backward<float>(args, keys, turns); });
  std::printf("head_dim %d: backward %.0f%%\n", dim, 100 * 10.0 * dim * kHeads * kQueries * kKeyTile / time / peak());
}

}  // namespace

int main() {
  for (int dim : {64, 128}) {
    print_forward(dim);
    for (int bits : {32, 16, 8, 4}) print_decode(dim, bits);
    print_backward(dim);
  }
}
