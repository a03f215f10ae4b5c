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

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  void eval_gpu(const Arrays& inputs, Arrays& outputs) override;

  Arrays jvp(const Arrays& primals, const Arrays& tangents, const std::vector<int>& argnums) override;
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override;

  const char* name() const override { return "FlashAttentionGradient"; }
  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override;
};

}  // namespace flashattn
