// A case's inputs, and which keys its queries see.
#pragma once

#include <cstdint>
#include <vector>

#include "case.h"

namespace flashattn::driver {

// A quantised tensor. `words` holds its 32-bit words as doubles. Each group of columns has a scale and a bias.
struct Quantised {
  Tensor words, scales, biases;
};

struct Inputs {
  Tensor query, key, value, visible, bias, tree;  // key and value hold dequantised numbers if the case is quantised
  Tensor sinks, alibi_slopes;                     // one per head
  Tensor key_start, key_stop;                     // one per batch element
  std::vector<Quantised> quantised = {};          // key and value; empty: not quantised
};

inline bool sees(const Case& c, const Inputs& in, int64_t b, int head, int i, int j) {
  int position = i + c.key_len - c.query_len;
  if (c.causal && j > position) return false;
  if (c.window > 0 && position - j >= c.window) return false;
  if (c.key_range && (j < in.key_start.at(b, 0, 0, 0) || j >= in.key_stop.at(b, 0, 0, 0))) return false;
  if (c.visible && in.visible.at(b, head, i, j) == 0) return false;
  if (c.bias && in.bias.at(b, head, i, j) == -kInf) return false;
  int node = i + c.tree_size - c.query_len, other = j + c.tree_size - c.key_len;
  return other < 0 || (node >= 0 && in.tree.at(b, 0, node, other) != 0);
}

// Chooses keys that the caller replaces with NaN or infinity. Calls hide(b, g, j) for each key j of batch element b and
// key/value head g that no query row sees. At times also calls spoil(b, g, j) for one key of a head, hidden or not.
template <typename Hide, typename Spoil>
void for_keys_to_poison(const Case& c, const Inputs& in, Draw& draw, Hide hide, Spoil spoil) {
  for (int64_t b = 0; b < c.batch_size(); ++b) {
    for (int g = 0; g < c.kv_heads; ++g) {
      for (int j = 0; j < c.key_len; ++j) {
        bool seen = false;
        for (int row = 0; row < c.group * c.query_len && !seen; ++row) {
          seen = sees(c, in, b, g * c.group + row / c.query_len, row % c.query_len, j);
        }
        if (!seen) hide(b, g, j);
      }
      if (c.key_len > 0 && draw.chance(50)) spoil(b, g, draw.below(c.key_len));
    }
  }
}

// Makes keys and values NaN or infinite if no query row sees them. At times also makes one element of one key or value
// NaN, hidden or not. NaN and infinity must reach only the rows that see them.
inline void poison(const Case& c, Draw& draw, Inputs& in) {
  const auto hide = [&](int64_t b, int g, int j) {
    double with = draw.chance(50) ? kNaN : draw.chance(50) ? kInf : -kInf;
    for (int d = 0; d < c.head_dim; ++d) in.key.at(b, g, j, d) = with;
    for (int d = 0; d < c.value_dim; ++d) in.value.at(b, g, j, d) = with;
  };
  for_keys_to_poison(c, in, draw, hide, [&](int64_t b, int g, int j) {
    bool in_key = draw.chance(50);
    (in_key ? in.key : in.value).at(b, g, j, draw.below(in_key ? c.head_dim : c.value_dim)) = kNaN;
  });
}

inline Layout layout_of(const Case& c, Draw& draw) {
  return c.strided ? any_layout(draw) : kRowMajor;
}

inline std::vector<int> broadcast_batch(const Case& c) {
  return std::vector<int>(c.batch.size(), 1);
}

inline Tensor any_tensor(const Case& c, Draw& draw, int heads, int rows, int columns) {
  return Tensor(c.batch, heads, rows, columns, layout_of(c, draw));
}

// At times the input is broadcast over the batch, heads, rows or columns.
inline Tensor any_input(const Case& c, Draw& draw, int heads, int rows, int columns) {
  if (!c.strided || c.poison || !draw.chance(30)) return any_tensor(c, draw, heads, rows, columns);
  int broadcast = draw.below(4);
  const auto extent = [&](int dimension, int size) { return broadcast == dimension && size > 0 ? 1 : size; };
  return Tensor(broadcast == 0 && c.batch_size() > 0 ? broadcast_batch(c) : c.batch, extent(1, heads), extent(2, rows),
                extent(3, columns), layout_of(c, draw));
}

template <typename Number>
void fill(Tensor& t, int64_t batch_size, int heads, int rows, int columns, Number number) {
  for (int64_t b = 0; b < batch_size; ++b) {
    for (int h = 0; h < heads; ++h) {
      for (int r = 0; r < rows; ++r) {
        for (int k = 0; k < columns; ++k) t.at(b, h, r, k) = number();
      }
    }
  }
}

// Makes the scales of hidden keys and values NaN, and their biases NaN or infinite. At times also poisons
// the first group of columns of a value in this way, hidden or not.
inline void poison_groups(const Case& c, Draw& draw, Inputs& in) {
  const auto spoil = [&](Tensor& tensor, Quantised& quantised, int64_t b, int g, int j, int group) {
    quantised.scales.at(b, g, j, group) = kNaN;
    quantised.biases.at(b, g, j, group) = draw.chance(50) ? kNaN : kInf;
    for (int d = group * c.group_size; d < (group + 1) * c.group_size; ++d) tensor.at(b, g, j, d) = kNaN;
  };
  const auto hide = [&](int64_t b, int g, int j) {
    for (int k = 0; k < c.head_dim / c.group_size; ++k) spoil(in.key, in.quantised[0], b, g, j, k);
    for (int k = 0; k < c.value_dim / c.group_size; ++k) spoil(in.value, in.quantised[1], b, g, j, k);
  };
  for_keys_to_poison(c, in, draw, hide, [&](int64_t b, int g, int j) { spoil(in.value, in.quantised[1], b, g, j, 0); });
}

// Draws words, scales and biases, and writes the dequantised numbers to `tensor`.
inline Quantised draw_quantised(const Case& c, Draw& draw, Tensor& tensor, int columns) {
  int words = columns * c.bits / 32, groups = columns / c.group_size;
  Quantised result = {any_input(c, draw, c.kv_heads, c.key_len, words),
                      any_input(c, draw, c.kv_heads, c.key_len, groups),
                      any_input(c, draw, c.kv_heads, c.key_len, groups)};
  int largest = (1 << c.bits) - 1;
  fill(result.words, c.batch_size(), c.kv_heads, c.key_len, words, [&] { return double(draw.bits()); });
  fill(result.scales, c.batch_size(), c.kv_heads, c.key_len, groups,
       [&] { return rounded(3 * draw.normal() / largest, c.group_dtype); });
  fill(result.biases, c.batch_size(), c.kv_heads, c.key_len, groups,
       [&] { return rounded(draw.normal(), c.group_dtype); });
  for (int64_t row = 0; row < c.batch_size() * c.kv_heads * c.key_len; ++row) {
    int64_t b = row / c.key_len / c.kv_heads;
    int g = int(row / c.key_len % c.kv_heads), j = int(row % c.key_len);
    for (int d = 0; d < columns; ++d) {
      uint32_t whole = 0;
      for (int bit = d * c.bits; bit < (d + 1) * c.bits; ++bit) {
        uint32_t word = uint32_t(result.words.at(b, g, j, bit / 32));
        whole |= (word >> (bit % 32) & 1) << (bit - d * c.bits);
      }
      int group = d / c.group_size;
      tensor.at(b, g, j, d) = result.scales.at(b, g, j, group) * whole + result.biases.at(b, g, j, group);
    }
  }
  return result;
}

inline Inputs draw_inputs(const Case& c, Draw& draw) {
  // The kernel does not read dequantised keys and values, so these are row-major and never broadcast.
  const auto keys = [&](int columns) {
    return c.bits > 0 ? Tensor(c.batch, c.kv_heads, c.key_len, columns, kRowMajor)
                      : any_input(c, draw, c.kv_heads, c.key_len, columns);
  };
  const auto mask = [&](bool present) {  // may be broadcast over the batch, heads or queries
    if (!present) return Tensor(broadcast_batch(c), 1, 1, 1, kRowMajor);
    return Tensor(draw.chance(50) ? c.batch : broadcast_batch(c), draw.chance(50) ? c.heads() : 1,
                  draw.chance(75) ? c.query_len : 1, c.key_len, layout_of(c, draw));
  };
  const auto one_a_head = [&] {
    return Tensor(draw.chance(50) ? c.batch : broadcast_batch(c), c.heads(), 1, 1, layout_of(c, draw));
  };
  const auto fill = [&](Tensor& t, int heads, int rows, int columns, auto number) {
    driver::fill(t, c.batch_size(), heads, rows, columns, number);
  };
  Inputs in = {any_input(c, draw, c.heads(), c.query_len, c.head_dim),
               keys(c.head_dim),
               keys(c.value_dim),
               mask(c.visible),
               mask(c.bias),
               Tensor(c.batch, 1, c.tree_size, c.tree_size, kRowMajor),
               one_a_head(),
               one_a_head(),
               Tensor(c.batch, 1, 1, 1, kRowMajor),
               Tensor(c.batch, 1, 1, 1, kRowMajor)};
  fill(in.query, c.heads(), c.query_len, c.head_dim, [&] { return rounded(c.query_size * draw.normal(), c.dtype); });
  fill(in.key, c.kv_heads, c.key_len, c.head_dim, [&] { return rounded(draw.normal(), c.dtype); });
  fill(in.value, c.kv_heads, c.key_len, c.value_dim, [&] { return rounded(draw.normal(), c.dtype); });
  int percent = draw.pick({5, 60, 95});  // the percentage of visible keys. At 5 %, many rows see no key
  if (c.visible) fill(in.visible, c.heads(), c.query_len, c.key_len, [&] { return draw.chance(percent); });
  if (c.bias) {
    fill(in.bias, c.heads(), c.query_len, c.key_len,
         [&] { return draw.chance(80) ? rounded(draw.normal(), c.bias_dtype) : -kInf; });
  }
  fill(in.tree, 1, c.tree_size, c.tree_size, [&] { return draw.chance(40); });
  for (int64_t b = 0; b < c.batch_size(); ++b) {
    double& start = in.key_start.at(b, 0, 0, 0);
    start = draw.below(c.key_len / 2 + 1) - 1;
    in.key_stop.at(b, 0, 0, 0) = draw.chance(20) ? start - 1 : c.key_len + 1 - draw.below(c.key_len / 2 + 1);
  }
  fill(in.sinks, c.heads(), 1, 1, [&] { return rounded(3 * draw.normal(), Dtype::float32); });
  fill(in.alibi_slopes, c.heads(), 1, 1, [&] { return rounded(draw.uniform(), Dtype::float32); });
  if (c.bits > 0) {
    in.quantised.push_back(draw_quantised(c, draw, in.key, c.head_dim));
    in.quantised.push_back(draw_quantised(c, draw, in.value, c.value_dim));
  }
  if (c.poison) c.bits > 0 ? poison_groups(c, draw, in) : poison(c, draw, in);
  return in;
}

}  // namespace flashattn::driver
