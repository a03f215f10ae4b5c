// Which instantiation, constants and blocks each kernel gets for a call.
#include "launch.h"

#include <algorithm>
#include <stdexcept>

#include "../gpu/arguments.h"
#include "../gpu/split.h"

namespace flashattn::cuda {
namespace {

using namespace gpu;

constexpr int kLanes = 32;  // threads of a warp

std::string type_name(Dtype dtype) {
  return dtype == Dtype::float32 ? "float" : dtype == Dtype::float16 ? "half" : "bfloat";
}

// Instantiates `function` of a file for the call's dtype: "rowwise<half, 64, 64>", "cuda_rowwise_half_64_64"; with
// quantised keys and values, if it reads them, "rowwise<half, 64, 64, uint>".
struct Instance {
  std::string source, function;
  std::vector<int> sizes;
  std::vector<Argument> arguments;
  int64_t blocks;
  int threads;
  bool whole_rows = false, whole_keys = false;
};

Launch launch(const Call& call, Instance instance) {
  std::string types_and_sizes = type_name(call.dtype);
  std::string name = "cuda_" + instance.function + "_" + type_name(call.dtype);
  for (int size : instance.sizes) {
    types_and_sizes += ", " + std::to_string(size);
    name += "_" + std::to_string(size);
  }
  constexpr Argument kKey = {Binding::key, Role::input};
  bool reads_keys = std::find(instance.arguments.begin(), instance.arguments.end(), kKey) != instance.arguments.end();
  if (reads_keys && is_quantised(call)) {
    types_and_sizes += ", uint";
    name += "_quantised";
  }
  return {.source = std::move(instance.source),
          .function = name,
          .instantiation = instance.function + "<" + types_and_sizes + ">",
          .constants = constants(call, inputs_are_packed(call), instance.whole_rows, instance.whole_keys),
          .arguments = std::move(instance.arguments),
          .grid = {size(instance.blocks), 1, 1},
          .threadgroup = {size(instance.threads), 1, 1}};
}

std::vector<int> whole_lanes(const Call& call) {
  return {round_up(call.params.head_dim, kLanes), round_up(call.params.value_dim, kLanes)};
}

Launch rowwise(const Call& call) {
  constexpr int kRows = 32;
  const AttentionParams& p = call.params;
  int64_t parts = divide_up(int64_t{p.query_len} * group_of(call), kRows);
  return launch(call, {"rowwise", "rowwise", whole_lanes(call), whole_call(call), parts * p.num_kv_heads * p.batch_size,
                       kRows * kLanes});
}

// Blocks that a multiprocessor of compute capability 9.0 runs at once, by shared memory: it has 227 KB for them.
int blocks_that_fit(int shared_bytes, int registers_allow) {
  constexpr int kShared = 227 * 1024, kReserved = 1024;
  return std::clamp(kShared / (shared_bytes + kReserved), 1, registers_allow);
}

// Bytes of a tile in shared memory: whole panels of 128 bytes.
int tile_bytes(int rows, int columns, int element_size) {
  return round_up(columns * element_size, 128) * rows;
}

// parts: of 16 bits, as which probabilities go into the tensor cores.
Launch prefill(const Call& call, int parts) {
  const AttentionParams& p = call.params;
  int element_size = static_cast<int>(size_of(call.dtype));
  bool wide = element_size == 4;
  int dim = round_up(p.head_dim, wide ? 8 : 16), value_dim = round_up(p.value_dim, wide ? 32 : 16);
  int widest = std::max(dim, value_dim);
  int keys = widest <= (wide ? 64 : 128) ? 64 : widest <= 128 || !wide ? 32 : 16;
  const auto shared_by = [&](int warps) {
    return tile_bytes(16 * warps, dim, element_size) + 2 * tile_bytes(keys, dim, element_size) +
           2 * tile_bytes(keys, value_dim, element_size);
  };
  int warps = shared_by(4) <= call.device.shared_memory ? 4 : 2, rows = 16 * warps;
  Launch result = launch(call, {"prefill",
                                "prefill",
                                {dim, value_dim, warps, keys, parts},
                                whole_call(call),
                                divide_up(p.query_len, rows) * p.num_heads * p.batch_size,
                                warps * kLanes});
  result.dynamic_shared = size(shared_by(warps));
  result.blocks_at_once = blocks_that_fit(shared_by(warps), widest <= 64 && !wide ? 3 : 2);
  return result;
}

// Whether the tensor memory accelerator can read query, key and value: pieces of 16 bytes, and no stride 0.
bool has_boxes(const Call& call) {
  const AttentionParams& p = call.params;
  const auto fits = [](int64_t stride, int64_t size) { return size == 1 || (stride > 0 && stride % 8 == 0); };
  const auto is_fit = [&](Binding binding, const Strides& strides, int64_t rows, int64_t heads) {
    return call.aligned[index(binding)] && fits(strides.row, rows) && fits(strides.head, heads) &&
           fits(strides.batch[0], p.batch_size);
  };
  return inputs_are_packed(call) && p.batch_dims <= 1 && is_fit(Binding::query, p.query, p.query_len, p.num_heads) &&
         is_fit(Binding::key, p.key, p.key_len, p.num_kv_heads) &&
         is_fit(Binding::value, p.value, p.key_len, p.num_kv_heads);
}

Launch prefill_hopper(const Call& call, int parts) {
  if (!has_boxes(call)) {
    return prefill(call, parts);  // which reads any strides, and these are not known before
  }
  struct Shape {
    int groups, keys, stages, blocks, registers, few;
  };
  const AttentionParams& p = call.params;
  int dim = round_up(p.head_dim, 64), value_dim = round_up(p.value_dim, 64), widest = std::max(dim, value_dim);
  Shape shape = widest <= 64    ? Shape{1, 64, 2, 3, 136, 24}
                : widest <= 128 ? Shape{3, 64, p.window == 0 ? 2 : 3, 1, 160, 32}
                                : Shape{2, 64, 2, 1, 240, 24};
  int rows = 64 * shape.groups;
  Launch result = launch(
      call, {"prefill_hopper",
             "prefill_hopper",
             {dim, value_dim, shape.groups, shape.keys, shape.stages, shape.blocks, shape.registers, shape.few, parts},
             whole_call(call),
             divide_up(p.query_len, rows) * p.num_heads * p.batch_size,
             (shape.groups + 1) * 4 * kLanes});
  int barriers = (4 * shape.stages + 1) * 8;
  result.dynamic_shared =
      size(tile_bytes(rows, dim, 2) +
           shape.stages * (tile_bytes(shape.keys, dim, 2) + tile_bytes(shape.keys, value_dim, 2)) + barriers);
  result.blocks_at_once = shape.blocks;
  result.box_rows = {64, shape.keys, shape.keys};
  return result;
}

// Of kernels whose blocks have a chunk of the keys each.
std::vector<Argument> split_call(const Call& call) {
  auto result = whole_call(call);
  for (Binding scratch : {Binding::partial_out, Binding::partial_max, Binding::partial_sum, Binding::arrivals}) {
    result.push_back({scratch, Role::output});
  }
  result.push_back({Binding::split, Role::value});
  return result;
}

// Quantised keys and values, and large heads: each warp has a chunk of keys.
Launch decode_split(const Call& call, const SplitParams& split) {
  constexpr int kWarps = 4;
  const AttentionParams& p = call.params;
  std::vector<int> sizes = whole_lanes(call);
  int widest = std::max(sizes[0], sizes[1]), max_rows = widest <= 128 ? 8 : widest <= 256 ? 4 : 2;
  int rows = group_of(call) * p.query_len, rows_each = std::min(rows, max_rows);
  int64_t warps = divide_up(rows, rows_each) * split.num_chunks;
  sizes.insert(sizes.end(), {rows_each, kWarps});
  return launch(call, {"decode_split", "decode_split", std::move(sizes), split_call(call),
                       divide_up(warps, kWarps) * p.num_kv_heads * p.batch_size, kWarps * kLanes});
}

// All others: a block has 16 rows and a chunk, and its warps take tiles in turns.
struct DecodeShape {
  int dim, value_dim, warps, stages, shared;
};

constexpr int kDecodeRows = 16, kDecodeKeys = 16;  // of a block, of a tile

// As many warps as there is memory for three tiles of each, or two; none where there is not enough for any.
DecodeShape decode_shape(const Call& call) {
  int element_size = static_cast<int>(size_of(call.dtype));
  int dim = round_up(call.params.head_dim, element_size == 4 ? 8 : 16), value_dim = round_up(call.params.value_dim, 32);
  int tiles = tile_bytes(kDecodeKeys, dim, element_size) + tile_bytes(kDecodeKeys, value_dim, element_size);
  for (auto [warps, stages] : {std::pair(8, 3), {4, 3}, {4, 2}, {2, 3}, {2, 2}, {1, 2}}) {
    int results = warps * kDecodeRows * (value_dim + 2) * static_cast<int>(sizeof(float));
    int shared = std::max(tile_bytes(kDecodeRows, dim, element_size) + warps * stages * tiles, results);
    if (shared <= call.device.shared_memory) {
      return {dim, value_dim, warps, stages, shared};
    }
  }
  return {};
}

Launch decode(const Call& call, const SplitParams& split, int64_t row_blocks, const DecodeShape& shape) {
  const AttentionParams& p = call.params;
  Launch result = launch(call, {"decode",
                                "decode",
                                {shape.dim, shape.value_dim, shape.warps, kDecodeKeys, shape.stages},
                                split_call(call),
                                row_blocks * split.num_chunks * p.num_kv_heads * p.batch_size,
                                shape.warps * kLanes});
  result.dynamic_shared = size(shape.shared);
  return result;
}

Launches split_keys(const Call& call) {
  const AttentionParams& p = call.params;
  constexpr int kMerged = 512 * 1024;  // bytes that a block merges in a few microseconds
  int64_t group_rows = int64_t{group_of(call)} * p.query_len, row_bytes = p.value_dim * sizeof(float);
  DecodeShape shape = decode_shape(call);
  bool by_warps = is_quantised(call) || std::max(p.head_dim, p.value_dim) > 256 || shape.warps == 0;
  int64_t row_blocks = by_warps ? 1 : divide_up(group_rows, kDecodeRows), groups = p.batch_size * p.num_kv_heads;
  int64_t block_rows = by_warps ? group_rows : std::min<int64_t>(group_rows, kDecodeRows);
  int64_t blocks = std::max<int64_t>(1, call.device.multiprocessors / (groups * row_blocks));  // of a chunk each
  SplitGoal goal = {.chunks = by_warps ? 2048 : blocks * groups,
                    .min_chunk = by_warps ? 64 : 128,
                    .max_chunks = static_cast<int>(std::clamp<int64_t>(kMerged / (block_rows * row_bytes), 4, 512))};
  Launches result = {.params = p, .split = gpu::split_keys(p, goal)};
  int64_t partial_rows = p.batch_size * p.num_heads * p.query_len * result.split.num_chunks;
  result.launches = {by_warps ? decode_split(call, result.split) : decode(call, result.split, row_blocks, shape)};
  result.scratch = {{Binding::partial_out, partial_rows, p.value_dim},
                    {Binding::partial_max, partial_rows, 1},
                    {Binding::partial_sum, partial_rows, 1},
                    {Binding::arrivals, groups * row_blocks, 1}};
  return result;
}

}  // namespace

Launches realign_launches(const RealignParams& params, int itemsize) {
  constexpr int kThreads = 256;
  Launches result = {.realign = params};
  result.launches = {{.source = "realign",
                      .function = "cuda_realign_" + std::to_string(itemsize),
                      .instantiation = "realign<" + std::to_string(itemsize) + ">",
                      .constants = constants({}, false, false, false),
                      .arguments = arguments({Binding::misaligned}, {Binding::realigned}, {Binding::realign_params}),
                      .grid = {size(divide_up(params.count, kThreads)), 1, 1},
                      .threadgroup = {kThreads, 1, 1}}};
  return result;
}

Launches launches(Kernel kernel, const Call& call) {
  switch (kernel) {
    case Kernel::cuda_decode: return split_keys(call);
    case Kernel::cuda_prefill_hopper: return {.launches = {prefill_hopper(call, 2)}, .params = call.params};
    case Kernel::cuda_prefill: return {.launches = {prefill(call, 2)}, .params = call.params};
    case Kernel::cuda_prefill_hopper_rounded: return {.launches = {prefill_hopper(call, 1)}, .params = call.params};
    case Kernel::cuda_prefill_rounded: return {.launches = {prefill(call, 1)}, .params = call.params};
    case Kernel::cuda_rowwise: return {.launches = {rowwise(call)}, .params = call.params};
    default: throw std::logic_error(std::string(name(kernel)) + " is no forward kernel of CUDA's");
  }
}

}  // namespace flashattn::cuda
