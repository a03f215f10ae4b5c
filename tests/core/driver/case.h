// One call to test: its sizes, dtypes and options, drawn at random.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "call/choose.h"
#include "tensor.h"

namespace flashattn::driver {

// The sizes from which cases are drawn.
struct Sizes {
  std::vector<std::vector<int>> batches;
  std::vector<int> kv_heads, groups, query_lens, key_lens, dims;
  int64_t most_work;  // the most multiply-adds that a case may have
};

// With these sizes, a few hundred cases take less than a minute under an emulator.
inline const Sizes kSizes = {{{}, {2}, {2, 3}},
                             {1, 2},
                             {1, 2, 7},
                             {1, 2, 5, 8, 9, 33, 64, 97, 131},
                             {0, 1, 7, 33, 96, 97, 193, 511, 700, 1100},
                             {1, 7, 64, 72, 80, 128, 200, 512},
                             1 << 21};

struct Case {
  bool decode;
  Dtype dtype, bias_dtype;
  std::vector<int> batch;
  int kv_heads, group, query_len, key_len, head_dim, value_dim;
  double query_size;  // a factor of all queries. If it is 8, a few keys get nearly all of the weight
  bool causal, strided;
  int window, tree_size;
  float softcap;
  bool key_range, visible, bias, sinks, alibi, poison;
  int bits, group_size;  // of quantised keys and values; 0: not quantised
  Dtype group_dtype;

  int heads() const { return kv_heads * group; }
  int64_t batch_size() const {
    int64_t size = 1;
    for (int extent : batch) size *= extent;
    return size;
  }
  int64_t rows() const { return batch_size() * heads() * query_len; }
  // The number of multiply-adds. Without queries it is the size of key and value, without keys that of query and out,
  // because the test fills these arrays.
  int64_t work() const {
    return batch_size() * std::max(heads() * query_len, kv_heads) * std::max(key_len, 1) * (head_dim + value_dim);
  }
};

inline Dtype any_dtype(Draw& draw) {
  return static_cast<Dtype>(draw.below(3));
}

inline Case draw_case(Draw& draw, bool quantised, const Sizes& sizes = kSizes) {
  Case c = {};
  // The loop below draws sizes until the work is at most most_work. The lengths are drawn before the loop. Otherwise
  // long cases would be rare.
  const auto draw_lengths = [&] {
    c.query_len = draw.pick(sizes.query_lens);
    c.key_len = draw.pick(sizes.key_lens);
  };
  draw_lengths();
  do {
    if (quantised) draw_lengths();  // the first lengths may exceed most_work with every quantised head_dim
    c.batch = draw.pick(sizes.batches);
    c.kv_heads = draw.pick(sizes.kv_heads);
    c.group = draw.pick(sizes.groups);
    c.group_size = quantised ? draw.pick({32, 64, 128}) : 0;
    const auto dim = [&] { return quantised ? c.group_size * draw.pick({1, 2, 3, 4}) : draw.pick(sizes.dims); };
    c.head_dim = dim();
    c.value_dim = draw.chance(50) ? c.head_dim : dim();
  } while (c.work() > sizes.most_work);
  c.decode = c.query_len <= kMaxDecodeLen && draw.chance(75);
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
  if (quantised) {
    c.bits = draw.pick({1, 2, 3, 4, 5, 6, 8});
    c.group_dtype = any_dtype(draw);
  }
  return c;
}

}  // namespace flashattn::driver
