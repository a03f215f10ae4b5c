// Which instantiation, constants and blocks each kernel gets for a call, and its text.
#include "launch.h"

#include <algorithm>
#include <stdexcept>

#include "../gpu/arguments.h"
#include "../gpu/split.h"

namespace flashattn::cuda {
namespace {

using namespace gpu;

Launch launch(const Call& call, bool packed, std::string function, std::vector<int> sizes,
              std::vector<Argument> arguments, int64_t blocks, int warps, int dynamic_shared) {
  Launch result = gpu::launch(Backend::cuda, call, packed,
                              {.function = std::move(function),
                               .sizes = std::move(sizes),
                               .arguments = std::move(arguments),
                               .grid = {size(blocks), 1, 1},
                               .threads = warps * kLanes});
  result.dynamic_shared = size(dynamic_shared);
  return result;
}
Launch launch(const Call& call, std::string function, std::vector<int> sizes, std::vector<Argument> arguments,
              int64_t blocks, int warps, int dynamic_shared = 0) {
  return launch(call, inputs_are_packed(call), std::move(function), std::move(sizes), std::move(arguments), blocks,
                warps, dynamic_shared);
}

// Blocks of so many rows of one query head.
int64_t blocks_of(const Call& call, int rows) {
  return divide_up(call.params.query_len, rows) * call.params.num_heads * call.params.batch_size;
}

// Bytes of a tile in shared memory: whole panels of 128 bytes.
int tile_bytes(int rows, int columns, int element_bytes) {
  return round_up(columns * element_bytes, 128) * rows;
}

// Whether quantised keys and values go into the tensor cores as they are. See quantised_tile.h.
bool has_integer_tiles(const Call& call) {
  return is_quantised(call) && (call.params.bits == 4 || call.params.bits == 8) && call.dtype != Dtype::float32;
}

// Bytes of a tile of keys with their values.
int stage_bytes(const Call& call, int keys, int dim, int value_dim) {
  if (!is_quantised(call)) {
    return tile_bytes(keys, dim, size_of(call.dtype)) + tile_bytes(keys, value_dim, size_of(call.dtype));
  }
  int columns = dim + value_dim, groups = 2 * columns / call.params.group_size * size_of(call.group_dtype);
  return round_up((round_up(columns * call.params.bits / 8, 128) + groups) * keys, 128);
}

Launch rowwise(const Call& call) {
  constexpr int kRows = 32;  // of a block, each with a warp
  return launch(call, "rowwise", whole_lanes(call), whole_call(call),
                divide_up(rows_of_group(call), kRows) * num_groups(call), kRows);
}

// parts: of 16 bits, as which probabilities go into the tensor cores.
Launch prefill(const Call& call, int parts) {
  constexpr int kStages = 2, kSharedOfHopper = 227 * 1024, kReserved = 1024;
  int bytes = size_of(call.dtype);
  bool wide = bytes == 4;
  int dim = round_up(call.params.head_dim, wide ? 8 : 16), value_dim = round_up(call.params.value_dim, wide ? 32 : 16);
  int widest = std::max(dim, value_dim);
  int keys = is_quantised(call) ? 32 : widest <= (wide ? 64 : 128) ? 64 : widest <= 128 ? 32 : 16;
  int stage = stage_bytes(call, keys, dim, value_dim);
  const auto shared_by = [&](int warps) { return tile_bytes(16 * warps, dim, bytes) + kStages * stage; };
  int warps = shared_by(4) <= call.device.shared_memory ? 4 : 2, shared = shared_by(warps);
  Launch result = launch(call, "prefill", {dim, value_dim, warps, keys, parts}, whole_call(call),
                         blocks_of(call, 16 * warps), warps, shared);
  int registers_allow = widest <= 64 && !wide ? 3 : 2;
  result.blocks_at_once = std::clamp(kSharedOfHopper / (shared + kReserved), 1, registers_allow);
  return result;
}

// Whether the tensor memory accelerator can read them: pieces of 16 bytes, no stride 0, and rows that do not overlap.
bool has_boxes(const Call& call) {
  const AttentionParams& p = call.params;
  const auto fits = [](int64_t stride, int64_t size) { return size == 1 || (stride > 0 && stride % 8 == 0); };
  const auto is_fit = [&](Binding binding, const Strides& strides, int64_t rows, int64_t heads, int columns) {
    return call.aligned[index(binding)] && fits(strides.row, rows) && fits(strides.head, heads) &&
           fits(strides.batch[0], p.batch_size) && (strides.row >= columns || rows == 1);
  };
  return inputs_are_packed(call) && p.batch_dims <= 1 &&
         is_fit(Binding::query, p.query, p.query_len, p.num_heads, p.head_dim) &&
         is_fit(Binding::key, p.key, p.key_len, p.num_kv_heads, p.head_dim) &&
         is_fit(Binding::value, p.value, p.key_len, p.num_kv_heads, p.value_dim);
}

Launch prefill_hopper(const Call& call, int parts) {
  struct Shape {
    int groups, stages, blocks, registers, few;
  };
  constexpr int kKeys = 64, kRowsOfGroup = 64, kWarpsOfGroup = 4;
  int dim = round_up(call.params.head_dim, 64), value_dim = round_up(call.params.value_dim, 64);
  int widest = std::max(dim, value_dim);
  auto [groups, stages, blocks, registers, few] = widest <= 64 ? Shape{1, 2, 3, 136, 24}
                                                  : widest <= 128
                                                      ? Shape{3, call.params.window == 0 ? 2 : 3, 1, 160, 32}
                                                      : Shape{2, 2, 1, 240, 24};
  int rows = kRowsOfGroup * groups, barriers = (4 * stages + 1) * 8;
  int shared = tile_bytes(rows, dim, 2) + stages * (tile_bytes(kKeys, dim, 2) + tile_bytes(kKeys, value_dim, 2));
  Launch result = launch(call, "prefill_hopper", {dim, value_dim, groups, kKeys, stages, blocks, registers, few, parts},
                         whole_call(call), blocks_of(call, rows), (groups + 1) * kWarpsOfGroup, shared + barriers);
  result.blocks_at_once = blocks;
  result.box_rows = {rows, kKeys, kKeys};
  return result;
}

// Of kernels whose blocks have a chunk of the keys each.
std::vector<Argument> split_call(const Call& call, const Launches& launches) {
  std::vector<Argument> result = whole_call(call);
  result.push_back({Binding::split, Role::value});
  for (const Scratch& scratch : launches.scratch) result.push_back({scratch.binding, Role::output});
  return result;
}

// Without the launch. A chunk is read by blocks that have up to so many rows of a group each.
Launches split_keys(const Call& call, int64_t chunks, int min_chunk, int64_t rows_of_block) {
  constexpr int64_t kMerged = 512 * 1024;  // bytes that a block merges in a few microseconds
  const AttentionParams& p = call.params;
  int64_t bytes_of_chunk = std::min(rows_of_group(call), rows_of_block) * p.value_dim * int64_t{sizeof(float)};
  int max_chunks = static_cast<int>(std::clamp<int64_t>(kMerged / bytes_of_chunk, 4, 512));
  Launches result = {.params = p, .split = gpu::split_keys(p, {chunks, min_chunk, max_chunks})};
  result.scratch = {{Binding::partials, partials_of(p, result.split)},
                    {Binding::arrivals, num_groups(call) * divide_up(rows_of_group(call), rows_of_block)}};
  return result;
}

// Quantised keys and values, and large heads: each warp has a chunk of keys.
Launches decode_split(const Call& call) {
  constexpr int kWarps = 4;
  std::vector<int> sizes = whole_lanes(call);
  int widest = std::max(sizes[0], sizes[1]), max_rows = widest <= 128 ? 8 : widest <= 256 ? 4 : 2;
  int rows = static_cast<int>(rows_of_group(call)), rows_each = std::min(rows, max_rows);
  sizes.insert(sizes.end(), {rows_each, kWarps});
  Launches result = split_keys(call, 2048, 64, rows);
  int64_t warps = divide_up(rows, rows_each) * result.split.num_chunks;
  result.launches = {launch(call, "decode_split", std::move(sizes), split_call(call, result),
                            divide_up(warps, kWarps) * num_groups(call), kWarps)};
  return result;
}

// All others: a block has up to 16 rows and a chunk, and as many warps as there is memory for three tiles of each, or
// two.
Launches decode(const Call& call) {
  constexpr int kMaxDim = 256, kPadding = 10;  // up to 8 by kPitch, maximum and sum
  int bytes = size_of(call.dtype), dim = round_up(call.params.head_dim, bytes == 4 ? 8 : 16);
  int value_dim = round_up(call.params.value_dim, 32);
  int rows = rows_of_group(call) <= 8 ? 8 : 16, keys = is_quantised(call) ? 32 : 16;
  int tiles = stage_bytes(call, keys, dim, value_dim);
  int widest = std::max(dim, value_dim), most = is_quantised(call) && widest <= 64 ? 16 : 8;  // unpacking takes many
  for (auto [warps, stages] : {std::pair(most, 3), {8, 3}, {4, 3}, {4, 2}, {2, 3}, {2, 2}, {1, 2}}) {
    int results = warps * rows * (value_dim + kPadding) * static_cast<int>(sizeof(float));
    int shared = std::max(tile_bytes(rows, dim, bytes) + warps * stages * tiles, results);
    if ((is_quantised(call) && !has_integer_tiles(call)) || widest > kMaxDim || shared > call.device.shared_memory) {
      continue;
    }
    int64_t row_blocks = divide_up(rows_of_group(call), rows);
    int64_t chunks = std::max<int64_t>(1, call.device.multiprocessors / (num_groups(call) * row_blocks));  // of a group
    Launches result = split_keys(call, chunks * num_groups(call), 128, rows);
    if (result.split.num_chunks == 1) result.scratch.clear();  // nothing is partial
    result.launches = {launch(call, "decode", {dim, value_dim, rows, warps, keys, stages}, split_call(call, result),
                              row_blocks * result.split.num_chunks * num_groups(call), warps, shared)};
    return result;
  }
  return decode_split(call);
}

// --- The gradient ------------------------------------------------------------------------------------------

Launch backward_delta(const Call& call) {
  constexpr int kWarps = 8;
  return launch(call, "backward_delta", {kWarps}, delta_arguments(call), blocks_of(call, kWarps), kWarps);
}

enum Gradient { dq, dk_and_dv, dk, dv };  // gradient_rows.h's

Launch backward(const Call& call, bool packed, Gradient of) {
  const AttentionParams& p = call.params;
  int bytes = size_of(call.dtype), step = bytes == 4 ? 32 : 16;
  int dim = round_up(p.head_dim, step), value_dim = round_up(p.value_dim, step), widest = std::max(dim, value_dim);
  int columns = (widest <= 64 ? 64 : widest <= 128 ? 32 : 16) / (bytes == 4 && widest <= 128 ? 2 : 1);
  const auto shared_by = [&](int warps) {
    int saved = 2 * columns * 3 * static_cast<int>(sizeof(float));
    return tile_bytes(16 * warps + 2 * columns, dim, bytes) + tile_bytes(16 * warps + 2 * columns, value_dim, bytes) +
           saved;
  };
  int warps = 4;
  while (warps > 1 && shared_by(warps) > call.device.shared_memory) warps /= 2;
  std::vector<Argument> arguments = backward_arguments(call, {});
  if (of == dq) arguments.push_back({Binding::dq, Role::output});
  if (of == dk || of == dk_and_dv) arguments.push_back({Binding::dk, Role::output});
  if (of == dv || of == dk_and_dv) arguments.push_back({Binding::dv, Role::output});
  int64_t blocks = of == dq ? blocks_of(call, 16 * warps) : divide_up(p.key_len, 16 * warps) * num_groups(call);
  return launch(call, packed, "backward", {dim, value_dim, warps, columns, of}, std::move(arguments), blocks, warps,
                shared_by(warps));
}

}  // namespace

std::string source_text(const Launch& launch) {
  // No warnings of constants that a kernel does not use, and of divisions by those that a call does not have.
  std::string text = "#pragma nv_diag_suppress 39, 177\n";
  text += "typedef int int32_t;\ntypedef long long int64_t;\ntypedef unsigned long long uint64_t;\n";
  for (const Constant& constant : launch.constants) {
    const bool* flag = std::get_if<bool>(&constant.value);
    std::string value = flag ? (*flag ? "true" : "false") : std::to_string(std::get<int32_t>(constant.value));
    text += std::string("constexpr ") + (flag ? "bool " : "int ") + std::string(constant.name) + " = " + value + ";\n";
  }
  for (int i = 0; i < kNumBindings; ++i) {
    text += "#define FLASHATTN_BINDING_" + std::string(name(static_cast<Binding>(i))) + " " + std::to_string(i) + "\n";
  }
  bool is_backward = std::any_of(launch.arguments.begin(), launch.arguments.end(),
                                 [](Argument argument) { return argument.binding == Binding::backward; });
  std::string_view arguments = is_backward ? "Backward" : launch.box_rows.empty() ? "" : "Box";
  return text + text_of(sources(), launch) + "\nextern \"C\" __global__ void __launch_bounds__(" +
         std::to_string(launch.threadgroup[0]) + ", " + std::to_string(launch.blocks_at_once) + ") " + launch.function +
         "(const __grid_constant__ flashattn::cuda::" + std::string(arguments) + "Arguments arguments) {\n  " +
         launch.instantiation + "(arguments);\n}\n";
}

Kernel kernel_that_reads(const Call& call, Kernel kernel) {
  if (kernel == Kernel::cuda_prefill_hopper && !has_boxes(call)) return Kernel::cuda_prefill;
  if (kernel == Kernel::cuda_prefill_hopper_rounded && !has_boxes(call)) return Kernel::cuda_prefill_rounded;
  return kernel;
}

Launches backward_launches(const Call& call, const BackwardParams& params) {
  Launches result = {.params = call.params, .backward = params};
  bool packed = backward_is_packed(call, params);
  // The sums of both dk and dv are more than a thread's registers where a row is wide.
  int bytes_of_row = (call.params.head_dim + call.params.value_dim) * size_of(call.dtype);
  std::vector<Launch> all = {backward_delta(call), backward(call, packed, dq)};
  if (bytes_of_row <= 512) {
    all.push_back(backward(call, packed, dk_and_dv));
  } else {
    all.push_back(backward(call, packed, dk));
    all.push_back(backward(call, packed, dv));
  }
  for (Launch& launch : all) {
    if (launch.grid[0] != 0) result.launches.push_back(std::move(launch));
  }
  return result;
}

Launches launches(Kernel kernel, const Call& call) {
  switch (kernel) {
    case Kernel::cuda_decode: return decode(call);
    case Kernel::cuda_prefill_hopper: return {.launches = {prefill_hopper(call, 2)}, .params = call.params};
    case Kernel::cuda_prefill: return {.launches = {prefill(call, 2)}, .params = call.params};
    case Kernel::cuda_prefill_hopper_rounded: return {.launches = {prefill_hopper(call, 1)}, .params = call.params};
    case Kernel::cuda_prefill_rounded: return {.launches = {prefill(call, 1)}, .params = call.params};
    case Kernel::cuda_rowwise: return {.launches = {rowwise(call)}, .params = call.params};
    default: throw std::logic_error(std::string(name(kernel)) + " is no forward kernel of CUDA's");
  }
}

}  // namespace flashattn::cuda
