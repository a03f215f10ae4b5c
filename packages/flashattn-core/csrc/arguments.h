// What one call is given: by the caller, and then by a primitive's inputs.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "dispatch.h"
#include "mlx/array.h"
#include "mlx/stream.h"

namespace flashattn {

namespace mx = mlx::core;

constexpr int kHead = -3, kRow = -2, kColumn = -1;  // axes of (*B, H, L, D)

// The optional inputs, in the order in which a primitive has them behind query, key and value.
enum Input { kKeyStart, kKeyStop, kTree, kVisible, kBias, kSinks, kAlibiSlopes, kNumOptionalInputs };

// What messages call them.
constexpr std::array<const char*, kNumOptionalInputs> kInputNames = {
    "mask (key range start)", "mask (key range stop)", "mask (tree)", "mask", "mask", "sinks", "alibi_slopes"};

struct Options {
  std::optional<float> scale;  // none: 1 / sqrt(D)
  float softcap;               // 0: none
  bool causal;
  int window;          // 0: none
  std::string kernel;  // "auto", or a kernel's name

  bool operator==(const Options&) const = default;
};

// A call's arguments; shapes, dtypes and meanings: flash_attention() in Python.
struct Arguments {
  mx::array query, key, value;
  std::array<std::optional<mx::array>, kNumOptionalInputs> optional;
  Options options;
};

using Present = std::array<bool, kNumOptionalInputs>;

Present present_in(const Arguments& arguments);

// What a primitive takes: query, key, value and the optional inputs that are there, in dtypes that kernels read.
std::vector<mx::array> primitive_inputs(const Arguments& arguments, const mx::Stream& stream);

// Those by name. Points into the arrays that it is made of.
struct Inputs {
  const mx::array &query, &key, &value;
  std::array<const mx::array*, kNumOptionalInputs> optional;  // null where absent

  Inputs(const std::vector<mx::array>& primitive_inputs, const Present& present);
  explicit Inputs(const Arguments& arguments);
};

// What the choice of a kernel depends on.
CallShape call_shape(const Inputs& inputs);

mx::Shape batch_shape(const mx::array& query);

// Of out and lse.
std::vector<mx::Shape> shapes_of_outputs(const mx::array& query, const mx::array& value);

}  // namespace flashattn
