// The gradient of attention. A primitive computes the gradients of query, key and value. MLX's operations compute all
// other gradients.
#pragma once

#include <vector>

#include "primitive.h"

namespace flashattn {

// Inputs: the inputs of FlashAttention, then its outputs out (or exact_out if it has that), lse and row_stats, then the
// cotangents of out and lse.
// Outputs: the gradients of query, key and value, then delta, see cpu/backward.h.
class FlashAttentionGradient : public AttentionPrimitive<FlashAttentionGradient> {
 public:
  static constexpr int kNumRounded = 3;
  using AttentionPrimitive::AttentionPrimitive;

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;

  std::vector<mx::array> jvp(const std::vector<mx::array>& primals, const std::vector<mx::array>& tangents,
                             const std::vector<int>& argnums) override;
  std::vector<mx::array> vjp(const std::vector<mx::array>& primals, const std::vector<mx::array>& cotangents,
                             const std::vector<int>& argnums, const std::vector<mx::array>& outputs) override;

  const char* name() const override { return "FlashAttentionGradient"; }
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override;
};

}  // namespace flashattn
