// The base class of the two primitives, attention and its gradient.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "../request/arguments.h"
#include "../request/select.h"
#include "mlx/primitives.h"

namespace flashattn {

class AttentionPrimitive : public mx::Primitive {
 public:
  AttentionPrimitive(mx::Stream stream, const Options& options, const Selection& selection, const Present& present)
      : mx::Primitive(stream), options_(options), selection_(selection), present_(present) {}

  std::pair<std::vector<mx::array>, std::vector<int>> vmap(const std::vector<mx::array>& inputs,
                                                           const std::vector<int>& axes) override;
  bool is_equivalent(const mx::Primitive& other) const override;

 protected:
  // Makes a primitive with the same settings, for vmap().
  virtual std::shared_ptr<AttentionPrimitive> copy() = 0;
  virtual std::vector<mx::Dtype> output_dtypes(const std::vector<mx::array>& inputs) const = 0;

  Call describe(const Inputs& inputs) const {
    return flashattn::describe(inputs, options_, selection_.precision, /*is_traced=*/false);
  }

  Options options_;
  Selection selection_;
  Present present_;
};

}  // namespace flashattn
