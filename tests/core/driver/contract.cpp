// Checks the contract of the kernels, field by field.
#include "contract.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "call/fail.h"
#include "call/inputs.h"
#include "call/limits.h"
#include "call/options.h"

namespace flashattn::cpu {
namespace {

// More than any memory holds. Sizes times strides below it fit int64.
constexpr int64_t kMaxElements = int64_t{1} << 48;

using Wide = __int128;  // holds any sum of an array's sizes times strides

int64_t printable(Wide number) {
  constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();
  return static_cast<int64_t>(std::clamp<Wide>(number, -kLargest, kLargest));
}

void expect_between(const char* field, Wide number, int64_t least, int64_t most) {
  if (number < least || number > most) {
    fail(field, " is ", printable(number), ", expected ", least, " to ", most);
  }
}

void check_sizes(const AttentionParams& p) {
  expect_between("batch_dims", p.batch_dims, 0, kMaxBatchDims);
  Wide batch_size = 1;
  for (int d = 0; d < p.batch_dims; ++d) {
    expect_between("a size in batch_shape", p.batch_shape[d], 0, std::numeric_limits<int32_t>::max());
    batch_size *= p.batch_shape[d];
    expect_between("the product of batch_shape", batch_size, 0, kMaxElements);
  }
  if (p.batch_size != batch_size) {
    fail("batch_size is ", p.batch_size, ", expected the product of batch_shape, ", printable(batch_size));
  }
  expect_between("num_kv_heads", p.num_kv_heads, 1, kMaxPositions);
  expect_between("num_heads", p.num_heads, 0, kMaxPositions);
  if (p.num_heads % p.num_kv_heads != 0) {
    fail("num_heads is ", p.num_heads, ", expected a multiple of num_kv_heads, ", p.num_kv_heads);
  }
  expect_between("query_len", p.query_len, 0, kMaxPositions);
  expect_between("key_len", p.key_len, 0, kMaxPositions);
  expect_between("query_len + key_len", Wide{p.query_len} + p.key_len, 0, kMaxPositions);
  expect_between("head_dim", p.head_dim, 1, kMaxHeadDim);
  expect_between("value_dim", p.value_dim, 1, kMaxHeadDim);
  Wide rows = batch_size * p.num_heads * p.query_len;
  expect_between("batch_size * num_heads * query_len", rows, 0, kMaxElements);
  expect_between("batch_size * num_kv_heads * key_len", batch_size * p.num_kv_heads * p.key_len, 0, kMaxElements);
  if (p.query_len <= kMaxDecodeLen) {
    expect_between("the size of the partial results of decode()", rows * p.key_len * (2 + p.value_dim), 0,
                   std::numeric_limits<int64_t>::max());
  }
}

void check_options(const AttentionArgs& args) {
  const AttentionParams& p = args.params;
  check_score_options(p.scale, p);
  expect_between("tree_size", p.tree_size, 0, p.key_len);
  if (p.batch_size > 0 && p.tree_size > 0 && !args.tree) {
    fail("tree is null, expected bits of ", p.tree_size, " keys");
  }
}

void check_dtype(const char* field, Dtype dtype) {
  if (dtype != Dtype::float32 && dtype != Dtype::float16 && dtype != Dtype::bfloat16) {
    fail(field, " is ", static_cast<int>(dtype), ", expected 0, 1 or 2: float32, float16 or bfloat16");
  }
}

void check_quantised(const AttentionParams& p) {
  if (!is_valid_bits(p.bits)) {
    fail("bits is ", p.bits, ", expected 0 for keys and values as they are, or 1, 2, 3, 4, 5, 6 or 8");
  }
  if (!is_valid_group_size(p.group_size)) {
    fail("group_size is ", p.group_size, ", expected 32, 64 or 128");
  }
  for (auto [field, dim] : {std::pair("head_dim", p.head_dim), std::pair("value_dim", p.value_dim)}) {
    if (dim % p.group_size != 0) {
      fail(field, " is ", dim, ", expected a multiple of group_size, ", p.group_size);
    }
  }
}

// One of a call's arrays. Dimensions that the array does not have are of size 1.
struct Array {
  const char* name;
  const void* data;
  int64_t element_size;
  const Strides& strides;
  int64_t heads, rows, columns;
};

template <typename Visit>
void for_each_dimension(const AttentionParams& p, const Array& array, Visit visit) {
  for (int d = 0; d < p.batch_dims; ++d) visit(p.batch_shape[d], array.strides.batch[d]);
  visit(array.heads, array.strides.head);
  visit(array.rows, array.strides.row);
  visit(array.columns, array.strides.column);
}

// An array's addresses: its first byte and one past its last byte.
struct Range {
  const char* name;
  Wide begin, end;
};

// Checks the addresses of elements `first` to `last`, counted from `data`.
Range check_address(const char* name, const void* data, int64_t element_size, Wide first, Wide last) {
  uintptr_t address = reinterpret_cast<uintptr_t>(data);
  if (address == 0) {
    fail(name, " is null, expected the address of its first element");
  }
  if (address % static_cast<uintptr_t>(element_size) != 0) {
    fail(name, " is at address ", data, ", expected a multiple of ", element_size);
  }
  Range range = {name, Wide{address} + first * element_size, Wide{address} + (last + 1) * element_size};
  if (range.begin < 0 || range.end > std::numeric_limits<uintptr_t>::max()) {
    fail(name, " is at address ", data, ", from where its strides reach beyond the first or the last address");
  }
  return range;
}

Range check_array(const AttentionParams& p, const Array& array) {
  Wide first = 0, last = 0;
  bool empty = false;
  for_each_dimension(p, array, [&](int64_t size, int64_t stride) {
    if (size == 1 && stride != 0) {  // prefetches run ahead by the stride
      fail(array.name, " has stride ", stride, " in a dimension of size 1, expected 0");
    }
    empty = empty || size == 0;
    Wide reach = Wide{size - 1} * stride;
    (reach < 0 ? first : last) += reach;
  });
  if (empty) {
    return {array.name, 0, 0};
  }
  if (last - first >= kMaxElements) {
    fail(array.name, " has strides that reach over ", printable(last - first), " elements, expected fewer than ",
         kMaxElements);
  }
  return check_address(array.name, array.data, array.element_size, first, last);
}

// No two elements of an output may share an address: threads would race for it. They share none if each stride exceeds
// what the smaller strides reach, as in every permutation of a row-major array, with or without gaps.
void check_elements_apart(const AttentionParams& p, const Array& array) {
  struct Dimension {
    int64_t stride, size;
  };
  std::array<Dimension, kMaxBatchDims + 3> dimensions;
  int count = 0;
  for_each_dimension(p, array, [&](int64_t size, int64_t stride) {
    if (size > 1) dimensions[count++] = {std::abs(stride), size};
  });
  std::sort(dimensions.begin(), dimensions.begin() + count,
            [](const Dimension& a, const Dimension& b) { return a.stride < b.stride; });
  int64_t reach = 0;
  for (int i = 0; i < count; ++i) {
    if (dimensions[i].stride <= reach) {
      fail(array.name, " has stride ", dimensions[i].stride, " where smaller strides reach over ", reach,
           " elements, expected a larger one: its elements overlap");
    }
    reach += dimensions[i].stride * (dimensions[i].size - 1);
  }
}

// The memory ranges of all arrays of a call.
class Memory {
 public:
  explicit Memory(const AttentionParams& params) : params_(params) {}

  void input(const Array& array) { ranges_[count_++] = check_array(params_, array); }
  void optional_input(const Array& array) {
    if (array.data) input(array);
  }
  // To be called after all inputs are added.
  void output(const Array& array) {
    Range range = check_array(params_, array);
    if (range.begin < range.end) {
      check_elements_apart(params_, array);
      add_apart(range);
    }
  }
  void row_major_output(const char* name, const void* data, int64_t element_size, int64_t elements) {
    if (elements > 0) add_apart(check_address(name, data, element_size, 0, elements - 1));
  }

 private:
  void add_apart(const Range& range) {
    for (int i = 0; i < count_; ++i) {
      if (range.begin < ranges_[i].end && ranges_[i].begin < range.end) {
        fail(range.name, " shares memory with ", ranges_[i].name, ", expected outputs to have memory of their own");
      }
    }
    ranges_[count_++] = range;
  }

  const AttentionParams& params_;
  std::array<Range, kNumInputs + 9> ranges_;  // backward: 3 forward outputs, 2 cotangents, 4 results
  int count_ = 0;
};

int64_t element_size(const AttentionArgs& args, const InputRule& rule) {
  switch (rule.dtype) {
    case InputDtype::tensor: return rule.input == Input::query || args.params.bits == 0 ? size_of(args.dtype) : 4;
    case InputDtype::groups: return size_of(args.group_dtype);
    case InputDtype::additive: return size_of(args.bias_dtype);
    case InputDtype::boolean:
    case InputDtype::bytes: return 1;
    default: return 4;
  }
}

// The number of a tensor's columns: elements, words into which elements are packed, or groups.
int64_t columns(const AttentionParams& p, const InputRule& rule, int dim) {
  if (rule.dtype == InputDtype::groups) {
    return dim / p.group_size;
  }
  return p.bits == 0 ? dim : int64_t{dim} * p.bits / 32;
}

Array array_of(const AttentionArgs& args, const InputRule& rule, const char* name, const void* data,
               const Strides& strides) {
  const AttentionParams& p = args.params;
  int64_t size = element_size(args, rule);
  switch (rule.axes) {
    case Axes::scores: return {name, data, size, strides, p.num_heads, p.query_len, p.key_len};
    case Axes::blocks: return {name, data, size, strides, p.num_heads, blocks_of(p.query_len), blocks_of(p.key_len)};
    case Axes::tree: return {name, data, size, strides, 1, p.tree_size, (p.tree_size + 31) / 32};
    case Axes::heads: return {name, data, size, strides, p.num_heads, 1, 1};
    case Axes::batch: return {name, data, size, strides, 1, 1, 1};
    case Axes::tensor: break;
  }
  if (rule.input == Input::query) {
    return {name, data, size, strides, p.num_heads, p.query_len, p.head_dim};
  }
  bool of_value = rule.input == Input::value || rule.input == Input::value_scales || rule.input == Input::value_biases;
  return {name, data, size, strides, p.num_kv_heads, p.key_len, columns(p, rule, of_value ? p.value_dim : p.head_dim)};
}

// Checks the sizes and options, and the inputs that both the forward and the backward pass read.
void check_inputs(const AttentionArgs& args, Memory& memory) {
  const AttentionParams& p = args.params;
  check_sizes(p);
  check_options(args);
  check_dtype("dtype", args.dtype);
  if (args.bias) {
    check_dtype("bias_dtype", args.bias_dtype);
  }
  if (p.bits != 0) {
    check_quantised(p);
    check_dtype("group_dtype", args.group_dtype);
  }
  const auto check = [&](const InputRule& rule, const char* name, const void* data, const Strides& strides) {
    bool needed = index(rule.input) < kNumTensors || (rule.dtype == InputDtype::groups && p.bits != 0);
    if (needed || data) {
      memory.input(array_of(args, rule, name, data, strides));
    }
  };
#define FLASHATTN_CHECK(name, ...) check(kInputRules[index(Input::name)], #name, args.name, p.name);
  FLASHATTN_INPUTS(FLASHATTN_CHECK)
#undef FLASHATTN_CHECK
}

Array out_of(const AttentionArgs& args) {
  const AttentionParams& p = args.params;
  return {"out", args.out, size_of(args.dtype), p.out, p.num_heads, p.query_len, p.value_dim};
}
Array lse_of(const AttentionArgs& args) {
  const AttentionParams& p = args.params;
  return {"lse", args.lse, 4, p.lse, p.num_heads, p.query_len, 1};
}
Array row_stats_of(const AttentionArgs& args) {
  const AttentionParams& p = args.params;
  return {"row_stats", args.row_stats, 4, p.row_stats, p.num_heads, p.query_len, 2};
}

}  // namespace

void check(const AttentionArgs& args) {
  Memory memory(args.params);
  check_inputs(args, memory);
  memory.output(out_of(args));
  memory.output(lse_of(args));
  memory.output(row_stats_of(args));
}

void check(const BackwardArgs& args) {
  const AttentionArgs& forward = args.forward;
  const AttentionParams& p = forward.params;
  Memory memory(p);
  check_inputs(forward, memory);
  if (p.bits != 0) {
    fail("bits is ", p.bits, ", expected 0: quantised keys and values have no gradient");
  }
  memory.input(out_of(forward));
  memory.input(lse_of(forward));
  memory.input(row_stats_of(forward));
  memory.input({"out_gradient", args.out_gradient, size_of(forward.dtype), args.out_gradient_strides, p.num_heads,
                p.query_len, p.value_dim});
  memory.optional_input({"lse_gradient", args.lse_gradient, 4, args.lse_gradient_strides, p.num_heads, p.query_len, 1});

  int64_t rows = p.batch_size * p.num_heads * p.query_len, keys = p.batch_size * p.num_kv_heads * p.key_len;
  int64_t size = size_of(forward.dtype);
  memory.row_major_output("query_gradient", args.query_gradient, size, rows * p.head_dim);
  memory.row_major_output("key_gradient", args.key_gradient, size, keys * p.head_dim);
  memory.row_major_output("value_gradient", args.value_gradient, size, keys * p.value_dim);
  memory.row_major_output("delta", args.delta, 4, rows);
}

}  // namespace flashattn::cpu
