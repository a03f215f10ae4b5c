// What the two primitives, attention and its gradient, have in common.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "arguments.h"
#include "dispatch.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"

namespace flashattn {

class AttentionPrimitive : public mx::Primitive {
 public:
  AttentionPrimitive(mx::Stream stream, Options options, const Present& present)
      : mx::Primitive(stream), options_(std::move(options)), present_(present) {}

  std::pair<std::vector<mx::array>, std::vector<int>> vmap(const std::vector<mx::array>& inputs,
                                                           const std::vector<int>& axes) override;
  bool is_equivalent(const mx::Primitive& other) const override;

 protected:
  // For vmap, which makes the same primitive again.
  virtual std::shared_ptr<AttentionPrimitive> copy() = 0;
  virtual std::vector<mx::Dtype> output_dtypes(const std::vector<mx::array>& inputs) const = 0;
  // The inputs that come behind those of Inputs: how many dimensions each has besides the batch's.
  virtual std::vector<int> dims_of_further_inputs() const = 0;

  Options options_;
  Present present_;
};

Backend backend_of(const mx::Stream& stream);

void allocate(std::vector<mx::array>& outputs);

// Whether each array begins where an element can. A view of bytes may begin in the middle of one.
bool are_aligned(const std::vector<mx::array>& inputs);
// The inputs, with copies, which the stream makes before its next job, of those that do not.
std::vector<mx::array> aligned(const std::vector<mx::array>& inputs, const mx::Stream& stream);

// The stream's encoder, told which arrays its next job reads and writes.
mx::cpu::CommandEncoder& cpu_encoder(const mx::Stream& stream, const std::vector<mx::array>& inputs,
                                     std::vector<mx::array>& outputs);

}  // namespace flashattn
