// A case's inputs and outputs in memory, and the kernel's arguments that point to them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <vector>

#include "formula.h"

namespace flashattn::driver {

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kAddressSanitizer = true;
#elif defined(__has_feature)
constexpr bool kAddressSanitizer = __has_feature(address_sanitizer);
#else
constexpr bool kAddressSanitizer = false;
#endif

constexpr uint8_t kUntouched = 0x55;  // an element that consists of these bytes is not NaN in any dtype

// An output array. Before the call all its bytes are kUntouched. The call may change only the elements.
class Result {
 public:
  Result(const Case& c, const Tensor& layout, int heads, int rows, int columns, Dtype dtype)
      : layout_(layout),
        batch_size_(c.batch_size()),
        heads_(heads),
        rows_(rows),
        columns_(columns),
        dtype_(dtype),
        memory_(layout.numbers.size() * format(dtype).bytes + kMargin, kUntouched) {}

  void* first() { return layout_.first(memory_, format(dtype_).bytes); }
  const Strides& strides() const { return layout_.strides; }
  // Another array of this shape and these strides.
  Result in_dtype(Dtype dtype) const {
    Result other = *this;
    other.dtype_ = dtype;
    other.memory_.assign(layout_.numbers.size() * format(dtype).bytes + kMargin, kUntouched);
    return other;
  }
  void overwrite() { std::fill(memory_.begin(), memory_.end(), kUntouched); }

  std::vector<double> numbers() const {
    std::vector<double> numbers;
    for_each_element([&](size_t at) { numbers.push_back(read_element(dtype_, memory_.data() + at)); });
    return numbers;
  }
  bool gaps_untouched() const {
    std::vector<uint8_t> gaps = memory_;
    for_each_element([&](size_t at) { std::memset(gaps.data() + at, kUntouched, format(dtype_).bytes); });
    return std::count(gaps.begin(), gaps.end(), kUntouched) == std::ptrdiff_t(gaps.size());
  }

 private:
  // The number of bytes that are checked behind the last element. A faulty kernel may write one SIMD vector too many,
  // and the widest has 64 bytes. AddressSanitizer reports such a write itself.
  static constexpr size_t kMargin = kAddressSanitizer ? 0 : 64;

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

// The forward pass of a case. `args` points to the memory of the other members. It writes exact_out only if
// `for_gradient`, and only for 16-bit inputs.
struct CpuCall {
  bool decode;
  Result out, exact_out, lse, row_stats;
  cpu::AttentionArgs args = {};

  CpuCall(const Case& c, const Inputs& in, Draw& draw, bool for_gradient = false)
      : decode(c.decode),
        out(c, any_tensor(c, draw, c.heads(), c.query_len, c.value_dim), c.heads(), c.query_len, c.value_dim, c.dtype),
        exact_out(out.in_dtype(Dtype::float32)),
        lse(c, any_tensor(c, draw, c.heads(), c.query_len, 1), c.heads(), c.query_len, 1, Dtype::float32),
        row_stats(c, Tensor(c.batch, c.heads(), c.query_len, 2, kGaps), c.heads(), c.query_len, 2, Dtype::float32) {
    AttentionParams& p = args.params;
    set_sizes(c);
    args.dtype = c.dtype;
    args.bias_dtype = c.bias_dtype;
    args.group_dtype = c.group_dtype;
    args.out = out.first();
    if (for_gradient && c.dtype != Dtype::float32) args.exact_out = static_cast<float*>(exact_out.first());
    args.lse = static_cast<float*>(lse.first());
    args.row_stats = static_cast<float*>(row_stats.first());
    p.out = out.strides();
    p.lse = lse.strides();
    p.row_stats = row_stats.strides();
    give(args.query, p.query, in.query, c.dtype);
    if (c.bits == 0) {
      give(args.key, p.key, in.key, c.dtype);
      give(args.value, p.value, in.value, c.dtype);
    } else {
      const Quantised &key = in.quantised[0], &value = in.quantised[1];
      give_whole<uint32_t>(args.key, p.key, key.words);
      give_whole<uint32_t>(args.value, p.value, value.words);
      give(args.key_scales, p.key_scales, key.scales, c.group_dtype);
      give(args.key_biases, p.key_biases, key.biases, c.group_dtype);
      give(args.value_scales, p.value_scales, value.scales, c.group_dtype);
      give(args.value_biases, p.value_biases, value.biases, c.group_dtype);
    }
    if (c.visible) give_whole<bool>(args.visible, p.visible, in.visible);
    if (c.bias) give(args.bias, p.bias, in.bias, c.bias_dtype);
    if (c.key_range) {
      give_whole<int32_t>(args.key_start, p.key_start, in.key_start);
      give_whole<int32_t>(args.key_stop, p.key_stop, in.key_stop);
    }
    if (c.tree_size > 0) give_whole<uint32_t>(args.tree, p.tree, packed_tree(c, in));
    if (c.sinks) give(args.sinks, p.sinks, in.sinks, Dtype::float32);
    if (c.alibi) give(args.alibi_slopes, p.alibi_slopes, in.alibi_slopes, Dtype::float32);
  }
  CpuCall(const CpuCall&) = delete;

  void run() { decode ? cpu::decode(args) : cpu::prefill(args); }

 private:
  inline static const Layout kGaps = {kRowMajor.order, 1};

  template <typename T>
  void give(const T*& pointer, Strides& strides, const Tensor& tensor, Dtype dtype) {
    give(pointer, strides, tensor, format(dtype).bytes, [&](double x, uint8_t* to) { write_element(x, dtype, to); });
  }
  template <typename Whole, typename T>
  void give_whole(const T*& pointer, Strides& strides, const Tensor& tensor) {
    give(pointer, strides, tensor, sizeof(Whole), [](double x, uint8_t* to) {
      Whole whole = std::isfinite(x) ? static_cast<Whole>(x) : static_cast<Whole>(~0u);
      std::memcpy(to, &whole, sizeof(whole));
    });
  }
  // Copies an input to new memory that has no byte beyond the input's elements.
  template <typename T, typename Write>
  void give(const T*& pointer, Strides& strides, const Tensor& tensor, size_t bytes, Write write) {
    std::vector<uint8_t>& memory = memory_.emplace_back(tensor.in_memory(bytes, write));
    pointer = reinterpret_cast<const T*>(tensor.first(memory, bytes));
    strides = tensor.strides;
  }

  static Tensor packed_tree(const Case& c, const Inputs& in) {
    int words = (c.tree_size + 31) / 32;
    Tensor tree(c.batch, 1, c.tree_size, words, kRowMajor);
    for (size_t at = 0; at < tree.numbers.size(); ++at) {
      int64_t row = int64_t(at) / words;
      int first = int(at) % words * 32;
      tree.numbers[at] = 0;
      for (int j = first; j < std::min(c.tree_size, first + 32); ++j) {
        tree.numbers[at] += std::ldexp(in.tree.at(row / c.tree_size, 0, int(row % c.tree_size), j), j - first);
      }
    }
    return tree;
  }

  void set_sizes(const Case& c) {
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
    p.bits = c.bits;
    p.group_size = c.group_size;
  }

  std::deque<std::vector<uint8_t>> memory_;  // holds the inputs
};

}  // namespace flashattn::driver
