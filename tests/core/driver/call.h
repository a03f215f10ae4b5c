// A case's inputs and outputs in memory, and the arguments that name them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "contract.h"
#include "formula.h"

namespace flashattn::driver {

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kAddressSanitizer = true;
#elif defined(__has_feature)
constexpr bool kAddressSanitizer = __has_feature(address_sanitizer);
#else
constexpr bool kAddressSanitizer = false;
#endif

// An output: its memory is all 0xff before the call, and stays so between the elements and behind them.
class Result {
 public:
  Result(const Case& c, const Tensor& layout, int heads, int rows, int columns, Dtype dtype)
      : layout_(layout),
        batch_size_(c.batch_size()),
        heads_(heads),
        rows_(rows),
        columns_(columns),
        dtype_(dtype),
        memory_(layout.numbers.size() * format(dtype).bytes + kMargin, 0xff) {}

  void* first() { return layout_.first(memory_, format(dtype_).bytes); }
  const Strides& strides() const { return layout_.strides; }
  void overwrite() { std::fill(memory_.begin(), memory_.end(), 0xff); }

  std::vector<double> numbers() const {
    std::vector<double> numbers;
    for_each_element([&](size_t at) { numbers.push_back(read_element(dtype_, memory_.data() + at)); });
    return numbers;
  }
  bool gaps_untouched() const {
    std::vector<uint8_t> gaps = memory_;
    for_each_element([&](size_t at) { std::memset(gaps.data() + at, 0xff, format(dtype_).bytes); });
    return std::count(gaps.begin(), gaps.end(), 0xff) == std::ptrdiff_t(gaps.size());
  }

 private:
  static constexpr size_t kMargin = kAddressSanitizer ? 0 : 64;  // bytes: the widest vector; or it is watched

  template <typename Visit>
  void for_each_element(Visit visit) const {
    for (int64_t row = 0; row < batch_size_ * heads_ * rows_; ++row) {
      for (int d = 0; d < columns_; ++d) {
        visit(format(dtype_).bytes *
              layout_.offset(row / rows_ / heads_, int(row / rows_ % heads_), int(row % rows_), d));
      }
    }
  }

  Tensor layout_;
  int64_t batch_size_;
  int heads_, rows_, columns_;
  Dtype dtype_;
  std::vector<uint8_t> memory_;
};

// The forward pass of a case. `args` points into the other members.
struct Call {
  std::vector<uint8_t> query, key, value, bias, sinks, alibi_slopes, visible;  // as large as their strides reach
  std::vector<uint8_t> key_scales, key_biases, value_scales, value_biases;
  std::vector<uint32_t> tree, key_words, value_words;
  std::vector<int32_t> key_start, key_stop;
  Result out, lse, row_stats;
  cpu::AttentionArgs args = {};

  Call(const Case& c, const Inputs& in, Draw& draw)
      : query(in.query.in_memory(c.dtype)),
        key(in.key.in_memory(c.dtype)),
        value(in.value.in_memory(c.dtype)),
        bias(in.bias.in_memory(c.bias_dtype)),
        sinks(in.sinks.in_memory(Dtype::float32)),
        alibi_slopes(in.alibi_slopes.in_memory(Dtype::float32)),
        visible(in.visible.numbers.size()),
        key_start(in.key_start),
        key_stop(in.key_stop),
        out(c, any_tensor(c, draw, c.heads(), c.query_len, c.value_dim), c.heads(), c.query_len, c.value_dim, c.dtype),
        lse(c, any_tensor(c, draw, c.heads(), c.query_len, 1), c.heads(), c.query_len, 1, Dtype::float32),
        row_stats(c, Tensor(c.batch, c.heads(), c.query_len, 2, kRowMajor), c.heads(), c.query_len, 2, Dtype::float32) {
    for (size_t i = 0; i < visible.size(); ++i) visible[i] = in.visible.numbers[i] == 1;
    int words = pack_tree(c, in);
    set_params(c, in, words);
    args.dtype = c.dtype;
    args.bias_dtype = c.bias_dtype;
    args.query = in.query.first(query, format(c.dtype).bytes);
    args.key = in.key.first(key, format(c.dtype).bytes);
    args.value = in.value.first(value, format(c.dtype).bytes);
    args.out = out.first();
    args.lse = static_cast<float*>(lse.first());
    args.row_stats = static_cast<float*>(row_stats.first());
    if (c.visible) args.visible = reinterpret_cast<const bool*>(in.visible.first(visible, 1));
    if (c.bias) args.bias = in.bias.first(bias, format(c.bias_dtype).bytes);
    if (c.key_range) args.key_start = key_start.data(), args.key_stop = key_stop.data();
    if (c.tree_size > 0) args.tree = tree.data();
    if (c.sinks) args.sinks = reinterpret_cast<const float*>(in.sinks.first(sinks, 4));
    if (c.alibi) args.alibi_slopes = reinterpret_cast<const float*>(in.alibi_slopes.first(alibi_slopes, 4));
    if (c.bits > 0) set_quantised(c, in);
    cpu::check(args);
    c.decode ? cpu::decode(args) : cpu::prefill(args);
  }
  Call(const Call&) = delete;

 private:
  // Returns the words of a row.
  int pack_tree(const Case& c, const Inputs& in) {
    int words = (c.tree_size + 31) / 32;
    tree.resize(static_cast<size_t>(c.batch_size() * c.tree_size * words));
    for (size_t word = 0; word < tree.size(); ++word) {
      int64_t row = int64_t(word) / words;
      for (int j = int(word) % words * 32; j < std::min(c.tree_size, int(word) % words * 32 + 32); ++j) {
        tree[word] |= uint32_t(in.tree.at(row / c.tree_size, 0, int(row % c.tree_size), j)) << (j % 32);
      }
    }
    return words;
  }

  void set_quantised(const Case& c, const Inputs& in) {
    const Quantised &of_key = in.quantised[0], &of_value = in.quantised[1];
    const auto words = [](const std::vector<double>& numbers) {
      std::vector<uint32_t> words(numbers.size());
      for (size_t i = 0; i < words.size(); ++i) words[i] = std::isfinite(numbers[i]) ? uint32_t(numbers[i]) : ~0u;
      return words;
    };
    key_words = words(of_key.words.numbers);
    value_words = words(of_value.words.numbers);
    key_scales = of_key.scales.in_memory(c.group_dtype);
    key_biases = of_key.biases.in_memory(c.group_dtype);
    value_scales = of_value.scales.in_memory(c.group_dtype);
    value_biases = of_value.biases.in_memory(c.group_dtype);
    args.key = of_key.words.first(key_words, 4);
    args.value = of_value.words.first(value_words, 4);
    args.params.key = of_key.words.strides;
    args.params.value = of_value.words.strides;
    args.params.bits = c.bits;
    args.params.group_size = c.group_size;
    args.params.key_scales = of_key.scales.strides;
    args.params.key_biases = of_key.biases.strides;
    args.params.value_scales = of_value.scales.strides;
    args.params.value_biases = of_value.biases.strides;
    args.group_dtype = c.group_dtype;
    size_t bytes = format(c.group_dtype).bytes;
    args.key_scales = of_key.scales.first(key_scales, bytes);
    args.key_biases = of_key.biases.first(key_biases, bytes);
    args.value_scales = of_value.scales.first(value_scales, bytes);
    args.value_biases = of_value.biases.first(value_biases, bytes);
  }

  void set_params(const Case& c, const Inputs& in, int tree_words) {
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
    p.out = out.strides();
    p.lse = lse.strides();
    p.row_stats = row_stats.strides();
    p.visible = in.visible.strides;
    p.bias = in.bias.strides;
    p.sinks = in.sinks.strides;
    p.alibi_slopes = in.alibi_slopes.strides;
    p.tree = Tensor(c.batch, 1, c.tree_size, tree_words, kRowMajor).strides;
    p.key_start = p.key_stop = Tensor(c.batch, 1, 1, 1, kRowMajor).strides;
  }
};

}  // namespace flashattn::driver
