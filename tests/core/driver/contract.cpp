// Checks a call against the contract of contract.h.
#include "contract.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "arrays.h"
#include "call/fail.h"
#include "call/limits.h"
#include "call/options.h"

namespace flashattn::cpu {
namespace {

// No memory holds so many elements. If an array spans fewer, all its offsets fit into int64.
constexpr int64_t kMaxElements = int64_t{1} << 48;

using Wide = __int128;  // holds the position of any element, whatever the sizes and strides are

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

Range check_array(const AttentionArgs& args, const Array& array) {
  Wide first = 0, last = 0;
  bool empty = false;
  for_each_dimension(args.params, array, [&](int64_t size, int64_t stride) {
    if (size == 1 && stride != 0) {  // the stride must be 0, because kernels prefetch one stride ahead
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
  return check_address(array.name, array.data, array.element_size(args), first, last);
}

// Elements of an output must not overlap, because threads would race for them. So each stride must exceed the span of
// all dimensions with smaller strides, as in any permutation of a row-major array.
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
  explicit Memory(const AttentionArgs& args) : args_(args) {}

  void input(const Array& array) { ranges_[count_++] = check_array(args_, array); }
  // Call this after all inputs have been added, because an output is compared with the arrays that were added before.
  void output(const Array& array) {
    Range range = check_array(args_, array);
    if (range.begin < range.end) {
      check_elements_apart(args_.params, array);
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

  const AttentionArgs& args_;
  std::array<Range, kNumInputs + 11> ranges_;  // backward has 4 forward outputs, exact_out, 2 cotangents, 4 results
  int count_ = 0;
};

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
  for_each_input(args, [&](const Array& array, auto&...) { memory.input(array); });
}

}  // namespace

void check(const AttentionArgs& args) {
  Memory memory(args);
  check_inputs(args, memory);
  for_each_output(args, [&](const Array& array, auto&...) { memory.output(array); });
}

void check(const BackwardArgs& args) {
  const AttentionArgs& forward = args.forward;
  const AttentionParams& p = forward.params;
  Memory memory(forward);
  check_inputs(forward, memory);
  if (p.bits != 0) {
    fail("bits is ", p.bits, ", expected 0: quantised keys and values have no gradient");
  }
  const auto read = [&](const Array& array, auto&...) { memory.input(array); };
  for_each_output(forward, read);
  read(exact_out_of(args));
  for_each_cotangent(args, read);

  int64_t rows = p.batch_size * p.num_heads * p.query_len, keys = p.batch_size * p.num_kv_heads * p.key_len;
  int64_t size = size_of(forward.dtype);
  memory.row_major_output("query_gradient", args.query_gradient, size, rows * p.head_dim);
  memory.row_major_output("key_gradient", args.key_gradient, size, keys * p.head_dim);
  memory.row_major_output("value_gradient", args.value_gradient, size, keys * p.value_dim);
  memory.row_major_output("delta", args.delta, 4, rows);
}

}  // namespace flashattn::cpu
