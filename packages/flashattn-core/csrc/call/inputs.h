// The inputs of inputs.def as an enum and a table.
#pragma once

#include <array>

#include "block_map.h"
#include "inputs.def"

namespace flashattn {

#define FLASHATTN_ENUMERATOR(name, ...) name,
enum class Input { FLASHATTN_INPUTS(FLASHATTN_ENUMERATOR) count };
#undef FLASHATTN_ENUMERATOR

constexpr int kNumInputs = static_cast<int>(Input::count);
constexpr int kNumTensors = static_cast<int>(Input::value) + 1;  // query, key and value, which every call has

constexpr int index(Input input) {
  return static_cast<int>(input);
}

// See inputs.def for the meaning of each value.
enum class InputDtype { tensor, groups, int32, uint32, boolean, bytes, additive, logits, slopes };
enum class Axes { tensor, scores, blocks, tree, heads, batch };

struct InputRule {
  Input input;
  const char* called;
  InputDtype dtype;
  Axes axes;
};

#define FLASHATTN_RULE(name, called, dtype, axes) InputRule{Input::name, called, InputDtype::dtype, Axes::axes},
constexpr std::array<InputRule, kNumInputs> kInputRules = {FLASHATTN_INPUTS(FLASHATTN_RULE)};
#undef FLASHATTN_RULE

// The number of blocks that a block map has for `length` queries or keys.
constexpr int blocks_of(int length) {
  return (length + kBlockSize - 1) / kBlockSize;
}

// Whether an array uses the fields head, row and column of Strides. Every array uses batch.
struct AxesUsed {
  bool head, row, column;

  constexpr int count() const { return head + row + column; }
};

constexpr AxesUsed used(Axes axes) {
  switch (axes) {
    case Axes::tensor:
    case Axes::scores:
    case Axes::blocks: return {true, true, true};
    case Axes::tree: return {false, true, true};
    case Axes::heads: return {true, false, false};
    default: return {false, false, false};
  }
}

}  // namespace flashattn
