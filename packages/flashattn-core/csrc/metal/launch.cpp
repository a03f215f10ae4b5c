// Which instantiation, function constants and grid each kernel gets for a call.
#include "launch.h"

#include <algorithm>
#include <stdexcept>

namespace flashattn::metal {
namespace {

constexpr int kLanes = 32;          // threads of a SIMD group
constexpr int kMaxSimdgroups = 32;  // of a threadgroup: 1024 threads

int round_up(int n, int multiple) {
  return (n + multiple - 1) / multiple * multiple;
}
int64_t divide_up(int64_t n, int64_t divisor) {
  return (n + divisor - 1) / divisor;
}

std::string type_name(Dtype dtype) {
  return dtype == Dtype::float32 ? "float" : dtype == Dtype::float16 ? "half" : "bfloat";
}

int size_of(Dtype dtype) {
  return dtype == Dtype::float32 ? 4 : 2;
}

bool is_quantised(const Call& call) {
  return call.quant.bits != 0;
}

// Of an element of keys or values in threadgroup memory.
int tile_element_size(const Call& call) {
  return is_quantised(call) ? size_of(Dtype::float32) : size_of(call.dtype);
}

int group_of(const Call& call) {
  return call.params.num_heads / call.params.num_kv_heads;
}

// The function constants of kernels/variant.h, in its order.
std::vector<Constant> constants(const Call& call, bool whole_rows, bool whole_keys) {
  const AttentionParams& p = call.params;
  bool packed = p.query.column == 1 && p.key.column == 1 && p.value.column == 1;
  // A row of one element has no second: any stride will do.
  packed |= p.head_dim == 1 && p.value_dim == 1;
  return {{0, p.head_dim},
          {1, p.value_dim},
          {2, p.causal},
          {3, p.window > 0},
          {4, call.present[kKeyStart]},
          {5, call.present[kKeyStop]},
          {6, call.present[kTree]},
          {7, call.present[kVisible]},
          {8, call.present[kBias]},
          {9, call.present[kBias] ? static_cast<int32_t>(call.bias_dtype) : 0},
          {10, p.softcap > 0},
          {11, call.present[kSinks]},
          {12, call.present[kAlibiSlopes]},
          {13, packed},
          {14, whole_rows},
          {15, whole_keys},
          {17, is_quantised(call)},
          {18, call.quant.bits},
          {19, call.quant.group_size},
          {20, is_quantised(call) ? static_cast<int32_t>(call.group_dtype) : 0}};
}

std::vector<Binding> bindings(const Call& call, std::initializer_list<Binding> own, bool with_sinks) {
  std::vector<Binding> result = own;
  result.push_back(kParams);
  if (is_quantised(call)) {
    result.insert(result.end(), {kKeyScales, kKeyBiases, kValueScales, kValueBiases, kQuantParams});
  }
  for (Binding input : {kKeyStart, kKeyStop, kTree, kVisible, kBias, kAlibiSlopes}) {
    if (call.present[input]) {
      result.push_back(input);
    }
  }
  if (with_sinks && call.present[kSinks]) {
    result.push_back(kSinks);
  }
  return result;
}

uint32_t size(int64_t n) {
  return static_cast<uint32_t>(n);
}
uint32_t batches(const Call& call) {
  return size(call.params.batch_size);
}

// Instantiates `function` of a file for the call's dtype: "decode_fast<half, 64, 64>", "metal_decode_fast_half_64_64";
// with quantised keys and values, if it takes any, "decode_fast<half, 64, 64, uint>".
Launch launch(const std::string& source, const std::string& function, const Call& call,
              std::initializer_list<int> sizes, std::vector<Binding> bindings, Size grid, int simdgroups,
              bool whole_rows = false, bool whole_keys = false) {
  std::string arguments = type_name(call.dtype), name = "metal_" + function + "_" + type_name(call.dtype);
  for (int size : sizes) {
    arguments += ", " + std::to_string(size);
    name += "_" + std::to_string(size);
  }
  if (std::find(bindings.begin(), bindings.end(), kQuantParams) != bindings.end()) {
    arguments += ", uint";
    name += "_quantised";
  }
  return {.source = source,
          .function = name,
          .instantiation = function + "<" + arguments + ">",
          .constants = constants(call, whole_rows, whole_keys),
          .bindings = std::move(bindings),
          .grid = grid,
          .threadgroup = {size(simdgroups * kLanes), 1, 1}};
}

// A kernel that takes the whole call in one launch.
Launch single(const std::string& function, const Call& call, std::initializer_list<int> sizes, Size grid,
              int simdgroups, bool whole_rows = false, bool whole_keys = false) {
  return launch(function, function, call, sizes, bindings(call, {kQuery, kKey, kValue, kOut, kLse}, true), grid,
                simdgroups, whole_rows, whole_keys);
}

Launch decode_fast(const Call& call) {
  const AttentionParams& p = call.params;
  return single("decode_fast", call, {round_up(p.head_dim, kLanes), round_up(p.value_dim, kLanes)},
                {1, size(p.num_heads), batches(call)}, 1);
}

Launch decode_parallel(const Call& call) {
  const AttentionParams& p = call.params;
  return single("decode_parallel", call, {round_up(p.head_dim, kLanes), round_up(p.value_dim, kLanes)},
                {1, size(p.num_heads), batches(call)}, kMaxSimdgroups);
}

Launch rowwise(const Call& call) {
  const AttentionParams& p = call.params;
  int64_t rows = int64_t{p.query_len} * group_of(call);
  return single("rowwise", call, {round_up(p.head_dim, kLanes), round_up(p.value_dim, kLanes)},
                {size(divide_up(rows, 32)), size(p.num_kv_heads), batches(call)}, kMaxSimdgroups);
}

Launch prefill_tg(const Call& call) {
  const AttentionParams& p = call.params;
  int64_t rows = int64_t{p.query_len} * group_of(call);
  // Two fragments of rows read the keys half as often, as long as the queries leave registers for the output.
  int fragments = std::max(p.head_dim, p.value_dim) <= 64 && rows > 8 ? 2 : 1;
  return single("prefill_tg", call, {round_up(p.head_dim, 8), round_up(p.value_dim, 8), fragments},
                {size(divide_up(rows, 8 * fragments)), size(p.num_kv_heads), batches(call)}, 4);
}

Launch prefill_reg(const Call& call) {
  const AttentionParams& p = call.params;
  int dim = std::max(round_up(p.head_dim, 8), round_up(p.value_dim, 8));
  // 64 rows read keys and values half as often as 32; larger heads have too much in registers for so many threads.
  int simdgroups = p.query_len > 64 && dim <= 128 ? 8 : 4;
  // 32 keys, unless their tile takes more than half of the 32 KB.
  int tile_row = dim * tile_element_size(call) + 16;
  int keys = 32 * tile_row <= 17 * 1024 ? 32 : 16;
  return single("prefill_reg", call, {round_up(p.head_dim, 8), round_up(p.value_dim, 8), simdgroups, keys},
                {size(divide_up(p.query_len, 8 * simdgroups)), size(p.num_heads), batches(call)}, simdgroups,
                p.query_len % (8 * simdgroups) == 0, p.key_len % keys == 0);
}

// How the keys are cut: enough chunks to fill a GPU, none so short that writing and merging partial results costs more
// than reading the keys.
SplitParams split_keys(const Call& call) {
  constexpr int64_t kWantedSimdgroups = 512;
  constexpr int kMinChunk = 64, kMaxChunks = 128;
  const AttentionParams& p = call.params;
  SplitParams split = {};
  if (p.window > 0) {  // the first query's window
    split.first_key = static_cast<int32_t>(std::max<int64_t>(0, int64_t{p.key_len} - p.query_len - p.window + 1));
  }
  int64_t keys = p.key_len - split.first_key;
  int64_t groups = std::max<int64_t>(1, p.batch_size * p.num_kv_heads);
  int64_t chunks = std::min<int64_t>(divide_up(kWantedSimdgroups, groups), divide_up(keys, kMinChunk));
  chunks = std::clamp<int64_t>(chunks, 1, kMaxChunks);
  split.chunk_len = std::max(1, round_up(static_cast<int>(divide_up(keys, chunks)), 4));
  split.num_chunks = static_cast<int32_t>(std::max<int64_t>(1, divide_up(keys, split.chunk_len)));
  return split;
}

Launches decode_split(const Call& call) {
  constexpr int kChunksPerThreadgroup = 4, kMaxSplitSimdgroups = 16;
  const AttentionParams& p = call.params;
  int dim = round_up(p.head_dim, kLanes), value_dim = round_up(p.value_dim, kLanes);
  int rows = group_of(call) * p.query_len;
  // By registers, of which a thread of a small threadgroup has 128: queries and output of all rows are in them.
  int widest = std::max(dim, value_dim);
  int max_rows = widest <= 128 ? 8 : widest <= 256 ? 4 : 2;

  Launches result;
  result.split = split_keys(call);
  result.partial_rows = p.batch_size * p.num_heads * p.query_len * result.split.num_chunks;

  std::vector<Binding> chunk_bindings =
      bindings(call, {kQuery, kKey, kValue, kPartialOut, kPartialMax, kPartialSum, kSplitParams}, false);
  if (rows <= max_rows) {
    Size grid = {size(divide_up(result.split.num_chunks, kChunksPerThreadgroup)), size(p.num_kv_heads), batches(call)};
    result.launches.push_back(launch("decode_split", "decode_split", call, {dim, value_dim, rows},
                                     std::move(chunk_bindings), grid, kChunksPerThreadgroup));
  } else {
    // With more SIMD groups each thread has fewer registers: half the rows, in up to 16 of them.
    max_rows /= 2;
    int simdgroups = std::min<int>(kMaxSplitSimdgroups, static_cast<int>(divide_up(rows, max_rows)));
    int rows_each = std::min<int>(max_rows, static_cast<int>(divide_up(rows, simdgroups)));  // none idle
    int64_t row_blocks = divide_up(rows, int64_t{simdgroups} * rows_each);
    Size grid = {size(result.split.num_chunks * row_blocks), size(p.num_kv_heads), batches(call)};
    result.launches.push_back(launch("decode_split", "decode_split_shared", call,
                                     {dim, value_dim, rows_each, simdgroups}, std::move(chunk_bindings), grid,
                                     simdgroups));
  }
  std::vector<Binding> merge_bindings = {kOut, kLse, kParams, kPartialOut, kPartialMax, kPartialSum, kSplitParams};
  if (call.present[kSinks]) {
    merge_bindings.push_back(kSinks);
  }
  result.launches.push_back(launch("decode_split", "decode_merge", call, {value_dim}, std::move(merge_bindings),
                                   {size(p.query_len), size(p.num_heads), batches(call)}, 1));
  return result;
}

// --- The gradient ------------------------------------------------------------------------------------------

// As constants(), for a call that also reads rows of dout.
void add_backward_constants(Launch& launch, const Call& call, const BackwardParams& backward) {
  bool packed_dout = backward.dout.column == 1 || call.params.value_dim == 1;
  for (Constant& constant : launch.constants) {
    if (constant.index == 13) {
      constant.value = std::get<bool>(constant.value) && packed_dout;
    }
  }
  launch.constants.push_back({16, call.present[kDlse]});
}

Launch backward_delta(const Call& call) {
  constexpr int kRowsPerThreadgroup = 8;  // a SIMD group each
  const AttentionParams& p = call.params;
  std::vector<Binding> bindings = {kSavedOut, kDout, kDelta, kParams, kBackwardParams};
  if (call.present[kDlse]) {
    bindings.push_back(kDlse);
  }
  return launch("backward_delta", "backward_delta", call, {kRowsPerThreadgroup}, std::move(bindings),
                {size(divide_up(p.query_len, kRowsPerThreadgroup)), size(p.num_heads), batches(call)},
                kRowsPerThreadgroup);
}

std::vector<Binding> backward_bindings(const Call& call, std::initializer_list<Binding> outputs) {
  std::vector<Binding> result =
      bindings(call, {kQuery, kKey, kValue, kSavedLse, kDout, kDelta, kBackwardParams}, false);
  result.insert(result.end(), outputs);
  return result;
}

Launch backward_dq(const Call& call) {
  const AttentionParams& p = call.params;
  int depth = round_up(p.head_dim, 8), columns = round_up(p.value_dim, 8), dim = std::max(depth, columns);
  int simdgroups = p.query_len > 64 && dim <= 128 ? 8 : 4;
  // 32 keys, unless their tile takes more than half of the 32 KB.
  int keys = 32 * (dim * size_of(call.dtype) + 16) <= 17 * 1024 ? 32 : 16;
  return launch("backward_dq", "backward_dq", call, {depth, columns, simdgroups, keys}, backward_bindings(call, {kDq}),
                {size(divide_up(p.query_len, 8 * simdgroups)), size(p.num_heads), batches(call)}, simdgroups,
                p.query_len % (8 * simdgroups) == 0, p.key_len % keys == 0);
}

Launch backward_dkv(const Call& call) {
  const AttentionParams& p = call.params;
  int depth = round_up(p.head_dim, 8), columns = round_up(p.value_dim, 8), dim = std::max(depth, columns);
  int simdgroups = p.key_len > 64 && dim <= 128 ? 8 : 4;
  // Rows of query and dout lie in threadgroup memory side by side: as many as take little more than half of the 32 KB.
  int row_bytes = (depth + columns) * size_of(call.dtype) + 32;
  int rows = 32 * row_bytes <= 18 * 1024 ? 32 : 16 * row_bytes <= 18 * 1024 ? 16 : 8;
  // The sums of dk and of dv for eight keys are (depth + columns) / 4 registers. Where that is too much, each has
  // threadgroups of its own.
  int parts = depth + columns <= 256 ? 1 : 2;
  return launch("backward_dkv", "backward_dkv", call, {depth, columns, simdgroups, rows, parts},
                backward_bindings(call, {kDk, kDv}),
                {size(divide_up(p.key_len, 8 * simdgroups) * parts), size(p.num_kv_heads), batches(call)}, simdgroups,
                p.query_len % rows == 0, p.key_len % (8 * simdgroups) == 0);
}

}  // namespace

Launches backward_launches(const Call& call, const BackwardParams& backward) {
  Launches result;
  for (Launch launch : {backward_delta(call), backward_dq(call), backward_dkv(call)}) {
    if (std::find(launch.grid.begin(), launch.grid.end(), 0) == launch.grid.end()) {
      add_backward_constants(launch, call, backward);
      result.launches.push_back(std::move(launch));
    }
  }
  return result;
}

Launches launches(Kernel kernel, const Call& call) {
  const auto one = [](Launch launch) {
    Launches result;
    result.launches.push_back(std::move(launch));
    return result;
  };
  switch (kernel) {
    case Kernel::metal_rowwise: return one(rowwise(call));
    case Kernel::metal_decode_fast: return one(decode_fast(call));
    case Kernel::metal_decode_parallel: return one(decode_parallel(call));
    case Kernel::metal_decode_split: return decode_split(call);
    case Kernel::metal_prefill_tg: return one(prefill_tg(call));
    case Kernel::metal_prefill_reg: return one(prefill_reg(call));
    case Kernel::cpu_prefill:
    case Kernel::cpu_decode:
    case Kernel::cpu_backward:
    case Kernel::metal_backward_dq:
    case Kernel::metal_backward_dkv: break;  // backward_launches() has these
  }
  throw std::logic_error(std::string(name(kernel)) + " is not a Metal kernel");
}

}  // namespace flashattn::metal
