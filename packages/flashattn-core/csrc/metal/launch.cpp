// Chooses the instantiation, the constants and the grid of each kernel for a call. Makes the text that Metal compiles.
#include "launch.h"

#include <algorithm>
#include <stdexcept>

#include "../gpu/split.h"

namespace flashattn::metal {
namespace {

using namespace gpu;

constexpr int kMaxSimdgroups = 32;  // per threadgroup: 1024 threads

// The number of SIMD groups per threadgroup, for `rows` queries or keys. Each SIMD group computes eight of them. With
// eight SIMD groups instead of four, tiles are loaded half as often. But above dim 128, a thread would have too few
// registers.
int simdgroups_for(int rows, int dim) {
  return rows > 64 && dim <= 128 ? 8 : 4;
}

// A kernel that computes the call in one launch.
Instance single(const GpuCall& call, std::string function, std::vector<Constant> sizes, Size grid, int simdgroups) {
  return {.function = std::move(function),
          .sizes = std::move(sizes),
          .arguments = whole_call(call),
          .grid = grid,
          .threads = simdgroups * kLanes};
}

// A kernel for a call with one query. Each query head has a threadgroup.
Instance single_query(const GpuCall& call, std::string function, int simdgroups) {
  return single(call, std::move(function), whole_lanes(call), {1, size(call.params.num_heads), batches(call)},
                simdgroups);
}

Instance rowwise(const GpuCall& call) {
  return single(call, "rowwise", whole_lanes(call),
                {size(divide_up(rows_of_group(call), 32)), size(call.params.num_kv_heads), batches(call)},
                kMaxSimdgroups);
}

Instance prefill_tg(const GpuCall& call) {
  const AttentionParams& p = call.params;
  int64_t rows = rows_of_group(call);
  // With two fragments of rows, each key is read half as often. This pays off only if queries and output fit in
  // registers.
  int fragments = std::max(p.head_dim, p.value_dim) <= 64 && rows > 8 ? 2 : 1;
  return single(
      call, "prefill_tg",
      {{"dim", round_up(p.head_dim, 8)}, {"value_dim", round_up(p.value_dim, 8)}, {"row_fragments", fragments}},
      {size(divide_up(rows, 8 * fragments)), size(p.num_kv_heads), batches(call)}, 4);
}

// The kernel prefill_reg or backward_dq. In both, a SIMD group has eight queries, and loops over tiles of keys.
Instance queries_by_eights(const GpuCall& call, std::string function, std::vector<Argument> arguments) {
  const AttentionParams& p = call.params;
  int dim = round_up(p.head_dim, 8), value_dim = round_up(p.value_dim, 8), widest = std::max(dim, value_dim);
  int simdgroups = simdgroups_for(p.query_len, widest);
  // A tile has 32 keys if they fit in 17 of the 32 KB of threadgroup memory. Otherwise it has 16.
  int row_bytes = widest * static_cast<int>(size_of(is_quantised(call) ? Dtype::float32 : call.dtype)) + 16;
  int keys = 32 * row_bytes <= 17 * 1024 ? 32 : 16;
  return {.function = std::move(function),
          .sizes = {{"dim", dim}, {"value_dim", value_dim}, {"simdgroups", simdgroups}, {"keys", keys}},
          .arguments = std::move(arguments),
          .grid = {size(divide_up(p.query_len, 8 * simdgroups)), size(p.num_heads), batches(call)},
          .threads = simdgroups * kLanes,
          .whole_rows = p.query_len % (8 * simdgroups) == 0,
          .whole_keys = p.key_len % keys == 0};
}

Launches decode_split(const GpuCall& call) {
  constexpr int kChunksPerThreadgroup = 4, kMaxSplitSimdgroups = 16;
  constexpr SplitGoal kGoal = {.chunks = 512, .min_chunk = 64, .max_chunks = 128};
  const AttentionParams& p = call.params;
  int dim = round_up(p.head_dim, kLanes), value_dim = round_up(p.value_dim, kLanes);
  int rows = group_of(call) * p.query_len;
  // A thread of a small threadgroup has 128 registers, which must hold the queries and the output of all rows.
  int widest = std::max(dim, value_dim);
  int max_rows = widest <= 128 ? 8 : widest <= 256 ? 4 : 2;

  Launches result = {.params = p, .split = split_keys(p, kGoal)};
  result.scratch = {{Binding::partials, partials_of(p, result.split.num_chunks)}};

  auto of_chunk =
      arguments({Binding::query, Binding::key, Binding::value}, {Binding::partials}, {Binding::params, Binding::split});
  add_masks_and_groups(of_chunk, call);
  Instance chunk = {
      .function = "decode_split",
      .sizes = {{"dim", dim}, {"value_dim", value_dim}, {"rows", rows}},
      .arguments = std::move(of_chunk),
      .grid = {size(divide_up(result.split.num_chunks, kChunksPerThreadgroup)), size(p.num_kv_heads), batches(call)},
      .threads = kChunksPerThreadgroup * kLanes,
      .source = "decode_split"};
  if (rows > max_rows) {
    // In a threadgroup of up to kMaxSplitSimdgroups SIMD groups, a thread has fewer registers. So a SIMD group has at
    // most max_rows / 2 rows.
    max_rows /= 2;
    int simdgroups = std::min<int>(kMaxSplitSimdgroups, static_cast<int>(divide_up(rows, max_rows)));
    int rows_each = std::min<int>(max_rows, static_cast<int>(divide_up(rows, simdgroups)));  // spread evenly
    int64_t row_blocks = divide_up(rows, int64_t{simdgroups} * rows_each);
    chunk.function = "decode_split_shared";
    chunk.sizes = {{"dim", dim}, {"value_dim", value_dim}, {"rows", rows_each}, {"simdgroups", simdgroups}};
    chunk.grid[0] = size(result.split.num_chunks * row_blocks);
    chunk.threads = simdgroups * kLanes;
  }
  auto of_merge = arguments({Binding::partials}, {Binding::out, Binding::lse, Binding::row_stats},
                            {Binding::params, Binding::split});
  if (call.has_exact_out) of_merge.push_back({Binding::exact_out, Role::output});
  add_if_present(of_merge, call, {Input::sinks});
  Instance merge = {.function = "decode_merge",
                    .sizes = {{"value_dim", value_dim}},
                    .arguments = std::move(of_merge),
                    .grid = {size(p.query_len), size(p.num_heads), batches(call)},
                    .threads = kLanes,
                    .source = "decode_split"};
  bool packed = inputs_are_packed(call);
  result.launches.push_back(launch(Backend::metal, call, packed, std::move(chunk)));
  result.launches.push_back(launch(Backend::metal, call, packed, std::move(merge)));
  return result;
}

// --- The gradient ------------------------------------------------------------------------------------------

std::vector<Argument> backward_arguments(const GpuCall& call, Bindings outputs) {
  auto result =
      arguments({Binding::query, Binding::key, Binding::value, Binding::row_stats, Binding::dout, Binding::delta},
                outputs, {Binding::params, Binding::backward});
  add_masks_and_groups(result, call);
  return result;
}

Instance backward_delta(const GpuCall& call) {
  constexpr int kRowsPerThreadgroup = 8;  // one per SIMD group
  const AttentionParams& p = call.params;
  return {.function = "backward_delta",
          .sizes = {{"rows", kRowsPerThreadgroup}},
          .arguments = arguments({Binding::out, Binding::dout, Binding::dlse}, {Binding::delta},
                                 {Binding::params, Binding::backward}),
          .grid = {size(divide_up(p.query_len, kRowsPerThreadgroup)), size(p.num_heads), batches(call)},
          .threads = kRowsPerThreadgroup * kLanes};
}

Instance backward_dkv(const GpuCall& call) {
  const AttentionParams& p = call.params;
  int dim = round_up(p.head_dim, 8), value_dim = round_up(p.value_dim, 8);
  int simdgroups = simdgroups_for(p.key_len, std::max(dim, value_dim));
  // Threadgroup memory (32 KB) holds a tile of query and a tile of dout. The tiles have 32 rows if both fit in 18 KB,
  // otherwise 16 rows if these fit, otherwise 8.
  int64_t row_bytes = (dim + value_dim) * size_of(call.dtype) + 32;
  int rows = 32 * row_bytes <= 18 * 1024 ? 32 : 16 * row_bytes <= 18 * 1024 ? 16 : 8;
  // For the sums of dk and dv of eight keys, a thread needs (dim + value_dim) / 4 registers. If these are too many, a
  // threadgroup computes either dk or dv.
  int parts = dim + value_dim <= 256 ? 1 : 2;
  return {
      .function = "backward_dkv",
      .sizes = {{"dim", dim}, {"value_dim", value_dim}, {"simdgroups", simdgroups}, {"rows", rows}, {"parts", parts}},
      .arguments = backward_arguments(call, {Binding::dk, Binding::dv}),
      .grid = {size(divide_up(p.key_len, 8 * simdgroups) * parts), size(p.num_kv_heads), batches(call)},
      .threads = simdgroups * kLanes,
      .whole_rows = p.query_len % rows == 0,
      .whole_keys = p.key_len % (8 * simdgroups) == 0};
}

// Declares the function constants, the buffer indices and the struct Sizes. MLX gets the constants' values separately.
std::string declarations(const Launch& launch) {
  std::string text = "#include <metal_stdlib>\n";
  int number = 0;
  for (const Constant& constant : launch.constants) {
    const char* type = std::holds_alternative<bool>(constant.value) ? "bool" : "int";
    text += std::string("constant ") + type + " " + std::string(constant.name) + " [[function_constant(" +
            std::to_string(number++) + ")]];\n";
  }
  for (int i = 0; i < kNumBindings; ++i) {
    auto binding = static_cast<Binding>(i);
    text += "#define FLASHATTN_BUFFER_" + std::string(name(binding)) + " " + std::to_string(buffer_of(binding)) + "\n";
  }
  return text + sizes_text(launch, "constant ");
}

}  // namespace

std::string source_text(const Launch& launch) {
  return declarations(launch) + text_of(sources(), launch) + "\ntemplate [[host_name(\"" + launch.function +
         "\")]] [[kernel]] decltype(" + launch.instantiation + ") " + launch.instantiation + ";\n";
}

Launches backward_launches(const GpuCall& call, const BackwardParams& backward) {
  Launches result = {.params = call.params, .backward = backward};
  bool packed = backward_is_packed(call, backward);
  Instance dq = queries_by_eights(call, "backward_dq", backward_arguments(call, {Binding::dq}));
  for (Instance instance : {backward_delta(call), std::move(dq), backward_dkv(call)}) {
    if (std::find(instance.grid.begin(), instance.grid.end(), 0) == instance.grid.end()) {
      result.launches.push_back(launch(Backend::metal, call, packed, std::move(instance)));
    }
  }
  return result;
}

Launches launches(Kernel kernel, const GpuCall& call) {
  const auto one = [&](Instance instance) {
    Launches result = {.params = call.params};
    result.launches.push_back(launch(Backend::metal, call, inputs_are_packed(call), std::move(instance)));
    return result;
  };
  switch (kernel) {
    case Kernel::metal_rowwise: return one(rowwise(call));
    case Kernel::metal_decode_fast: return one(single_query(call, "decode_fast", 1));
    case Kernel::metal_decode_parallel: return one(single_query(call, "decode_parallel", kMaxSimdgroups));
    case Kernel::metal_decode_split: return decode_split(call);
    case Kernel::metal_prefill_tg: return one(prefill_tg(call));
    case Kernel::metal_prefill_reg: return one(queries_by_eights(call, "prefill_reg", whole_call(call)));
    default: throw std::logic_error(std::string(name(kernel)) + " is no forward kernel of Metal's");
  }
}

}  // namespace flashattn::metal
