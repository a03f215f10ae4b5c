// What to run on the GPU for one call, as plain data: no Metal and no MLX in here, so that the whole of it is computed
// and tested on any machine (tests/metal runs these very launches on the CPU). encode.cpp hands them to Metal.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "../dispatch.h"
#include "../params.h"

namespace flashattn::metal {

enum class Dtype : int32_t { float32 = 1, float16 = 2, bfloat16 = 3 };  // as in kernels/visibility.h

// Where each array is bound, as in kernels/arguments.h.
enum Binding : int {
  kQuery,
  kKey,
  kValue,
  kOut,
  kLse,
  kParams,  // AttentionParams, by value
  kKeyStart,
  kKeyStop,
  kTree,
  kVisible,
  kBias,
  kSinks,
  kAlibiSlopes,
  kPartialOut,   // scratch, float32: one row of value_dim for each chunk and row
  kPartialMax,   // scratch, float32: one number for each chunk and row, in units of log2
  kPartialSum,   // scratch, float32
  kSplitParams,  // SplitParams, by value
  // The gradient's. kernels/gradient.h has the same numbers.
  kSavedOut,  // the forward's outputs, which are inputs here
  kSavedLse,
  kDout,
  kDlse,   // optional
  kDelta,  // float32, (*B, H_q, L): an output of the first launch, an input of the others
  kDq,
  kDk,
  kDv,
  kBackwardParams,  // BackwardParams, by value
  // Of quantised keys and values.
  kKeyScales,
  kKeyBiases,
  kValueScales,
  kValueBiases,
  kQuantParams,  // QuantParams, by value
  kNumBindings   // 31: Metal has no more
};

// One function constant of kernels/variant.h.
struct Constant {
  int index;
  std::variant<bool, int32_t> value;

  bool operator==(const Constant&) const = default;
};

using Size = std::array<uint32_t, 3>;

struct Launch {
  std::string source;         // the file in kernels/ that has the template: "decode_split"
  std::string function;       // the name of the instantiation: "metal_decode_split_half_64_64_8"
  std::string instantiation;  // its template arguments: "decode_split<half, 64, 64, 8>"
  std::vector<Constant> constants;
  std::vector<Binding> bindings;  // what it takes
  Size grid;                      // in threadgroups
  Size threadgroup;               // in threads
};

// Everything about a call that the choice of launches depends on.
struct Call {
  AttentionParams params;
  Dtype dtype;       // of query and out, and of key and value if they are not quantised
  Dtype bias_dtype;  // of bias
  QuantParams quant = {};
  Dtype group_dtype = Dtype::float32;           // of scales and biases
  std::array<bool, kNumBindings> present = {};  // of the optional inputs: kKeyStart to kAlibiSlopes, kDlse
};

// The launches of one call, in order; later ones read what the first has written.
struct Launches {
  std::vector<Launch> launches;
  SplitParams split = {};    // where partial results are needed
  int64_t partial_rows = 0;  // rows of the scratch arrays; 0: none needed
};

Launches launches(Kernel kernel, const Call& call);

// head_dim and value_dim that the backward kernels take.
constexpr int kMaxBackwardDim = 256;

// The gradients of one call: delta, dq, and dk and dv, each written completely. Params has the saved outputs as out and
// lse. Without queries, or without keys, what would write nothing is left out.
Launches backward_launches(const Call& call, const BackwardParams& backward);

// The text that Metal compiles for a launch: the kernel's file with everything that it includes, and the one
// instantiation. ASCII.
std::string source_text(const Launch& launch);

}  // namespace flashattn::metal
