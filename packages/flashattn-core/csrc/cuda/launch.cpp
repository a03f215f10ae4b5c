// Chooses the instantiation, constants and grid of each CUDA kernel for a call, and writes the kernel's text.
#include "launch.h"

#include <algorithm>
#include <bit>
#include <optional>
#include <stdexcept>

#include "../call/spans.h"
#include "../gpu/split.h"
#include "arguments.h"

namespace flashattn::cuda {
namespace {

using namespace gpu;

// packed: the value of the constant packed_rows. By default it is inputs_are_packed(call), as in the forward pass.
Launch launch(const GpuCall& call, std::string function, std::vector<Constant> sizes, std::vector<Argument> arguments,
              int64_t blocks, int warps, int dynamic_shared = 0, std::optional<bool> packed = std::nullopt) {
  Launch result = gpu::launch(Backend::cuda, call, packed.value_or(inputs_are_packed(call)),
                              {.function = std::move(function),
                               .sizes = std::move(sizes),
                               .arguments = std::move(arguments),
                               .grid = {size(blocks), 1, 1},
                               .threads = warps * kLanes});
  result.dynamic_shared = size(dynamic_shared);
  return result;
}

// The number of blocks that a call needs if each block computes `rows` rows of one query head.
int64_t blocks_of(const GpuCall& call, int rows) {
  return divide_up(call.params.query_len, rows) * call.params.num_heads * call.params.batch_size;
}

// How many bytes a tile takes in shared memory. SharedTile pads each row to a multiple of 128 bytes.
int tile_bytes(int rows, int columns, int element_bytes) {
  return round_up(columns * element_bytes, 128) * rows;
}

// How many bytes a stage of the pipeline takes. A stage is a tile of keys and the tile of their values.
int stage_bytes(const GpuCall& call, int keys, int dim, int value_dim) {
  if (!is_quantised(call)) {
    return tile_bytes(keys, dim, size_of(call.dtype)) + tile_bytes(keys, value_dim, size_of(call.dtype));
  }
  const auto bytes_of = [&](int columns) {
    int words = columns * call.params.bits / 8;
    int pitch = words > 128 ? round_up(words, 128) : static_cast<int>(std::bit_ceil(static_cast<unsigned>(words)));
    return pitch + 2 * columns / call.params.group_size * size_of(call.group_dtype);
  };
  return round_up((bytes_of(dim) + bytes_of(value_dim)) * keys, 128);
}

Launch rowwise(const GpuCall& call) {
  constexpr int kRows = 32;  // rows per block: each of its 32 warps computes one row
  return launch(call, "rowwise", whole_lanes(call), whole_call(call),
                divide_up(rows_of_group(call), kRows) * num_groups(call), kRows);
}

// A probability (P), or the gradient of a score (dS), is represented as the sum of this many 16-bit floats. Two of them
// reach the accuracy of float32.
int parts_of_products(const GpuCall& call) {
  return call.dtype != Dtype::float32 && call.precision == Precision::input ? 1 : 2;
}

// Reserves shared memory for `lists` lists of visible tiles (see kernels/mapped_tiles.h), and adds the bytes to
// `shared`. A list covers `positions` keys or queries, and a tile has `tile` of them. If the lists do not fit, the call
// ignores its block map. The reserved size must not depend on the number of keys or queries, because driver.cpp sets a
// kernel's limit of shared memory only once.
void reserve_lists(GpuCall& call, int& shared, int64_t positions, int tile, int64_t lists = 1) {
  if (!call.has(Input::block_map)) return;
  constexpr int kMost = 8 * 1024;
  int bytes = std::clamp(call.device.shared_memory - shared, 0, kMost);
  bool fits = lists * (divide_up(positions, tile) + 2) * static_cast<int>(sizeof(uint32_t)) <= bytes;
  call.given[index(Input::block_map)] = fits;
  if (fits) shared += bytes;
}

// Describes an input array for the TMA, which copies box_rows rows at a time.
MappedArray mapped(const GpuCall& call, Binding array, const Strides& strides, int box_rows = 1) {
  const AttentionParams& p = call.params;
  bool of_keys = array == Binding::key || array == Binding::value;
  int columns = array == Binding::key || array == Binding::query ? p.head_dim : p.value_dim;
  return {array,
          box_rows,
          {columns, of_keys ? p.key_len : p.query_len, of_keys ? p.num_kv_heads : p.num_heads, p.batch_size},
          {strides.row, strides.head, strides.batch[0]}};
}

// Whether the tensor memory accelerator (TMA) can read a 16-bit array. The array must begin at a multiple of 16 bytes,
// its strides must be positive multiples of 16 bytes, and its rows must not overlap.
bool can_be_mapped(const GpuCall& call, const MappedArray& mapped) {
  bool fits = call.aligned[index(mapped.array)];
  for (int axis = 0; axis < 3; ++axis) {
    int64_t step = mapped.steps[axis];
    fits = fits && (mapped.sizes[axis + 1] == 1 || (step > 0 && step % 8 == 0));
  }
  return fits && (mapped.steps[0] >= mapped.sizes[0] || mapped.sizes[1] == 1);
}

// How many numbers of bfloat16 represent a float32, see kernels/float_parts.h.
constexpr int kFloatParts = 3;

// How many 16-bit parts represent an element of values, which may be quantised or float32.
int parts_of_values(const GpuCall& call) {
  return call.dtype == Dtype::float32 ? kFloatParts : is_quantised(call) ? parts_of_products(call) : 1;
}

// How many represent an element of keys, or of queries and dout in float32. Scores are sums over many elements, and
// softmax multiplies their errors, so that two numbers of bfloat16 are too few.
int parts_of_keys(const GpuCall& call) {
  int parts = parts_of_values(call);
  return call.dtype == Dtype::bfloat16 && parts == 2 ? kFloatParts : parts;
}

// Whether the TMA can read all inputs. The TMA cannot read an empty array. The strides of float32 inputs and of
// quantised keys and values do not matter, because the TMA reads copies of them.
bool inputs_can_be_mapped(const GpuCall& call) {
  const AttentionParams& p = call.params;
  if (p.query_len == 0 || p.key_len == 0) return false;
  if (call.dtype == Dtype::float32) return true;
  if (p.batch_dims > 1 || !can_be_mapped(call, mapped(call, Binding::query, p.query))) return false;
  if (is_quantised(call)) return p.query.column == 1;
  return inputs_are_packed(call) && can_be_mapped(call, mapped(call, Binding::key, p.key)) &&
         can_be_mapped(call, mapped(call, Binding::value, p.value));
}

// Describes an input's parts to the TMA. float_parts.cu writes them as contiguous arrays.
MappedArray mapped_parts(const GpuCall& call, Binding parts, int box_rows) {
  const AttentionParams& p = call.params;
  bool of_keys = parts == Binding::key_parts || parts == Binding::value_parts;
  int count = parts == Binding::value_parts ? parts_of_values(call) : parts_of_keys(call);
  int columns = parts == Binding::key_parts || parts == Binding::query_parts ? p.head_dim : p.value_dim;
  int64_t length = of_keys ? p.key_len : p.query_len, heads = of_keys ? p.num_kv_heads : p.num_heads;
  int64_t row = round_up(columns, 8), head = row * length, part = head * heads;
  return {parts, box_rows, {row, length, heads, count * p.batch_size}, {row, head, part}};
}

// Adds a launch of a kernel of float_parts.cu, and the scratch for its outputs `first` and `second`.
void split_into_parts(const GpuCall& call, Launches& launches, bool packed, std::string function, Binding first,
                      Binding second, std::vector<Argument> arguments) {
  constexpr int kRows = 32, kWarps = 8;
  int64_t blocks = 0;
  for (Binding output : {first, second}) {
    MappedArray parts = mapped_parts(call, output, 1);
    blocks = divide_up(parts.sizes[1], kRows) * parts.sizes[2] * call.params.batch_size;
    launches.scratch.push_back({output, parts.steps[2] * parts.sizes[3] / 2});
    arguments.push_back({output, Role::output});
  }
  Launch split = launch(call, std::move(function),
                        {{"dim", round_up(call.params.head_dim, 8)},
                         {"value_dim", round_up(call.params.value_dim, 8)},
                         {"key_parts", parts_of_keys(call)},
                         {"value_parts", parts_of_values(call)},
                         {"rows", kRows},
                         {"warps", kWarps}},
                        std::move(arguments), blocks, kWarps, 0, packed);
  split.source = "float_parts";
  launches.launches.push_back(std::move(split));
}

// Adds the launch that splits keys and values, and adds their parts to the arguments of the launch that reads them.
void split_keys_into_parts(const GpuCall& call, Launches& launches, std::vector<Argument>& arguments) {
  if (call.params.key_len == 0) return;
  auto inputs = gpu::arguments({Binding::key, Binding::value}, {}, {Binding::params});
  add_masks_and_groups(inputs, call);
  split_into_parts(call, launches, inputs_are_packed(call), "float_parts", Binding::key_parts, Binding::value_parts,
                   std::move(inputs));
  for (Binding parts : {Binding::key_parts, Binding::value_parts}) arguments.push_back({parts, Role::input});
}

Launches prefill(GpuCall call) {
  constexpr int kRows = 16, kStages = 2, kSharedOfHopper = 227 * 1024, kReserved = 1024;
  int bytes = size_of(call.dtype), key_parts = bytes == 4 ? 1 : parts_of_keys(call);
  int value_parts = bytes == 4 ? 1 : parts_of_values(call);
  bool wide = bytes == 4;
  int dim = round_up(call.params.head_dim, wide ? 8 : 16), value_dim = round_up(call.params.value_dim, wide ? 32 : 16);
  int widest = std::max(dim, value_dim);
  int columns = round_up(widest, 64) * std::max(key_parts, wide ? 2 : 1);
  int keys = columns <= 128 ? 64 : columns <= 256 && widest <= 128 ? 32 : 16;
  int stage = key_parts * tile_bytes(keys, dim, bytes) + value_parts * tile_bytes(keys, value_dim, bytes);
  const auto shared_by = [&](int warps) { return tile_bytes(kRows * warps, dim, bytes) + kStages * stage; };
  int warps = shared_by(4) <= call.device.shared_memory ? 4 : 2, shared = shared_by(warps);
  reserve_lists(call, shared, call.params.key_len, keys);
  Launches result = {.params = call.params};
  std::vector<Argument> arguments = whole_call(call);
  if (is_quantised(call)) split_keys_into_parts(call, result, arguments);
  Launch attention = launch(call, "prefill",
                            {{"dim", dim},
                             {"value_dim", value_dim},
                             {"warps", warps},
                             {"keys", keys},
                             {"parts", parts_of_products(call)},
                             {"key_parts", key_parts},
                             {"value_parts", value_parts}},
                            std::move(arguments), blocks_of(call, kRows * warps), warps, shared);
  attention.blocks_at_once = std::clamp(kSharedOfHopper / (shared + kReserved), 1, widest <= 64 && !wide ? 3 : 2);
  result.launches.push_back(std::move(attention));
  return result;
}

// Whether cuda_prefill runs prefill_hopper.cu. It needs compute capability 9.0, and a dtype, sizes and strides that the
// TMA and shared memory allow.
bool is_prefill_of_hopper(const GpuCall& call) {
  bool is_wide = call.dtype == Dtype::float32 && std::max(call.params.head_dim, call.params.value_dim) > 128;
  return call.device.compute_capability == 90 && !is_wide && inputs_can_be_mapped(call);
}

// The last wave of blocks may leave multiprocessors idle. Decides whether several new blocks replace each block of that
// wave and divide its keys among them, and how many do. blocks: the number of blocks before any is replaced. at_once:
// how many blocks the GPU runs at a time.
SplitParams share_last_blocks(const GpuCall& call, int64_t blocks, int64_t at_once) {
  constexpr int kMinKeys = 512, kMaxChunks = 8, kMerging = 1024;  // merging takes as long as computing kMerging keys
  const AttentionParams& p = call.params;
  SplitParams split = {};
  int64_t last = blocks % at_once;
  // Blocks share no keys in three cases. Under a causal mask with less than four keys per query, the blocks in the last
  // wave are short anyway. With a window, a block has too few keys. With a block map, the number of visible keys is not
  // known here.
  bool are_even = sees_evenly(p.causal != 0, p.window, p.query_len, p.key_len) && !call.has(Input::block_map);
  double least = 1 - static_cast<double>(kMerging) / std::max(p.key_len, 1);  // in units of one block's time
  for (int chunks = 2; chunks <= std::min(kMaxChunks, p.key_len / kMinKeys); ++chunks) {
    double time = static_cast<double>(divide_up(last * chunks, at_once)) / chunks;
    if (last == 0 || !are_even || last * chunks > 2 * at_once || time >= least) continue;
    least = time;
    split.num_chunks = chunks;
    split.whole_blocks = static_cast<int32_t>(blocks - last);
  }
  return split;
}

Launch prefill_merge(const GpuCall& call, int value_dim, int rows, int64_t shared_blocks) {
  constexpr int kWarps = 8;
  std::vector<Argument> arguments = whole_call(call);
  arguments.insert(arguments.end(), {{Binding::split, Role::value}, {Binding::partials, Role::input}});
  Launch merge = launch(call, "prefill_merge", {{"value_dim", value_dim}, {"rows", rows}, {"warps", kWarps}},
                        std::move(arguments), shared_blocks * rows / kWarps, kWarps);
  merge.source = "prefill_hopper";
  return merge;
}

// Describes a block of the kernels for Hopper. In such a block, a producer warpgroup loads tiles, and consumer
// warpgroups compute.
struct HopperBlock {
  struct Registers {
    int consumer, producer;  // per thread
  };
  int consumers;     // consumer warpgroups, with 64 rows each
  int columns = 64;  // keys of a tile, or its queries in a block that computes dk and dv
  int stages;        // how many tiles of an array (keys, values) shared memory holds
  int blocks;        // blocks that a multiprocessor runs at once
  Registers registers;

  int rows() const { return 64 * consumers; }
  int warps() const { return 4 * (consumers + 1); }

  std::vector<Constant> sizes(std::vector<Constant> further) const {
    further.insert(further.end(), {{"consumers", consumers},
                                   {"stages", stages},
                                   {"blocks", blocks},
                                   {"consumer_registers", registers.consumer},
                                   {"producer_registers", registers.producer}});
    return further;
  }
};

// Whether long tiles fit in the registers of a call, and gain more than they lose at the edges of what is visible.
bool takes_long_tiles(const GpuCall& call) {
  const AttentionParams& p = call.params;
  return p.window == 0 && p.softcap == 0 && !call.has(Input::visible) && !call.has(Input::bias) &&
         !call.has(Input::tree) && !call.has(Input::alibi_slopes) && parts_of_products(call) == 1;
}

HopperBlock prefill_block(const GpuCall& call, int widest) {
  if (call.dtype == Dtype::float32)
    return {.consumers = 2, .stages = widest <= 64 ? 6 : 4, .blocks = 1, .registers = {240, 24}};
  // 112 registers per thread are too few if the call has one of these inputs, or if a probability is two 16-bit floats.
  bool needs_registers =
      call.has(Input::bias) || call.has(Input::tree) || call.has(Input::alibi_slopes) || parts_of_products(call) == 2;
  if (widest <= 64 && !call.small_blocks && !needs_registers) {
    return {.consumers = 4, .stages = 6, .blocks = 1, .registers = {112, 24}};
  }
  bool in_parts = parts_of_keys(call) > 1;  // each part of a tile takes a stage
  if (widest <= 64) return {.consumers = 1, .stages = in_parts ? 4 : 2, .blocks = 3, .registers = {136, 24}};
  if (widest > 128 && in_parts) {
    int parts = parts_of_keys(call), keys = parts == kFloatParts ? 32 : 64;
    return {.consumers = 1, .columns = keys, .stages = parts + 1, .blocks = 1, .registers = {240, 24}};
  }
  if (widest > 128) return {.consumers = 2, .stages = 2, .blocks = 1, .registers = {240, 24}};
  int stages = in_parts ? 4 : 3;
  bool is_long = takes_long_tiles(call);
  if (call.small_blocks) {
    return {.consumers = 2, .columns = is_long ? 128 : 64, .stages = stages, .blocks = 1, .registers = {240, 24}};
  }
  return {.consumers = 3, .columns = is_long ? 80 : 64, .stages = stages, .blocks = 1, .registers = {160, 32}};
}

Launches prefill_hopper(GpuCall call) {
  int dim = round_up(call.params.head_dim, 64), value_dim = round_up(call.params.value_dim, 16);
  bool is_float = call.dtype == Dtype::float32;
  int parts = is_float ? kFloatParts : parts_of_products(call);
  HopperBlock block = prefill_block(call, std::max(dim, value_dim));
  int keys = block.columns, rows = block.rows(), barriers = (4 * block.stages + 1) * 8;
  int shared = (is_float ? kFloatParts : 1) * tile_bytes(rows, dim, 2) +
               block.stages * (tile_bytes(keys, dim, 2) + tile_bytes(keys, value_dim, 2)) + barriers;
  reserve_lists(call, shared, call.params.key_len, keys);
  const AttentionParams& p = call.params;
  Launches result = {.params = p};
  std::vector<Argument> arguments = whole_call(call);
  std::vector<MappedArray> maps = {mapped(call, Binding::key, p.key, keys),
                                   mapped(call, Binding::value, p.value, keys)};
  if (is_float || is_quantised(call)) {
    split_keys_into_parts(call, result, arguments);
    maps = {mapped_parts(call, Binding::key_parts, keys), mapped_parts(call, Binding::value_parts, keys)};
  }
  if (!is_float) maps.push_back(mapped(call, Binding::query, p.query, rows));
  int64_t count = blocks_of(call, rows);
  if (!is_float) result.split = share_last_blocks(call, count, int64_t{call.device.multiprocessors} * block.blocks);
  arguments.push_back({Binding::split, Role::value});
  int64_t shared_blocks = 0;
  if (int chunks = result.split.num_chunks; chunks > 1) {
    shared_blocks = count - result.split.whole_blocks;
    count += shared_blocks * (chunks - 1);
    result.scratch.push_back({Binding::partials, shared_blocks * chunks * rows * (value_dim + kPartialPadding)});
    arguments.push_back({Binding::partials, Role::output});
  }
  Launch attention = launch(call, "prefill_hopper",
                            block.sizes({{"dim", dim},
                                         {"value_dim", value_dim},
                                         {"keys", keys},
                                         {"parts", parts},
                                         {"key_parts", parts_of_keys(call)},
                                         {"value_parts", parts_of_values(call)}}),
                            std::move(arguments), count, block.warps(), shared);
  attention.blocks_at_once = block.blocks;
  attention.tensor_maps = std::move(maps);
  result.launches.push_back(std::move(attention));
  if (shared_blocks != 0) result.launches.push_back(prefill_merge(call, value_dim, rows, shared_blocks));
  return result;
}

// The arguments of kernels whose blocks each compute one chunk of the keys.
std::vector<Argument> split_call(const GpuCall& call, const Launches& launches) {
  std::vector<Argument> result = whole_call(call);
  result.push_back({Binding::split, Role::value});
  for (const Scratch& scratch : launches.scratch) result.push_back({scratch.binding, Role::output});
  return result;
}

// Decides how the keys are cut into chunks, and which scratch this needs. The caller adds the launches to the result.
// Each block of these launches computes at most rows_of_block rows of a key/value head over one chunk.
Launches split_keys(const GpuCall& call, int64_t chunks, int min_chunk, int64_t rows_of_block) {
  constexpr int64_t kMerged = 512 * 1024;  // a block merges this many bytes in a few microseconds
  const AttentionParams& p = call.params;
  int64_t bytes_of_chunk = std::min(rows_of_group(call), rows_of_block) * p.value_dim * int64_t{sizeof(float)};
  int max_chunks = static_cast<int>(std::clamp<int64_t>(kMerged / bytes_of_chunk, 4, 512));
  Launches result = {.params = p, .split = gpu::split_keys(p, {chunks, min_chunk, max_chunks})};
  result.scratch = {{Binding::partials, partials_of(p, result.split.num_chunks)},
                    {Binding::arrivals, num_groups(call) * divide_up(rows_of_group(call), rows_of_block)}};
  return result;
}

// The launch for calls that decode() cannot compute on tensor cores: large heads, and some formats of quantised keys.
// Each warp reads one chunk of keys.
Launches decode_split(const GpuCall& call) {
  constexpr int kWarps = 4;
  std::vector<Constant> sizes = whole_lanes(call);
  int widest = round_up(std::max(call.params.head_dim, call.params.value_dim), kLanes);
  int max_rows = widest <= 128 ? 8 : widest <= 256 ? 4 : 2;
  int rows = static_cast<int>(rows_of_group(call)), rows_each = std::min(rows, max_rows);
  sizes.insert(sizes.end(), {{"rows", rows_each}, {"warps", kWarps}});
  Launches result = split_keys(call, 2048, 64, rows);
  int64_t warps = divide_up(rows, rows_each) * result.split.num_chunks;
  result.launches = {launch(call, "decode_split", std::move(sizes), split_call(call, result),
                            divide_up(warps, kWarps) * num_groups(call), kWarps)};
  return result;
}

// A block computes up to 16 rows over a chunk of keys, with as many warps and stages as fit in shared memory.
Launches decode(const GpuCall& call) {
  constexpr int kMaxDim = 256, kPadding = 10;  // more floats per row: up to 8 of padding, the row's maximum and sum
  int bytes = size_of(call.dtype), dim = round_up(call.params.head_dim, bytes == 4 ? 8 : 16);
  int value_dim = round_up(call.params.value_dim, 32);
  // Tensor cores multiply quantised keys and values as integers, see kernels/integer_rows.h.
  bool integers = (call.params.bits == 4 || call.params.bits == 8) && call.dtype != Dtype::float32;
  int widest = std::max(dim, value_dim), keys = integers ? 32 : 16;
  int rows = integers && (rows_of_group(call) <= 8 || widest > 128) ? 8 : 16;  // 16 wide rows do not fit in registers
  int queries = integers ? 0 : tile_bytes(rows, dim, bytes), tiles = stage_bytes(call, keys, dim, value_dim);
  for (auto [warps, stages] : {std::pair(8, 3), {4, 3}, {4, 2}, {2, 3}, {2, 2}, {1, 2}}) {
    int results = warps * rows * (value_dim + kPadding) * static_cast<int>(sizeof(float));
    int shared = std::max(queries + warps * stages * tiles, results);
    if ((is_quantised(call) && !integers) || widest > kMaxDim || shared > call.device.shared_memory) {
      continue;
    }
    int64_t row_blocks = divide_up(rows_of_group(call), rows);
    int64_t chunks = std::max<int64_t>(1, call.device.multiprocessors / (num_groups(call) * row_blocks));  // per group
    Launches result = split_keys(call, chunks * num_groups(call), 128, rows);
    if (result.split.num_chunks == 1) result.scratch.clear();  // blocks then write to the output directly
    result.launches = {launch(
        call, "decode",
        {{"dim", dim}, {"value_dim", value_dim}, {"rows", rows}, {"warps", warps}, {"keys", keys}, {"stages", stages}},
        split_call(call, result), row_blocks * result.split.num_chunks * num_groups(call), warps, shared)};
    return result;
  }
  return decode_split(call);
}

// --- The gradient ------------------------------------------------------------------------------------------

Launch backward_delta(const GpuCall& call) {
  constexpr int kWarps = 8, kRowsOfWarp = 8;
  int64_t heads = call.params.num_heads * call.params.batch_size;
  return launch(call, "backward_delta", {{"warps", kWarps}},
                arguments({Binding::out, Binding::dout, Binding::dlse, Binding::row_stats},
                          {Binding::delta, Binding::saved_rows}, {Binding::params, Binding::backward}),
                round_up(call.params.query_len, kSavedTile) / (kWarps * kRowsOfWarp) * heads, kWarps);
}

constexpr int kSavedBytes = 4 * sizeof(float);  // what saved_rows takes per query

struct GradientCall {
  GpuCall call;
  const BackwardParams& params;
  bool packed;
  bool is_part;  // whether a block of keys sums over only some heads of a group; backward_merge.cu adds up the sums
  int chunks;    // how many blocks together sum over all heads of a group
};

// A block of the launch that computes one gradient. It has some rows, and loops over tiles of columns.
struct GradientBlock {
  int rows, columns, warps;
  int shared;  // bytes, without the lists of visible tiles
};

// The launch of a kernel that computes gradient `of`. For kDq, rows are queries of one head, and columns are keys.
// Otherwise, rows are keys, columns are queries, and a block sums over block_heads query heads.
Launch gradient_launch(GradientCall gradient, Gradient of, std::string function, GradientBlock block,
                       std::vector<Constant> sizes, Bindings parts = {}) {
  GpuCall& call = gradient.call;
  const AttentionParams& p = call.params;
  // If the heads' block maps differ, a block of keys lists the visible tiles for each of its query heads.
  int lists = of != kDq && p.block_map.head != 0 ? gradient.params.block_heads : 1;
  reserve_lists(call, block.shared, of == kDq ? p.key_len : p.query_len, block.columns, lists);
  auto arrays = arguments({Binding::query, Binding::key, Binding::value, Binding::dout, Binding::saved_rows}, {},
                          {Binding::params, Binding::backward});
  add_masks_and_groups(arrays, call);
  const auto add = [&](Binding array, Role role) { arrays.push_back({array, role}); };
  if (of == kDq) add(Binding::dq, Role::output);
  if (of == kDk || of == kDkAndDv) add(gradient.is_part ? Binding::dk_parts : Binding::dk, Role::output);
  if (of == kDv || of == kDkAndDv) add(gradient.is_part ? Binding::dv_parts : Binding::dv, Role::output);
  for (Binding array : parts) add(array, Role::input);
  sizes.insert(sizes.end(), {{"of", static_cast<int>(of)}, {"is_part", of != kDq && gradient.is_part}});
  int64_t blocks =
      of == kDq ? blocks_of(call, block.rows) : divide_up(p.key_len, block.rows) * num_groups(call) * gradient.chunks;
  return launch(call, std::move(function), std::move(sizes), std::move(arrays), blocks, block.warps, block.shared,
                gradient.packed);
}

Launch backward(const GradientCall& gradient, Gradient of) {
  const GpuCall& call = gradient.call;
  const AttentionParams& p = call.params;
  int bytes = size_of(call.dtype), step = bytes == 4 ? 32 : 16;
  int dim = round_up(p.head_dim, step), value_dim = round_up(p.value_dim, step), widest = std::max(dim, value_dim);
  int columns = (widest <= 64 ? 64 : widest <= 128 ? 32 : 16) / (bytes == 4 && widest <= 128 ? 2 : 1);  // per tile
  const auto shared_by = [&](int warps) {
    int rows = 16 * warps + 2 * columns;
    return tile_bytes(rows, dim, bytes) + tile_bytes(rows, value_dim, bytes) + 2 * columns * kSavedBytes;
  };
  int warps = 4;
  while (warps > 1 && shared_by(warps) > call.device.shared_memory) warps /= 2;
  return gradient_launch(gradient, of, "backward", {16 * warps, columns, warps, shared_by(warps)},
                         {{"dim", dim},
                          {"value_dim", value_dim},
                          {"warps", warps},
                          {"columns", columns},
                          {"parts", parts_of_products(call)}});
}

HopperBlock backward_block(const GpuCall& call, Gradient of) {
  int widest = std::max(call.params.head_dim, call.params.value_dim);
  if (widest <= 64 && of == kDq) return {.consumers = 1, .stages = 3, .blocks = 3, .registers = {136, 24}};
  if (of == kDq) return {.consumers = 3, .stages = 2, .blocks = 1, .registers = {160, 32}};
  int queries = widest <= 64 && takes_long_tiles(call) ? 128 : 64;
  return {.consumers = 2, .columns = queries, .stages = 3, .blocks = 1, .registers = {240, 24}};
}

// Describes the inputs to the TMA, which copies boxes of these many keys and queries.
std::vector<MappedArray> gradient_maps(const GradientCall& gradient, int keys, int queries) {
  const GpuCall& call = gradient.call;
  const AttentionParams& p = call.params;
  return {mapped(call, Binding::key, p.key, keys), mapped(call, Binding::value, p.value, keys),
          mapped(call, Binding::query, p.query, queries), mapped(call, Binding::dout, gradient.params.dout, queries)};
}

Launch backward_hopper(const GradientCall& gradient, Gradient of) {
  const GpuCall& call = gradient.call;
  int dim = round_up(call.params.head_dim, 16), value_dim = round_up(call.params.value_dim, 16);
  HopperBlock block = backward_block(call, of);
  int rows = block.rows(), columns = block.columns, barriers = (2 * block.stages + 1 + block.consumers) * 8;
  int stage = tile_bytes(columns, dim, 2) + tile_bytes(columns, value_dim, 2) + (of == kDq ? 0 : columns * kSavedBytes);
  int shared = tile_bytes(rows, dim, 2) + tile_bytes(rows, value_dim, 2) + block.stages * stage + barriers;
  Launch result = gradient_launch(
      gradient, of, "backward_hopper", {rows, columns, block.warps(), shared},
      block.sizes({{"dim", dim}, {"value_dim", value_dim}, {"columns", columns}, {"parts", parts_of_products(call)}}));
  result.blocks_at_once = block.blocks;
  result.tensor_maps = of == kDq ? gradient_maps(gradient, columns, rows) : gradient_maps(gradient, rows, columns);
  return result;
}

Launch backward_parts(const GradientCall& gradient, Gradient of) {
  constexpr int kRows = 64, kColumns = 64, kWarps = 12, kSavedStages = 2;
  static constexpr auto kParts = {Binding::key_parts, Binding::value_parts, Binding::query_parts, Binding::dout_parts};
  const GpuCall& call = gradient.call;
  const AttentionParams& p = call.params;
  bool in_parts = call.dtype == Dtype::float32;
  int tiles = in_parts ? kFloatParts : 1, step = in_parts ? 64 : 16;  // a tile takes a stage for each of its parts
  int dim = round_up(p.head_dim, step), value_dim = round_up(p.value_dim, step);
  bool narrow = std::max(dim, value_dim) <= 64;
  int first_stages = !in_parts ? 2 : narrow ? 5 : 4, second_stages = !in_parts ? 2 : narrow ? 5 : 3;
  int first = tile_bytes(kRows, dim, 2), second = tile_bytes(kRows, value_dim, 2);
  int saved = of == kDq ? 0 : kSavedStages * kColumns * kSavedBytes;
  int handed = kRows * kColumns * static_cast<int>(sizeof(float));
  int barriers = (2 * (first_stages + second_stages + kSavedStages) + (in_parts ? 2 : 3)) * 8;
  int shared = (tiles + first_stages) * first + (tiles + second_stages) * second + saved + handed + barriers;
  Launch result = gradient_launch(gradient, of, "backward_parts", {kRows, kColumns, kWarps, shared},
                                  {{"dim", dim},
                                   {"value_dim", value_dim},
                                   {"columns", kColumns},
                                   {"parts", in_parts ? kFloatParts : parts_of_products(call)},
                                   {"first_stages", first_stages},
                                   {"second_stages", second_stages},
                                   {"consumer_registers", 232},
                                   {"producer_registers", 40}},
                                  in_parts ? Bindings(kParts) : Bindings());
  if (!in_parts) result.tensor_maps = gradient_maps(gradient, kRows, kRows);
  for (Binding parts : kParts) {
    if (in_parts) result.tensor_maps.push_back(mapped_parts(call, parts, kRows));
  }
  return result;
}

// The number of query heads over which a block of `keys` keys sums. There should be about kBlocksOfMultiprocessor
// blocks per multiprocessor. If each block summed over all heads, there would be few blocks, and under a causal mask
// some would take much longer than others.
int heads_of_block(const GpuCall& call, int keys) {
  constexpr int kBlocksOfMultiprocessor = 4;
  int64_t blocks = std::max<int64_t>(1, divide_up(call.params.key_len, keys) * num_groups(call));
  int64_t wanted = divide_up(int64_t{kBlocksOfMultiprocessor} * call.device.multiprocessors, blocks);
  return static_cast<int>(divide_up(group_of(call), wanted));
}

Launch backward_merge(const GpuCall& call) {
  constexpr int kWarps = 8, kKeys = 16;
  return launch(call, "backward_merge", {{"warps", kWarps}, {"keys", kKeys}},
                arguments({Binding::dk_parts, Binding::dv_parts}, {Binding::dk, Binding::dv},
                          {Binding::params, Binding::backward}),
                divide_up(call.params.key_len, kKeys) * num_groups(call), kWarps);
}

// Declares scratch as an output of every launch that uses it, even of launches that only read it. A node of MLX's CUDA
// graph waits for the last node that wrote its arrays, but not for nodes that read them. Calls share scratch, so
// without this the next call could overwrite scratch that a launch still reads.
Launches in_order(Launches launches) {
  for (Launch& launch : launches.launches) {
    for (auto& [binding, role] : launch.arguments) {
      for (const Scratch& scratch : launches.scratch) {
        if (scratch.binding == binding) role = Role::output;
      }
    }
  }
  return launches;
}

}  // namespace

std::string source_text(const Launch& launch) {
  // Suppresses warnings about unused constants, and about divisions by constants that are 0 for this call.
  std::string text = "#pragma nv_diag_suppress 39, 177\n" + sizes_text(launch, "");
  text += "typedef int int32_t;\ntypedef long long int64_t;\ntypedef unsigned long long uint64_t;\n";
  for (const Constant& constant : launch.constants) {
    const bool* flag = std::get_if<bool>(&constant.value);
    std::string value = flag ? (*flag ? "true" : "false") : std::to_string(std::get<int32_t>(constant.value));
    text += std::string("constexpr ") + (flag ? "bool " : "int ") + std::string(constant.name) + " = " + value + ";\n";
  }
  const auto define = [&](int first, int end) {
    for (int i = first; i < end; ++i) {
      auto binding = static_cast<Binding>(i);
      text += "#define FLASHATTN_BINDING_" + std::string(name(binding)) + " " + std::to_string(index(binding)) + "\n";
    }
  };
  define(0, kNumBindings);
  if (is_of_cache(launch.arguments[0].binding)) define(kNumBindings + 1, static_cast<int>(Binding::end));
  bool is_backward = std::any_of(launch.arguments.begin(), launch.arguments.end(),
                                 [](Argument argument) { return argument.binding == Binding::backward; });
  std::string_view arguments = is_backward ? "Backward" : launch.tensor_maps.empty() ? "" : "Box";
  return text + text_of(sources(), launch) + "\nextern \"C\" __global__ void __launch_bounds__(" +
         std::to_string(launch.threadgroup[0]) + ", " + std::to_string(launch.blocks_at_once) + ") " + launch.function +
         "(const __grid_constant__ flashattn::cuda::" + std::string(arguments) + "Arguments arguments) {\n  " +
         launch.instantiation + "(arguments);\n}\n";
}

Launches backward_launches(const GpuCall& call, const BackwardParams& params) {
  const AttentionParams& p = call.params;
  Launches result = {.params = p, .backward = params};
  bool packed = backward_is_packed(call, params);
  // Calls with few queries use backward.cu even on compute capability 9.0. This kernel multiplies as cuda_decode does,
  // so the scores have the same bits as in the forward pass.
  bool is_90 = call.device.compute_capability == 90 && p.query_len > kMaxCudaDecodeLen && inputs_can_be_mapped(call);
  bool is_float = call.dtype == Dtype::float32, is_wide = std::max(p.head_dim, p.value_dim) > 128;
  bool in_parts = is_90 && is_float && !is_wide;
  bool hopper = is_90 && !is_float && packed && can_be_mapped(call, mapped(call, Binding::dout, params.dout));
  bool shares_rows = in_parts || (hopper && is_wide);
  // With a window, all blocks of keys take about equally long. Sharing a group's heads would then only cost time.
  bool is_part = p.window == 0 && group_of(call) > 1;
  int rows = hopper && !is_wide ? backward_block(call, kDkAndDv).rows() : 64;
  result.backward.block_heads = is_part ? heads_of_block(call, rows) : group_of(call);
  int chunks = static_cast<int>(divide_up(group_of(call), result.backward.block_heads));
  GradientCall gradient = {call, result.backward, packed, is_part, chunks};
  const auto add = [&](Launch launch) {
    if (launch.grid[0] != 0) result.launches.push_back(std::move(launch));
  };
  const auto pass = [&](Gradient of) {
    return shares_rows ? backward_parts(gradient, of) : hopper ? backward_hopper(gradient, of) : backward(gradient, of);
  };
  add(backward_delta(call));
  result.scratch = {{Binding::saved_rows, p.batch_size * p.num_heads * round_up(p.query_len, kSavedTile) * 4}};
  if (in_parts) {
    split_into_parts(call, result, packed, "float_parts", Binding::key_parts, Binding::value_parts,
                     arguments({Binding::key, Binding::value}, {}, {Binding::params}));
    split_into_parts(call, result, packed, "float_parts_of_queries", Binding::query_parts, Binding::dout_parts,
                     arguments({Binding::query, Binding::dout}, {}, {Binding::params, Binding::backward}));
  }
  // The launches run concurrently, and those with the longest blocks start first. For large heads, dk and dv have
  // separate launches where one thread sums both, because their sums together would exceed its registers.
  size_t first = result.launches.size();
  if (shares_rows || p.head_dim + p.value_dim <= 256) {
    add(pass(kDkAndDv));
  } else {
    add(pass(kDk));
    add(pass(kDv));
  }
  add(pass(kDq));
  for (size_t i = first; i + 1 < result.launches.size(); ++i) result.launches[i].with_next = true;
  if (is_part) {
    int64_t rows = num_groups(call) * p.key_len * gradient.chunks;
    add(backward_merge(call));
    result.scratch.push_back({Binding::dk_parts, rows * p.head_dim});
    result.scratch.push_back({Binding::dv_parts, rows * p.value_dim});
  }
  return in_order(std::move(result));
}

Launches append_launches(const NewRows& rows) {
  constexpr int kWarps = 4;
  constexpr int64_t kCopied = 4 * 16 * kWarps * kLanes;  // bytes of an array that a block copies
  std::vector<Argument> arguments = gpu::arguments({Binding::new_keys, Binding::new_values}, {}, {});
  bool is_in_place = true;
  for (int i = 0; i < 6; ++i) {
    const auto add = [&](Binding first, Role role) {
      arguments.push_back({static_cast<Binding>(static_cast<int>(first) + i), role});
    };
    if (!rows.in_place[i]) add(Binding::old_key_words, Role::input);
    add(Binding::stored_key_words, Role::output);
    is_in_place = is_in_place && rows.in_place[i];
  }
  arguments.insert(arguments.end(), {{Binding::params, Role::value}, {Binding::split, Role::value}});
  const AttentionParams& p = rows.params;
  int64_t parts = divide_up(rows.split.chunk_len, kWarps);  // blocks of a head
  if (!is_in_place) {
    int64_t bytes = int64_t{p.key_len} * std::max(p.head_dim, p.value_dim) * p.bits / 8;
    parts = std::max(parts, divide_up(bytes, kCopied));
  }
  GpuCall call = {};  // without sizes, because the program does not depend on them
  call.dtype = rows.dtype;
  return {.launches = {launch(call, "append", {{"bits", p.bits}, {"group_size", p.group_size}, {"warps", kWarps}},
                              std::move(arguments), 2 * p.batch_size * p.num_kv_heads * parts, kWarps)},
          .params = p,
          .split = rows.split};
}

Launches launches(Kernel kernel, const GpuCall& call) {
  switch (kernel) {
    case Kernel::cuda_decode: return in_order(decode(call));
    case Kernel::cuda_prefill:
      if (is_prefill_of_hopper(call)) return in_order(prefill_hopper(call));
      return in_order(prefill(call));
    case Kernel::cuda_rowwise: return {.launches = {rowwise(call)}, .params = call.params};
    default: throw std::logic_error(std::string(name(kernel)) + " is no forward kernel of CUDA's");
  }
}

}  // namespace flashattn::cuda
