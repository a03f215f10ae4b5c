// libFuzzer's target. It makes one call of the CPU backend from the fuzzer's bytes.
//
// Each byte makes one of the choices that the drivers draw at random: sizes, layouts, options, dtypes. Half of the
// inputs give a legal call. The contract of driver/contract.h must accept it, and its results must agree with the plain
// formula. The other half overwrite some numbers of a legal call. If the contract accepts the changed call, too, the
// call runs on memory that is just as large as its strides reach, and the sanitizers must report no error. With a
// moderate scale and softcap, no output may be NaN.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "arrays.h"
#include "passes.h"

using namespace flashattn;
using namespace flashattn::driver;

namespace {

// Small sizes, so that thousands of calls run in a second. Some are just below or above the size of a tile, of a split
// of the keys, or of a SIMD vector.
const Sizes kTiny = {{{}, {2}, {2, 3}, {1, 2}, {0}, {1, 1, 1, 1, 1, 1, 1, 2}},
                     {1, 2},
                     {1, 2, 7, 0},
                     {1, 2, 5, 8, 9, 17, 70, 0},
                     {1, 7, 33, 0, 97, 289, 513, 600},
                     {1, 7, 16, 17, 32, 33},
                     1 << 13};
constexpr int64_t kMostElements = 1 << 14;  // run_changed() skips calls with larger arrays

[[noreturn]] void report(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::abort();
}

// Returns a number to overwrite `number` with.
template <typename T>
T any_number(Draw& draw, T number) {
  constexpr T kLeast = std::numeric_limits<T>::min(), kMost = std::numeric_limits<T>::max();
  static const std::vector<T> numbers = {
      0,  1,   -1,  2,   3,   5,      8,     9,         16,          32,
      64, 288, 289, 512, 513, kLeast, kMost, kMost / 2, kMost / 512, kMost / 512 / 512};
  int choice = draw.below(32);
  if (choice < 4) return static_cast<T>(static_cast<uint64_t>(number) + static_cast<uint64_t>(choice - 2));
  if (choice == 4) return static_cast<T>(0 - static_cast<uint64_t>(number));
  if (choice == 5) return static_cast<T>(static_cast<uint64_t>(number) * 2);
  return choice < 6 + int(numbers.size()) ? numbers[static_cast<size_t>(choice - 6)] : static_cast<T>(draw.below(256));
}

float any_float(Draw& draw) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  return draw.pick(std::vector<float>{0, 1, -1, 3, 1e-45f, 1e-38f, 1e38f, kInfinity, -kInfinity, NAN});
}

void change_strides(Draw& draw, Strides& strides) {
  int which = draw.below(3 + kMaxBatchDims);
  int64_t& stride = which == 0   ? strides.column
                    : which == 1 ? strides.row
                    : which == 2 ? strides.head
                                 : strides.batch[which - 3];
  stride = any_number(draw, stride);
}

void change(Draw& draw, cpu::BackwardArgs& backward) {
  cpu::AttentionArgs& args = backward.forward;
  AttentionParams& p = args.params;
  int32_t* const integers[] = {&p.batch_dims, &p.batch_shape[0], &p.batch_shape[1], &p.num_heads, &p.num_kv_heads,
                               &p.query_len,  &p.key_len,        &p.head_dim,       &p.value_dim, &p.window,
                               &p.tree_size,  &p.bits,           &p.group_size};
  Strides &of_out = backward.out_gradient_strides, &of_lse = backward.lse_gradient_strides;
  Strides* const strides[] = {&p.query,        &p.key,          &p.value,      &p.out,        &p.lse,
                              &p.visible,      &p.bias,         &p.key_start,  &p.key_stop,   &p.tree,
                              &p.sinks,        &p.alibi_slopes, &p.key_scales, &p.key_biases, &p.value_scales,
                              &p.value_biases, &of_out,         &of_lse,       &p.row_stats};
  switch (draw.below(8)) {
    case 0:
    case 1:
    case 2: {
      int32_t& integer = *integers[draw.below(std::size(integers))];
      integer = any_number(draw, integer);
      break;
    }
    case 3:
    case 4: change_strides(draw, *strides[draw.below(std::size(strides))]); break;
    case 5: p.batch_size = any_number(draw, p.batch_size); break;
    case 6: (draw.chance(50) ? p.scale : p.softcap) = any_float(draw); break;
    case 7: {
      Dtype* const dtypes[] = {&args.dtype, &args.bias_dtype, &args.group_dtype};
      *dtypes[draw.below(3)] = static_cast<Dtype>(draw.below(5));
      break;
    }
  }
}

// One of the call's arrays, and the address of the argument that points to it.
struct Slot {
  cpu::Array array;
  void* pointer;
  int64_t element_size;
  std::function<void(uint8_t*)> write;  // writes one element of an input; null for an output
};

// The positions of all elements, or none if there are too many for this fuzz target.
std::vector<int64_t> positions(const AttentionParams& p, const cpu::Array& array) {
  std::vector<int64_t> result = {0};
  cpu::for_each_dimension(p, array, [&](int64_t size, int64_t stride) {
    std::vector<int64_t> before;
    before.swap(result);
    if (size * int64_t(before.size()) > kMostElements) return;
    for (int64_t position : before) {
      for (int64_t i = 0; i < size; ++i) result.push_back(position + i * stride);
    }
  });
  return result;
}

// The memory of a call that the contract has accepted.
class Memory {
 public:
  // Gives each array memory of its own. Returns false if an array is too large for this fuzz target.
  bool provide(const AttentionParams& p, const std::vector<Slot>& slots) {
    for (const Slot& slot : slots) {
      std::vector<int64_t> at = positions(p, slot.array);
      if (at.empty() && !slot.array.is_empty(p)) return false;
      int64_t first = 0, last = -1;
      for (int64_t position : at) first = std::min(first, position), last = std::max(last, position);
      if (last - first > 4 * kMostElements) return false;
      if (!slot.write && std::set<int64_t>(at.begin(), at.end()).size() < at.size()) {
        report("the contract accepts an output whose elements overlap");
      }
      size_t bytes = static_cast<size_t>((last - first + 1) * slot.element_size);
      blocks_.push_back(std::make_unique<uint8_t[]>(bytes));
      uint8_t* start = blocks_.back().get() - first * slot.element_size;
      if (slot.write) {
        for (int64_t position : at) slot.write(start + position * slot.element_size);
      } else {
        std::memset(blocks_.back().get(), 0xff, bytes);
      }
      std::memcpy(slot.pointer, &start, sizeof(start));
    }
    return true;
  }

 private:
  std::vector<std::unique_ptr<uint8_t[]>> blocks_;
};

// The arrays that a call reads and writes: each array that is empty or has a pointer that is not null.
std::vector<Slot> slots_of(cpu::BackwardArgs& backward, Draw& draw, bool with_gradient) {
  cpu::AttentionArgs& args = backward.forward;
  const AttentionParams& p = args.params;
  const auto writer = [&](InputDtype dtype) -> std::function<void(uint8_t*)> {
    switch (dtype) {
      case InputDtype::boolean: return [&draw](uint8_t* to) { *to = draw.bits() % 2; };
      case InputDtype::uint32:
        return [&draw](uint8_t* to) {
          uint32_t word = draw.bits();
          std::memcpy(to, &word, 4);
        };
      case InputDtype::int32:
        return [&draw, &p](uint8_t* to) {
          int32_t position = draw.chance(20) ? any_number(draw, int32_t{0}) : draw.below(256) % (p.key_len + 1);
          std::memcpy(to, &position, 4);
        };
      default:
        return [&draw, floats = cpu::float_dtype(args, dtype)](uint8_t* to) {
          write_element(rounded(draw.normal(), floats), floats, to);
        };
    }
  };
  std::vector<Slot> slots;
  const auto add = [&](const cpu::Array& array, auto& pointer, std::function<void(uint8_t*)> write) {
    if (pointer || array.is_empty(p)) slots.push_back({array, &pointer, array.element_size(args), std::move(write)});
  };
  const auto add_input = [&](const cpu::Array& array, auto& pointer, auto&) {
    add(array, pointer, writer(array.dtype));
  };
  cpu::for_each_input(args, add_input);
  cpu::for_each_output(args, [&](const cpu::Array& array, auto& pointer, auto&) { add(array, pointer, nullptr); });
  if (with_gradient) {
    const auto row_major = [&](int64_t h, int64_t rows, int64_t columns) {
      Strides strides = {};
      strides.column = 1, strides.row = columns, strides.head = rows * columns;
      for (int64_t d = p.batch_dims - 1, stride = h * rows * columns; d >= 0; stride *= p.batch_shape[d--]) {
        strides.batch[d] = stride;
      }
      return strides;
    };
    const auto add_gradient = [&](auto& pointer, InputDtype dtype, int64_t h, int64_t rows, int64_t columns) {
      add({"", pointer, dtype, row_major(h, rows, columns), h, rows, columns}, pointer, nullptr);
    };
    add_input(cpu::exact_out_of(backward), backward.exact_out, backward.forward.params.out);
    cpu::for_each_cotangent(backward, add_input);
    add_gradient(backward.query_gradient, InputDtype::tensor, p.num_heads, p.query_len, p.head_dim);
    add_gradient(backward.key_gradient, InputDtype::tensor, p.num_kv_heads, p.key_len, p.head_dim);
    add_gradient(backward.value_gradient, InputDtype::tensor, p.num_kv_heads, p.key_len, p.value_dim);
    add_gradient(backward.delta, cpu::kFloat32, p.num_heads, p.query_len, 1);
  }
  return slots;
}

// Reports NaN in an output. All elements were NaN before the call, so elements that the call did not write are found,
// too. Rows that see nothing get an lse of -inf, which is not NaN.
void expect_no_nan(const cpu::AttentionArgs& args, const Slot& output) {
  const uint8_t* start;
  std::memcpy(&start, output.pointer, sizeof(start));
  for (int64_t position : positions(args.params, output.array)) {
    const uint8_t* element = start + position * output.element_size;
    if (std::isnan(read_element(cpu::float_dtype(args, output.array.dtype), element))) report("NaN in an output");
  }
}

// Whether the contract accepts these arguments.
template <typename Args>
bool accepted(const Args& args) {
  try {
    cpu::check(args);
    return true;
  } catch (const std::invalid_argument& error) {
    if (std::string(error.what()).find("[flash_attention] ") != 0) report("a refusal without a name");
    return false;
  }
}

void run_changed(cpu::BackwardArgs args, Draw& draw, bool decode, bool with_gradient) {
  for (int changes = 1 + draw.below(3); changes > 0; --changes) change(draw, args);
  if (!accepted(args.forward) || (with_gradient && !accepted(args))) return;
  const AttentionParams& p = args.forward.params;
  if (p.batch_size * p.num_kv_heads > kMostElements) return;  // legal, but slow even without keys
  Memory memory;
  std::vector<Slot> slots = slots_of(args, draw, with_gradient);
  if (!memory.provide(p, slots)) return;
  int64_t rows = p.batch_size * p.num_heads * p.query_len;
  if (rows * p.key_len * (p.head_dim + p.value_dim) > 8 * kTiny.most_work) return;
  if (!accepted(args.forward) || (with_gradient && !accepted(args))) {
    report("the contract depends on more than null pointers and their alignment");
  }
  decode = decode && p.query_len <= kMaxDecodeLen;
  args.decoded = decode;
  decode ? cpu::decode(args.forward) : cpu::prefill(args.forward);
  if (with_gradient) cpu::backward(args);
  bool tame = std::abs(p.scale) <= 10 && (p.softcap == 0 || p.softcap >= 1);
  for (const Slot& slot : slots) {
    if (!slot.write && tame) expect_no_nan(args.forward, slot);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  // The first byte seeds the random numbers. The last bytes, at most 16, choose the changes.
  size_t for_changes = std::min<size_t>(16, (size - 1) / 2);
  Draw draw{std::mt19937(data[0]), data + 1, size - 1 - for_changes};
  Draw changes{std::mt19937(data[0]), data + size - for_changes, for_changes};
  bool with_gradient = draw.chance(40), changed = draw.chance(50);
  Case c = draw_case(draw, 0, !with_gradient && draw.chance(30), kTiny);
  Inputs in = draw_inputs(c, draw);
  Check check;
  check.slack = 30;  // a long search finds sums whose rounding is very unlucky
  try {
    if (!changed) {
      with_gradient ? check_backward(c, in, draw, check) : check_forward(c, in, draw, check);
    } else {
      CpuCall call(c, in, draw, with_gradient);
      cpu::BackwardArgs args = {};
      args.forward = call.args;
      if (with_gradient) {
        GradientCall gradient(c, call, draw_cotangents(c, draw));
        run_changed(gradient.args, changes, c.decode, true);
      } else {
        run_changed(args, changes, c.decode, false);
      }
    }
  } catch (const std::invalid_argument& error) {
    report(c.describe() + "\nrefused: " + error.what());
  }
  if (!check.failure.empty()) report(c.describe() + "\n" + check.failure);
  return 0;
}
