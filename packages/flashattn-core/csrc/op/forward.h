// The op and its primitive. The op builds lazy arrays, and the primitive evaluates them.
#pragma once

#include <vector>

#include "../request/arguments.h"
#include "mlx/utils.h"
#include "primitive.h"

namespace flashattn {

// The op. Returns {out, lse, row_stats}, see Outputs. Returns {out} if lse is not requested and the call is not traced,
// and {out, lse} during mx.export_function. The caller must have run check_arguments() and require_device().
std::vector<mx::array> attention(const Arguments& arguments, const Selection& selection, bool with_lse,
                                 const mx::Stream& stream);

// Throws std::invalid_argument for wrong environment variables, and NoKernelError for an unsuitable GPU. Both are
// checked before evaluation, because a caller cannot catch errors during evaluation.
void require_device(Backend backend, mx::Device device);

std::vector<mx::Shape> shapes_of_outputs(const Inputs& inputs, const Options& options);

// Outputs: out, lse and row_stats, or out alone.
class FlashAttention : public AttentionPrimitive {
 public:
  FlashAttention(mx::Stream stream, const Options& options, const Selection& selection, const Present& present,
                 bool out_alone)
      : AttentionPrimitive(stream, options, selection, present), out_alone_(out_alone) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;

  std::vector<mx::array> jvp(const std::vector<mx::array>& primals, const std::vector<mx::array>& tangents,
                             const std::vector<int>& argnums) override;
  std::vector<mx::array> vjp(const std::vector<mx::array>& primals, const std::vector<mx::array>& cotangents,
                             const std::vector<int>& argnums, const std::vector<mx::array>& outputs) override;

  const char* name() const override { return "FlashAttention"; }
  bool is_equivalent(const mx::Primitive& other) const override;
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override;

 protected:
  std::shared_ptr<AttentionPrimitive> copy() override;
  std::vector<mx::Dtype> output_dtypes(const std::vector<mx::array>& inputs) const override;

 private:
  // Allocates `outputs`. On the CPU and on Metal, also allocates lse and row_stats if `outputs` lacks them, because the
  // kernels always write all three outputs.
  std::vector<mx::array> allocated(const Inputs& inputs, const std::vector<mx::array>& outputs);

  bool out_alone_;
};

}  // namespace flashattn
