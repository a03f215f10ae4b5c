// Computes the block maps of a call's masks, and keeps maps of masks that several calls share.
#include "block_map.h"

#include <algorithm>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <utility>

#include "../call/inputs.h"
#include "../cpu/block_map.h"
#include "../dispatch/cpu_call.h"
#include "../dispatch/gpu_call.h"
#include "../dispatch/memory.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"

namespace flashattn {
namespace {

// Calls share a map until it is evaluated: after that, somebody may have written to the mask's memory, for example
// through a NumPy view. A map is used only in the thread that made it, because two threads must not evaluate the same
// array.
struct KeptMap {
  mx::Stream stream;
  std::thread::id thread;
  mx::Dtype dtype;  // the mask's dtype in the kernels
  mx::array map;
};
struct KeptMask {
  mx::array mask;  // kept alive, because a new array could get the id of a freed one
  int holders = 0;
  std::optional<KeptMap> made = {};
};
struct KeptMasks {
  std::mutex mutex;
  std::unordered_map<std::uintptr_t, KeptMask> masks;
};
KeptMasks& kept() {
  static KeptMasks& kept = *new KeptMasks;  // never destroyed: arrays may outlive static destruction
  return kept;
}

// Allocates memory for the map, only for its distinct blocks. Along axes on which the mask is broadcast, the map gets
// stride 0. Returns the mask's shape, in which these axes have size 1, its strides, and the number of distinct blocks.
ArrayParams allocate_map(const mx::array& mask, mx::array& map, const mx::Stream& stream) {
  ArrayParams params = {.count = 1, .ndim = static_cast<int32_t>(mask.ndim()), .shape = {}, .strides = {}};
  mx::Shape shape = map.shape();
  for (int d = 0; d < params.ndim; ++d) {
    bool repeats = mask.strides(d) == 0 && mask.shape(d) > 1;
    if (repeats) shape[d] = 1;
    params.shape[d] = repeats ? 1 : mask.shape(d);
    params.strides[d] = mask.strides(d);
    params.count *= shape[d];
  }
  // The array gets a primitive because MLX's CUDA backend allocates on the stream of an array's primitive.
  Arrays blocks = {mx::array(shape, mx::uint8, std::make_shared<mx::Exp>(stream), {})};
  allocate(blocks, stream);
  mx::Strides strides = blocks[0].strides();
  for (int d = 0; d < params.ndim; ++d) {
    if (shape[d] != map.shape(d)) strides[d] = 0;
  }
  auto flags = blocks[0].flags();
  if (shape != map.shape()) flags.row_contiguous = flags.col_contiguous = false;
  map.copy_shared_buffer(blocks[0], strides, flags, blocks[0].data_size());
  return params;
}

cpu::MaskType type_of(mx::Dtype dtype) {
  return dtype == mx::bool_     ? cpu::MaskType::boolean
         : dtype == mx::float32 ? cpu::MaskType::float32
         : dtype == mx::float16 ? cpu::MaskType::float16
                                : cpu::MaskType::bfloat16;
}

// Input: a mask with at least two axes. Output: uint8, with an element for each block of the mask's last two axes.
class BlockMap : public mx::Primitive {
 public:
  explicit BlockMap(mx::Stream stream) : mx::Primitive(stream) {}

  void eval_cpu(const Arrays& given_inputs, Arrays& outputs) override {
    Arrays inputs = aligned_on_cpu(given_inputs, stream());
    ArrayParams params = allocate_map(inputs[0], outputs[0], stream());
    if (params.count == 0) return;
    cpu_encoder(stream(), inputs, outputs)
        .dispatch([mask = inputs[0].data<void>(), type = type_of(inputs[0].dtype()), params,
                   map = outputs[0].data<uint8_t>()] { cpu::find_block_map(mask, type, params, map); });
  }

  void eval_gpu(const Arrays& inputs, Arrays& outputs) override {
    ArrayParams params = allocate_map(inputs[0], outputs[0], stream());
    if (params.count == 0) return;
    run_on_gpu(block_map_work(backend_of(stream().device), inputs[0], params, outputs[0]), stream());
  }

  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs, const std::vector<int>& axes) override;

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    mx::Shape shape = inputs[0].shape();
    for (int axis : {kRow, kColumn}) *(shape.end() + axis) = blocks_of(inputs[0].shape(axis));
    return {shape};
  }

  const char* name() const override { return "FlashAttentionBlockMap"; }
  bool is_equivalent(const mx::Primitive&) const override { return true; }
};

mx::array make_map(const mx::array& mask, const mx::Stream& s) {
  mx::array whole = mask.is_tracer() ? mx::stop_gradient(mask, s) : mask;
  while (whole.ndim() < 2) whole = mx::expand_dims(whole, 0, s);
  auto primitive = std::make_shared<BlockMap>(s);
  mx::Shape shape = primitive->output_shapes({whole})[0];
  return mx::array(std::move(shape), mx::uint8, std::move(primitive), {std::move(whole)});
}

std::pair<Arrays, std::vector<int>> BlockMap::vmap(const Arrays& inputs, const std::vector<int>& axes) {
  mx::array mask = axes[0] > 0 ? mx::moveaxis(inputs[0], axes[0], 0, stream()) : inputs[0];
  return {{make_map(mask, stream())}, {axes[0] < 0 ? -1 : 0}};
}

// Returns a kept map for the caller's mask `given`, or makes one. `read` is the same mask in the dtype that kernels
// read.
mx::array map_of(const mx::array& given, const mx::array& read, const mx::Stream& stream) {
  if (given.is_tracer()) return make_map(read, stream);
  std::lock_guard lock(kept().mutex);
  auto found = kept().masks.find(given.id());
  if (found == kept().masks.end()) return make_map(read, stream);
  std::optional<KeptMap>& made = found->second.made;
  std::thread::id thread = std::this_thread::get_id();
  if (!made || made->stream != stream || made->thread != thread || made->dtype != read.dtype() ||
      made->map.status() != mx::array::Status::unscheduled) {
    made = KeptMap{stream, thread, read.dtype(), make_map(read, stream)};
  }
  return made->map;
}

// Joins the maps of two masks. A key is visible if both masks leave it visible.
mx::array joined(const mx::array& a, const mx::array& b, const mx::Stream& s) {
  mx::array shows(int{kBlockShows}, mx::uint8), changes(int{kBlockChanges}, mx::uint8);
  return mx::bitwise_or(mx::bitwise_and(mx::bitwise_and(a, b, s), shows, s),
                        mx::bitwise_and(mx::bitwise_or(a, b, s), changes, s), s);
}

}  // namespace

std::optional<mx::array> block_map_of(const Arguments& arguments, const Inputs& inputs, const mx::Stream& stream) {
  std::optional<mx::array> map;
  for (Input input : {Input::visible, Input::bias}) {
    if (!inputs[input]) continue;
    mx::array one = map_of(*arguments.inputs[index(input)], *inputs[input], stream);
    map = map ? joined(*map, one, stream) : one;
  }
  return map;
}

void add_block_map(const Arguments& arguments, Arrays& inputs, Present& present, Backend backend,
                   const mx::Stream& stream) {
  Inputs named(inputs, present);
  if (!has_block_map(backend, named.query().shape(kRow), named.key().shape(kRow))) return;
  std::optional<mx::array> map = block_map_of(arguments, named, stream);
  if (!map) return;
  inputs.insert(inputs.begin() + std::count(present.begin(), present.begin() + index(Input::block_map), true), *map);
  present[index(Input::block_map)] = true;
}

std::uintptr_t keep_block_maps(const mx::array& mask) {
  std::lock_guard lock(kept().mutex);
  auto found = kept().masks.try_emplace(mask.id(), KeptMask{mask}).first;
  ++found->second.holders;
  return found->first;
}

void forget_block_maps(std::uintptr_t mask_id) {
  std::optional<KeptMask> last;  // destroyed after the lock is released
  std::lock_guard lock(kept().mutex);
  auto found = kept().masks.find(mask_id);
  if (found == kept().masks.end() || --found->second.holders > 0) return;
  last = std::move(found->second);
  kept().masks.erase(found);
}

}  // namespace flashattn
