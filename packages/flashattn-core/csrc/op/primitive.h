// The base class of the two primitives, attention and its gradient.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "../request/arguments.h"
#include "../request/select.h"
#include "mlx/primitives.h"

namespace flashattn {

// What a primitive keeps of its call, besides the inputs.
struct Settings {
  Options options;
  Selection selection;
  Present present;
  int num_outputs;  // of FlashAttention: 1, 3 or 4
  // How many rows of key and value FlashAttention reads; 0: all. Only calls that nobody traces read a part, because
  // derivatives and mx.vmap read all rows.
  int key_len = 0;

  bool operator==(const Settings&) const = default;
};

// Returns a primitive's inputs with the axis that mx.vmap maps as their first batch dimension.
Arrays mapped_inputs(const Arrays& inputs, const std::vector<int>& axes, const Present& present,
                     const mx::Stream& stream);

// The first Derived::kNumRounded outputs have query's dtype, and all others are float32.
template <typename Derived>
class AttentionPrimitive : public mx::Primitive {
 public:
  AttentionPrimitive(mx::Stream stream, const Settings& settings) : mx::Primitive(stream), settings_(settings) {}

  // Returns the lazy outputs of a new primitive.
  static Arrays outputs_of(const mx::Stream& stream, const Settings& settings, std::vector<mx::Shape> shapes,
                           const Arrays& inputs) {
    std::vector<mx::Dtype> dtypes(shapes.size(), mx::float32);
    std::fill_n(dtypes.begin(), Derived::kNumRounded, inputs[0].dtype());
    return mx::array::make_arrays(std::move(shapes), dtypes, std::make_shared<Derived>(stream, settings), inputs);
  }

  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs, const std::vector<int>& axes) override {
    Arrays mapped = mapped_inputs(inputs, axes, settings_.present, stream());
    Arrays outputs = outputs_of(stream(), settings_, output_shapes(mapped), mapped);
    std::vector<int> output_axes(outputs.size(), 0);
    return {std::move(outputs), std::move(output_axes)};
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return settings_ == static_cast<const AttentionPrimitive&>(other).settings_;
  }

 protected:
  Settings settings_;
};

}  // namespace flashattn
