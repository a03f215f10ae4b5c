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
enum Input {
  kKeyStart,
  kKeyStop,
  kTree,
  kVisible,
  kBias,
  kSinks,
  kAlibiSlopes,
  // Of quantised keys and values: all or none of them.
  kKeyScales,
  kKeyBiases,
  kValueScales,
  kValueBiases,
  kNumOptionalInputs
};

// What messages call them.
constexpr std::array<const char*, kNumOptionalInputs> kInputNames = {"mask (key range start)",
                                                                     "mask (key range stop)",
                                                                     "mask (tree)",
                                                                     "mask",
                                                                     "mask",
                                                                     "sinks",
                                                                     "alibi_slopes",
                                                                     "key scales",
                                                                     "key biases",
                                                                     "value scales",
                                                                     "value biases"};

struct Options {
  std::optional<float> scale;  // none: 1 / sqrt(D)
  float softcap;               // 0: none
  bool causal;
  int window;          // 0: none
  std::string kernel;  // "auto", or a kernel's name
  int bits = 0;        // of an element of key and value, which are uint32 words then; 0: they are not quantised
  int group_size = 0;

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

// Elements of a row of key or value.
int columns_of(const mx::array& tensor, const Options& options);

// What the choice of a kernel depends on.
CallShape call_shape(const Inputs& inputs, const Options& options);

mx::Shape batch_shape(const mx::array& query);

// Of out and lse.
std::vector<mx::Shape> shapes_of_outputs(const Inputs& inputs, const Options& options);

}  // namespace flashattn
