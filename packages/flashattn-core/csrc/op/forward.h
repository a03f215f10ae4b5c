// The op and its primitive. The op builds lazy arrays, and the primitive evaluates them.
#pragma once

#include <vector>

#include "../request/arguments.h"
#include "mlx/utils.h"
#include "primitive.h"

namespace flashattn {

// The op. Returns the first of {out, lse, row_stats, exact_out}, see Outputs: out alone if lse is not requested and the
// call is not traced, and all four if with_exact_out or saves_exact_out(). Returns {out, lse} during
// mx.export_function. The caller must have checked the arguments and the device.
Arrays attention(const Arguments& arguments, const Selection& selection, bool with_lse, const mx::Stream& stream,
                 bool with_exact_out = false);

// The shapes of out, lse, row_stats and exact_out.
std::vector<mx::Shape> shapes_of_outputs(const Inputs& inputs, const Options& options);

// Outputs: the first settings.num_outputs of out, lse, row_stats and exact_out.
class FlashAttention : public AttentionPrimitive<FlashAttention> {
 public:
  static constexpr int kNumRounded = 1;
  using AttentionPrimitive::AttentionPrimitive;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  void eval_gpu(const Arrays& inputs, Arrays& outputs) override;

  Arrays jvp(const Arrays& primals, const Arrays& tangents, const std::vector<int>& argnums) override;
  // Throws NoKernelError if no kernel covers a requested gradient of query, key, value or sinks. See gradient.cpp.
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override;

  const char* name() const override { return "FlashAttention"; }
  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override;

 private:
  // Allocates `outputs`. On the CPU and on Metal, also allocates lse and row_stats if `outputs` lacks them, because the
  // kernels always write these.
  Arrays allocated(const Inputs& inputs, const Arrays& outputs);
  Call described(const Inputs& inputs) const;  // with settings.key_len
};

}  // namespace flashattn
