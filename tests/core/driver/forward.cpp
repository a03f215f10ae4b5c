// Runs both kernels over cases drawn at random, every option of the front door among them, and compares with the
// formula written plainly. Needs nothing but the C++ library, so it also runs where Python and MLX do not: cross-built,
// under an emulator.
//
//   forward CASES [FIRST]
//
// Case number n is the same in every run and on every machine. Prints the instruction set and the number of
// threads, the worst error, and a checksum of all outputs; or the first case that fails.
//
// The rule: the plain formula in float64 is the truth. The same formula in float32, unfused, errs too; the kernels
// may err twice as much as it does at its worst, plus 1e-5, plus half of the last place that the output's dtype
// keeps. 16-bit inputs are rounded before anyone sees them, and the kernels compute in float32 whatever the dtype:
// nothing else of a 16-bit result is excused.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "attention.h"

using namespace flashattn;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Multiply-adds of a case: some hundred cases take less than a minute under an emulator.
constexpr int64_t kMostWork = 1 << 21;

struct Draw {
  std::mt19937 bits;

  int below(int n) { return static_cast<int>(bits() % static_cast<unsigned>(n)); }
  bool chance(int percent) { return below(100) < percent; }
  double uniform() { return bits() * 0x1p-32; }
  double normal() { return (uniform() + uniform() + uniform() + uniform() - 2) * std::sqrt(3.0); }  // nearly
  int pick(const std::vector<int>& choices) { return choices[static_cast<size_t>(below(int(choices.size())))]; }
};

// --- Numbers in memory: what each storage type can hold, and its bits.

struct Format {
  const char* name;
  size_t bytes;
  int precision;       // bits of the significand
  int smallest_place;  // exponent of the last place of the smallest numbers
};
const Format& format(cpu::Dtype dtype) {
  static const Format formats[] = {{"float32", 4, 24, -149}, {"float16", 2, 11, -24}, {"bfloat16", 2, 8, -133}};
  return formats[static_cast<int>(dtype)];
}

double last_place(double x, cpu::Dtype dtype) {
  int exponent;
  std::frexp(x, &exponent);
  return std::ldexp(1, std::max(exponent - format(dtype).precision, format(dtype).smallest_place));
}

double rounded(double x, cpu::Dtype dtype) {
  return std::isfinite(x) ? std::nearbyint(x / last_place(x, dtype)) * last_place(x, dtype) : x;
}

// x is a number that the dtype holds.
void write_element(double x, cpu::Dtype dtype, uint8_t* target) {
  uint32_t bits;
  float as_float = static_cast<float>(x);
  std::memcpy(&bits, &as_float, sizeof(bits));
  if (dtype == cpu::Dtype::float32) {
    std::memcpy(target, &bits, 4);
    return;
  }
  uint16_t half = static_cast<uint16_t>(bits >> 16);  // bfloat16 is float32's upper half
  if (dtype == cpu::Dtype::float16) {
    uint32_t magnitude = 0x7e00;  // NaN
    if (std::isinf(x)) {
      magnitude = 0x7c00;
    } else if (std::abs(x) < 0x1p-14) {
      magnitude = static_cast<uint32_t>(std::abs(x) * 0x1p24);
    } else if (std::isfinite(x)) {
      int exponent = std::ilogb(x);
      magnitude = static_cast<uint32_t>((std::ldexp(std::abs(x), -exponent) - 1 + exponent + 15) * 1024);
    }
    half = static_cast<uint16_t>((std::signbit(x) ? 0x8000u : 0u) | magnitude);
  }
  std::memcpy(target, &half, 2);
}

double read_element(cpu::Dtype dtype, const uint8_t* source) {
  uint32_t bits = 0;
  std::memcpy(&bits, source, format(dtype).bytes);
  if (dtype == cpu::Dtype::float16) {
    int exponent = static_cast<int>(bits >> 10 & 31), fraction = static_cast<int>(bits & 1023);
    double magnitude = exponent == 31  ? (fraction ? kNaN : kInf)
                       : exponent == 0 ? fraction * 0x1p-24
                                       : std::ldexp(1024 + fraction, exponent - 25);
    return bits & 0x8000 ? -magnitude : magnitude;
  }
  if (dtype == cpu::Dtype::bfloat16) bits <<= 16;
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return static_cast<double>(x);
}

// --- Tensors (*B, heads, rows, columns) in any order, with gaps, or broadcast.

enum Dimension { kHead, kRow, kColumn };

struct Tensor {
  std::vector<int> batch_shape;
  Strides strides = {};
  std::vector<double> numbers;  // at the strides' positions; NaN in the gaps

  // An extent of 1 where the case has more is broadcast: stride 0. `order` from the widest stride to the narrowest.
  Tensor(const std::vector<int>& batch, int heads, int rows, int columns, const std::vector<Dimension>& order, int gap)
      : batch_shape(batch) {
    int64_t size = 1;
    const auto place = [&](int extent) {
      int64_t stride = extent == 1 ? 0 : size;
      size *= extent;
      return stride;
    };
    for (size_t d = order.size(); d-- > 0; size += gap) {
      switch (order[d]) {
        case kHead: strides.head = place(heads); break;
        case kRow: strides.row = place(rows); break;
        case kColumn: strides.column = place(columns); break;
      }
    }
    for (size_t d = batch.size(); d-- > 0;) strides.batch[d] = place(batch[d]);
    numbers.assign(static_cast<size_t>(size), kNaN);
  }

  size_t offset(int64_t batch, int head, int row, int column) const {
    int64_t offset = head * strides.head + row * strides.row + column * strides.column;
    for (size_t d = batch_shape.size(); d-- > 0; batch /= batch_shape[d]) {
      offset += batch % batch_shape[d] * strides.batch[d];
    }
    return static_cast<size_t>(offset);
  }
  double& at(int64_t batch, int head, int row, int column) { return numbers[offset(batch, head, row, column)]; }
  double at(int64_t batch, int head, int row, int column) const { return numbers[offset(batch, head, row, column)]; }

  std::vector<uint8_t> in_memory(cpu::Dtype dtype) const {
    std::vector<uint8_t> memory(numbers.size() * format(dtype).bytes);
    for (size_t i = 0; i < numbers.size(); ++i) {
      write_element(numbers[i], dtype, memory.data() + i * format(dtype).bytes);
    }
    return memory;
  }
};

const std::vector<Dimension>& any_order(Draw& draw) {
  static const std::vector<Dimension> orders[] = {
      {kHead, kRow, kColumn}, {kRow, kHead, kColumn}, {kHead, kColumn, kRow}};
  return orders[draw.below(3)];
}

// --- One case: its variables, then its inputs.

struct Case {
  int number;
  bool decode;
  cpu::Dtype dtype, bias_dtype;
  std::vector<int> batch;
  int kv_heads, group, query_len, key_len, head_dim, value_dim;
  double query_size;  // 8: a few keys take all of the weight
  bool causal, strided;
  int window, tree_size;
  float softcap;
  bool key_range, visible, bias, sinks, alibi, poison;

  int heads() const { return kv_heads * group; }
  int64_t batch_size() const {
    int64_t size = 1;
    for (int extent : batch) size *= extent;
    return size;
  }
  int64_t work() const { return batch_size() * heads() * query_len * key_len * (head_dim + value_dim); }

  std::string describe() const {
    std::string text = "case " + std::to_string(number) + ": " + (decode ? "decode " : "prefill ") + format(dtype).name;
    for (int extent : batch) text += " B " + std::to_string(extent);
    const auto add = [&](bool present, const std::string& what) { text += present ? ", " + what : ""; };
    add(true, "heads " + std::to_string(heads()) + "/" + std::to_string(kv_heads));
    add(true, "L " + std::to_string(query_len) + ", S " + std::to_string(key_len));
    add(true, "D " + std::to_string(head_dim) + ", D_v " + std::to_string(value_dim));
    add(query_size != 1, "large scores");
    add(strided, "strided");
    add(causal, "causal");
    add(window > 0, "window " + std::to_string(window));
    add(key_range, "key range");
    add(visible, "bool array");
    add(bias, std::string("bias ") + format(bias_dtype).name);
    add(tree_size > 0, "tree " + std::to_string(tree_size));
    add(softcap > 0, "softcap");
    add(sinks, "sinks");
    add(alibi, "alibi");
    add(poison, "NaN and infinity in keys");
    return text;
  }
};

cpu::Dtype any_dtype(Draw& draw) {
  return static_cast<cpu::Dtype>(draw.below(3));
}

Case draw_case(Draw& draw, int number) {
  static const std::vector<int> batches[] = {{}, {2}, {2, 3}};
  static const std::vector<int> dims = {1, 7, 64, 72, 80, 128, 200, 512};
  Case c = {};
  c.number = number;
  // The lengths first, and then what still fits: small cases alone would never meet a second tile.
  c.query_len = draw.pick({1, 2, 5, 8, 9, 33, 64, 97, 131});
  c.key_len = draw.chance(4) ? 0 : draw.pick({1, 7, 33, 96, 97, 193, 511, 700, 1100});
  do {
    c.batch = batches[draw.below(3)];
    c.kv_heads = draw.pick({1, 2});
    c.group = draw.pick({1, 2, 7});
    c.head_dim = draw.pick(dims);
    c.value_dim = draw.chance(50) ? c.head_dim : draw.pick(dims);
  } while (c.work() > kMostWork);
  c.decode = c.query_len <= cpu::kMaxDecodeLen && draw.chance(75);
  c.dtype = any_dtype(draw);
  c.bias_dtype = any_dtype(draw);
  c.query_size = draw.chance(20) ? 8 : 1;
  c.strided = draw.chance(50);
  c.causal = draw.chance(40);
  c.window = c.causal && draw.chance(40) ? draw.pick({1, 20, 100}) : 0;
  c.tree_size = draw.chance(20) ? std::min(c.key_len, draw.pick({1, c.query_len, 31, 32, 33, 70})) : 0;
  c.softcap = draw.chance(25) ? 3.0f : 0.0f;
  c.key_range = draw.chance(25);
  c.visible = draw.chance(25);
  c.bias = draw.chance(25);
  c.sinks = draw.chance(25);
  c.alibi = draw.chance(25);
  c.poison = draw.chance(30);
  return c;
}

struct Inputs {
  Tensor query, key, value, visible, bias, tree;
  Tensor sinks, alibi_slopes;                // one a head
  std::vector<int32_t> key_start, key_stop;  // one a batch element
};

bool sees(const Case& c, const Inputs& in, int64_t b, int head, int i, int j) {
  int position = i + c.key_len - c.query_len;
  if (c.causal && j > position) return false;
  if (c.window > 0 && position - j >= c.window) return false;
  if (c.key_range && (j < in.key_start[size_t(b)] || j >= in.key_stop[size_t(b)])) return false;
  if (c.visible && in.visible.at(b, head, i, j) == 0) return false;
  if (c.bias && in.bias.at(b, head, i, j) == -kInf) return false;
  int node = i + c.tree_size - c.query_len, other = j + c.tree_size - c.key_len;
  return other < 0 || (node >= 0 && in.tree.at(b, 0, node, other) != 0);
}

// What must not reach a row: keys that no row of the group sees hold NaN or infinity, one key among those that
// some rows see holds one NaN.
void poison(const Case& c, Draw& draw, Inputs& in) {
  for (int64_t b = 0; b < c.batch_size(); ++b) {
    for (int g = 0; g < c.kv_heads; ++g) {
      for (int j = 0; j < c.key_len; ++j) {
        bool seen = false;
        for (int row = 0; row < c.group * c.query_len && !seen; ++row) {
          seen = sees(c, in, b, g * c.group + row / c.query_len, row % c.query_len, j);
        }
        if (seen) continue;
        double with = draw.chance(50) ? kNaN : draw.chance(50) ? kInf : -kInf;
        for (int d = 0; d < c.head_dim; ++d) in.key.at(b, g, j, d) = with;
        for (int d = 0; d < c.value_dim; ++d) in.value.at(b, g, j, d) = with;
      }
      if (c.key_len > 0 && draw.chance(50)) {
        int j = draw.below(c.key_len);
        if (draw.chance(50)) {
          in.key.at(b, g, j, draw.below(c.head_dim)) = kNaN;
        } else {
          in.value.at(b, g, j, draw.below(c.value_dim)) = kNaN;
        }
      }
    }
  }
}

Inputs draw_inputs(const Case& c, Draw& draw) {
  const auto tensor = [&](int heads, int rows, int columns) {
    return c.strided ? Tensor(c.batch, heads, rows, columns, any_order(draw), draw.pick({0, 3}))
                     : Tensor(c.batch, heads, rows, columns, {kHead, kRow, kColumn}, 0);
  };
  const auto mask = [&](bool present) {  // full, or the same for all heads, all queries, or all of the batch
    std::vector<int> batch = draw.chance(50) ? c.batch : std::vector<int>(c.batch.size(), 1);
    if (!present) return Tensor(batch, 1, 1, 1, {kHead, kRow, kColumn}, 0);
    return Tensor(batch, draw.chance(50) ? c.heads() : 1, draw.chance(75) ? c.query_len : 1, c.key_len, any_order(draw),
                  c.strided ? 3 : 0);
  };
  const auto one_a_head = [&] {
    std::vector<int> batch = draw.chance(50) ? c.batch : std::vector<int>(c.batch.size(), 1);
    return Tensor(batch, c.heads(), 1, 1, any_order(draw), c.strided ? 3 : 0);
  };
  const auto fill = [&](Tensor& t, int heads, int rows, int columns, auto number) {
    for (int64_t b = 0; b < c.batch_size(); ++b) {
      for (int h = 0; h < heads; ++h) {
        for (int r = 0; r < rows; ++r) {
          for (int k = 0; k < columns; ++k) t.at(b, h, r, k) = number();
        }
      }
    }
  };
  Inputs in = {tensor(c.heads(), c.query_len, c.head_dim),
               tensor(c.kv_heads, c.key_len, c.head_dim),
               tensor(c.kv_heads, c.key_len, c.value_dim),
               mask(c.visible),
               mask(c.bias),
               Tensor(c.batch, 1, c.tree_size, c.tree_size, {kRow, kColumn}, 0),
               one_a_head(),
               one_a_head(),
               {},
               {}};
  fill(in.query, c.heads(), c.query_len, c.head_dim, [&] { return rounded(c.query_size * draw.normal(), c.dtype); });
  fill(in.key, c.kv_heads, c.key_len, c.head_dim, [&] { return rounded(draw.normal(), c.dtype); });
  fill(in.value, c.kv_heads, c.key_len, c.value_dim, [&] { return rounded(draw.normal(), c.dtype); });
  int percent = draw.pick({5, 60, 95});  // 5: many rows see nothing
  if (c.visible) fill(in.visible, c.heads(), c.query_len, c.key_len, [&] { return draw.chance(percent); });
  if (c.bias) {
    fill(in.bias, c.heads(), c.query_len, c.key_len,
         [&] { return draw.chance(80) ? rounded(draw.normal(), c.bias_dtype) : -kInf; });
  }
  fill(in.tree, 1, c.tree_size, c.tree_size, [&] { return draw.chance(40); });
  for (int64_t b = 0; b < c.batch_size(); ++b) {
    in.key_start.push_back(draw.below(c.key_len / 2 + 1) - 1);
    in.key_stop.push_back(draw.chance(20) ? in.key_start.back() - 1 : c.key_len + 1 - draw.below(c.key_len / 2 + 1));
  }
  fill(in.sinks, c.heads(), 1, 1, [&] { return rounded(3 * draw.normal(), cpu::Dtype::float32); });
  fill(in.alibi_slopes, c.heads(), 1, 1, [&] { return rounded(draw.uniform(), cpu::Dtype::float32); });
  if (c.poison) poison(c, draw, in);
  return in;
}

// --- The formula, and the kernels.

struct Outputs {
  std::vector<double> out, lse;  // (batch, head, row, column) and (batch, head, row)
};

float scale_of(const Case& c) {
  return 1 / std::sqrt(static_cast<float>(c.head_dim));
}

// Computes in Real, one row of scores at a time.
template <typename Real>
Outputs plain_attention(const Case& c, const Inputs& in) {
  Outputs result;
  std::vector<Real> weight(static_cast<size_t>(c.key_len)), out(static_cast<size_t>(c.value_dim));
  for (int64_t row = 0; row < c.batch_size() * c.heads() * c.query_len; ++row) {
    int64_t b = row / c.query_len / c.heads();
    int h = static_cast<int>(row / c.query_len % c.heads()), i = static_cast<int>(row % c.query_len);
    std::vector<int> seen;
    Real row_max = -std::numeric_limits<Real>::infinity(), row_sum = 0;
    for (int j = 0; j < c.key_len; ++j) {
      if (!sees(c, in, b, h, i, j)) continue;
      Real score = 0;
      for (int d = 0; d < c.head_dim; ++d)
        score += Real(in.query.at(b, h, i, d)) * Real(in.key.at(b, h / c.group, j, d));
      score *= Real(scale_of(c));
      if (c.softcap > 0) score = Real(c.softcap) * std::tanh(score / Real(c.softcap));
      if (c.alibi) score -= Real(in.alibi_slopes.at(b, h, 0, 0)) * Real(std::abs(i + c.key_len - c.query_len - j));
      if (c.bias) score += Real(in.bias.at(b, h, i, j));
      weight[size_t(j)] = score;
      row_max = std::max(row_max, score);
      seen.push_back(j);
    }
    if (c.sinks) row_max = std::max(row_max, Real(in.sinks.at(b, h, 0, 0)));
    for (int j : seen) {
      weight[size_t(j)] = std::exp(weight[size_t(j)] - row_max);
      row_sum += weight[size_t(j)];
    }
    if (c.sinks) row_sum += std::exp(Real(in.sinks.at(b, h, 0, 0)) - row_max);
    std::fill(out.begin(), out.end(), Real(0));
    for (int j : seen) {
      for (int d = 0; d < c.value_dim; ++d) {
        out[size_t(d)] += weight[size_t(j)] / row_sum * Real(in.value.at(b, h / c.group, j, d));
      }
    }
    result.out.insert(result.out.end(), out.begin(), out.end());
    result.lse.push_back(seen.empty() ? -kInf : double(row_max + std::log(row_sum)));
  }
  return result;
}

// Reads a result from where the kernel left it. Between its elements nothing may have been written.
std::vector<double> collect(const Case& c, const Tensor& layout, int columns, cpu::Dtype dtype,
                            std::vector<uint8_t>& memory, bool& gaps_untouched) {
  std::vector<double> numbers;
  size_t bytes = format(dtype).bytes;
  for (int64_t row = 0; row < c.batch_size() * c.heads() * c.query_len; ++row) {
    for (int d = 0; d < columns; ++d) {
      uint8_t* element =
          memory.data() + bytes * layout.offset(row / c.query_len / c.heads(), int(row / c.query_len % c.heads()),
                                                int(row % c.query_len), d);
      numbers.push_back(read_element(dtype, element));
      std::memset(element, 0xff, bytes);
    }
  }
  for (uint8_t byte : memory) gaps_untouched = gaps_untouched && byte == 0xff;
  return numbers;
}

Outputs run_kernel(const Case& c, const Inputs& in, Draw& draw, bool& gaps_untouched) {
  std::vector<uint8_t> query = in.query.in_memory(c.dtype), key = in.key.in_memory(c.dtype),
                       value = in.value.in_memory(c.dtype), bias = in.bias.in_memory(c.bias_dtype),
                       sinks = in.sinks.in_memory(cpu::Dtype::float32),
                       alibi_slopes = in.alibi_slopes.in_memory(cpu::Dtype::float32);
  std::vector<uint8_t> visible(in.visible.numbers.size());
  for (size_t i = 0; i < visible.size(); ++i) visible[i] = in.visible.numbers[i] == 1;

  int words = (c.tree_size + 31) / 32;
  std::vector<uint32_t> tree(static_cast<size_t>(c.batch_size() * c.tree_size * words));
  for (size_t word = 0; word < tree.size(); ++word) {
    int64_t row = int64_t(word) / words;
    for (int j = int(word) % words * 32; j < std::min(c.tree_size, int(word) % words * 32 + 32); ++j) {
      tree[word] |= uint32_t(in.tree.at(row / c.tree_size, 0, int(row % c.tree_size), j)) << (j % 32);
    }
  }

  Tensor out(c.batch, c.heads(), c.query_len, c.value_dim, any_order(draw), c.strided ? 3 : 0);
  Tensor lse(c.batch, c.heads(), c.query_len, 1, any_order(draw), c.strided ? 3 : 0);
  std::vector<uint8_t> out_memory(out.numbers.size() * format(c.dtype).bytes, 0xff),
      lse_memory(lse.numbers.size() * 4, 0xff);

  cpu::AttentionArgs args = {};
  AttentionParams& p = args.params;
  p.batch_dims = static_cast<int32_t>(c.batch.size());
  std::copy(c.batch.begin(), c.batch.end(), p.batch_shape);
  p.batch_size = c.batch_size();
  p.num_heads = c.heads();
  p.num_kv_heads = c.kv_heads;
  p.query_len = c.query_len;
  p.key_len = c.key_len;
  p.head_dim = c.head_dim;
  p.value_dim = c.value_dim;
  p.scale = scale_of(c);
  p.softcap = c.softcap;
  p.causal = c.causal;
  p.window = c.window;
  p.tree_size = c.tree_size;
  p.query = in.query.strides;
  p.key = in.key.strides;
  p.value = in.value.strides;
  p.out = out.strides;
  p.lse = lse.strides;
  p.visible = in.visible.strides;
  p.bias = in.bias.strides;
  p.sinks = in.sinks.strides;
  p.alibi_slopes = in.alibi_slopes.strides;
  p.tree.row = words;
  p.tree.column = 1;
  int64_t elements = 1;
  for (size_t d = c.batch.size(); d-- > 0; elements *= c.batch[d]) {
    p.key_start.batch[d] = p.key_stop.batch[d] = elements;
    p.tree.batch[d] = elements * c.tree_size * words;
  }
  args.dtype = c.dtype;
  args.bias_dtype = c.bias_dtype;
  args.query = query.data();
  args.key = key.data();
  args.value = value.data();
  args.out = out_memory.data();
  args.lse = reinterpret_cast<float*>(lse_memory.data());
  if (c.visible) args.visible = reinterpret_cast<const bool*>(visible.data());
  if (c.bias) args.bias = bias.data();
  if (c.key_range) args.key_start = in.key_start.data(), args.key_stop = in.key_stop.data();
  if (c.tree_size > 0) args.tree = tree.data();
  if (c.sinks) args.sinks = reinterpret_cast<const float*>(sinks.data());
  if (c.alibi) args.alibi_slopes = reinterpret_cast<const float*>(alibi_slopes.data());
  c.decode ? cpu::decode(args) : cpu::prefill(args);

  gaps_untouched = true;
  return {collect(c, out, c.value_dim, c.dtype, out_memory, gaps_untouched),
          collect(c, lse, 1, cpu::Dtype::float32, lse_memory, gaps_untouched)};
}

// --- The rule.

// The worst error as a share of what is allowed; above 1 the rule is broken, and `failure` says where.
double compare(const char* what, const std::vector<double>& got, const std::vector<double>& truth,
               const std::vector<double>& unfused, cpu::Dtype dtype, std::string& failure) {
  double unfused_error = 0, worst = 0;
  for (size_t i = 0; i < truth.size(); ++i) {
    if (std::isfinite(truth[i])) unfused_error = std::max(unfused_error, std::abs(unfused[i] - truth[i]));
  }
  for (size_t i = 0; i < truth.size(); ++i) {
    double share;
    if (std::isfinite(truth[i])) {
      double beyond_rounding = std::abs(got[i] - truth[i]) - last_place(truth[i], dtype) / 2;
      share = std::max(beyond_rounding, 0.0) / (2 * unfused_error + 1e-5);
    } else {
      share = got[i] == truth[i] || (std::isnan(got[i]) && std::isnan(truth[i])) ? 0 : kInf;
    }
    if (!(share <= worst)) worst = std::isnan(share) ? kInf : share;
    if (!(share <= 1) && failure.empty()) {
      char text[160];
      std::snprintf(text, sizeof(text), "%s[%zu] is %.9g, expected %.9g; unfused in float32 errs by %.2g", what, i,
                    got[i], truth[i], unfused_error);
      failure = text;
    }
  }
  return worst;
}

void add_to_checksum(const std::vector<double>& numbers, uint64_t& checksum) {  // FNV-1a
  for (double x : numbers) {
    uint8_t bytes[sizeof(x)];
    std::memcpy(bytes, &x, sizeof(x));
    for (uint8_t byte : bytes) checksum = (checksum ^ byte) * 0x100000001b3u;
  }
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 2 || argc > 3) {
    std::fprintf(stderr, "expected forward CASES [FIRST]\n");
    return 2;
  }
  int cases = std::atoi(argv[1]), first = argc == 3 ? std::atoi(argv[2]) : 0;
  std::string instruction_set = cpu::describe();
  double worst = 0;
  uint64_t checksum = 0xcbf29ce484222325u;
  for (int number = first; number < first + cases; ++number) {
    Draw draw{std::mt19937(static_cast<unsigned>(number))};
    Case c = draw_case(draw, number);
    Inputs in = draw_inputs(c, draw);
    bool gaps_untouched;
    Outputs got = run_kernel(c, in, draw, gaps_untouched);
    Outputs truth = plain_attention<double>(c, in), unfused = plain_attention<float>(c, in);
    std::string failure = gaps_untouched ? "" : "wrote between the elements of its outputs";
    worst = std::max(worst, compare("out", got.out, truth.out, unfused.out, c.dtype, failure));
    worst = std::max(worst, compare("lse", got.lse, truth.lse, unfused.lse, cpu::Dtype::float32, failure));
    if (!failure.empty()) {
      std::printf("%s: %s\n%s\n", instruction_set.c_str(), c.describe().c_str(), failure.c_str());
      return 1;
    }
    add_to_checksum(got.out, checksum);
    add_to_checksum(got.lse, checksum);
  }
  std::printf("%s: %d cases, worst error %.2f of what is allowed, checksum %016llx\n", instruction_set.c_str(), cases,
              worst, static_cast<unsigned long long>(checksum));
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 2;
}
