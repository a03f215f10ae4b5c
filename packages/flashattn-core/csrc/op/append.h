// Appends rows to the six arrays of a quantised cache: words, scales and biases of keys, then those of values.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "mlx/array.h"
#include "mlx/primitives.h"
#include "mlx/stream.h"

namespace flashattn {

namespace mx = mlx::core;

// Quantises new rows, (B, H, L, D) and (B, H, L, D_v), and writes them to rows offset to offset + L - 1 of the arrays,
// which are (B, H, capacity, columns). Like mlx-lm's QuantizedKVCache, it gives the arrays new content without changing
// arrays that share their memory. Returns the first offset + L rows. Returns nothing, and changes nothing, if the
// default device has no such kernel, or if the kernel does not fit the arrays.
std::optional<std::vector<mx::array>> append(const std::array<mx::array*, 6>& stored, const mx::array& keys,
                                             const mx::array& values, int offset, int group_size, int bits);

// Inputs: the six arrays, new keys and new values. Outputs: the six arrays. It writes in place if nobody else holds an
// input's memory.
class Append : public mx::Primitive {
 public:
  Append(mx::Stream stream, int offset, int group_size, int bits)
      : mx::Primitive(stream), offset_(offset), group_size_(group_size), bits_(bits) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override;
  const char* name() const override { return "FlashAttentionAppend"; }

 private:
  int offset_, group_size_, bits_;
};

// What append() returns: the first rows of an array. FlashAttention reads the array itself, so that nobody evaluates
// the rows. MLX takes a microsecond to evaluate a slice, and longer to build an mx::Slice than an array with this
// primitive, which the six arrays share.
class FirstRows : public mx::UnaryPrimitive {
 public:
  using mx::UnaryPrimitive::UnaryPrimitive;

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& output) override { eval(inputs[0], output); }
  void eval_gpu(const std::vector<mx::array>& inputs, mx::array& output) override { eval(inputs[0], output); }
  const char* name() const override { return "FlashAttentionFirstRows"; }

 private:
  static void eval(const mx::array& whole, mx::array& rows);
};

}  // namespace flashattn
