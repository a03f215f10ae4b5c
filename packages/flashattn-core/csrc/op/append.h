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

// The rows that append() returns. Attention reads the arrays behind them if nobody has evaluated the rows, because MLX
// takes a microsecond to evaluate a slice. For other readers this primitive makes a view of the array; the next append
// copies an array of which somebody keeps the rows. The six arrays share one primitive: MLX takes longer to build an
// mx::Slice for each.
class FirstRows : public mx::UnaryPrimitive {
 public:
  using mx::UnaryPrimitive::UnaryPrimitive;

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& rows) override;
  void eval_gpu(const std::vector<mx::array>& inputs, mx::array& rows) override;
  const char* name() const override { return "FlashAttentionFirstRows"; }
};

}  // namespace flashattn
