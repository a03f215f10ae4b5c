// The arguments of one call, and the primitive's inputs, which are made from the arguments.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "../call/choose.h"
#include "../call/inputs.h"
#include "mlx/array.h"
#include "mlx/device.h"
#include "mlx/stream.h"

namespace flashattn {

namespace mx = mlx::core;

using Arrays = std::vector<mx::array>;

constexpr int kHead = -3, kRow = -2, kColumn = -1;  // axes of (*B, H, L, D)

struct Options {
  std::optional<float> scale = {};  // none: 1 / sqrt(D)
  Precision precision = Precision::float32;
#define FLASHATTN_OPTION(type, name) type name = {};
  FLASHATTN_OPTIONS(FLASHATTN_OPTION)
#undef FLASHATTN_OPTION

  bool operator==(const Options&) const = default;
};

// A call's arguments; flash_attention() in Python documents them. Query, key and value are always present, except in
// a LoweredMask (csrc/python).
struct Arguments {
  std::array<std::optional<mx::array>, kNumInputs> inputs;
  Options options = {};
  std::optional<Kernel> kernel = {};  // none: "auto"
};

using Present = std::array<bool, kNumInputs>;

Present present_in(const Arguments& arguments);

// Returns the inputs for a primitive: those that the call has, in the order of inputs.def and in the dtypes that
// kernels read.
Arrays primitive_inputs(const Arguments& arguments, Backend backend, const mx::Stream& stream);

// A call's inputs by name. Holds pointers, so the arrays must outlive the Inputs.
class Inputs {
 public:
  Inputs(const Arrays& primitive_inputs, const Present& present);
  explicit Inputs(const Arguments& arguments);

  const mx::array* operator[](Input input) const { return arrays_[index(input)]; }  // null where absent
  const mx::array& query() const { return *arrays_[index(Input::query)]; }
  const mx::array& key() const { return *arrays_[index(Input::key)]; }
  const mx::array& value() const { return *arrays_[index(Input::value)]; }

 private:
  std::array<const mx::array*, kNumInputs> arrays_ = {};
};

// Returns the number of elements in a row of key or value. A row of a quantised array has fewer words than elements.
int columns_of(const mx::array& tensor, const Options& options);

// Describes the call. The strides stay 0, because MLX knows them only once it has evaluated the arrays, see strides.h.
Call describe(const Inputs& inputs, const Options& options, bool is_traced = false);
Call describe(const Arguments& arguments);

// Whether mx.grad, mx.vjp, mx.vmap or mx.compile is tracing the call. Only then can anyone ask for its gradient.
bool is_traced(const Arguments& arguments);

// The dtype in which kernels read such arrays.
Dtype dtype_of(mx::Dtype dtype);

// What MLX runs this device's streams on. A GPU's properties are looked up once.
Device device_of(const mx::Device& device);

// Returns the backend of a device. For a GPU, returns the GPU backend of the installed MLX.
Backend backend_of(const mx::Device& device);

mx::Shape batch_shape(const mx::array& query);

}  // namespace flashattn
