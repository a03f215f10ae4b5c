// Divides and rounds integers, and decides how a decode step's keys are cut into chunks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../call/params.h"
#include "../call/spans.h"

namespace flashattn::gpu {

constexpr int round_up(int n, int multiple) {
  return (n + multiple - 1) / multiple * multiple;
}
constexpr int64_t divide_up(int64_t n, int64_t divisor) {
  return (n + divisor - 1) / divisor;
}

struct SplitGoal {
  int64_t chunks;  // how many chunks fill the GPU, over all batch elements and key/value heads
  int min_chunk;   // keys per chunk; with fewer, writing and merging the result would take longer than reading the keys
  int max_chunks;  // per key/value head
};

// How many float32 numbers the struct Partials of decode_split.h has.
inline int64_t partials_of(const AttentionParams& p, int64_t num_chunks) {
  return p.batch_size * p.num_heads * p.query_len * num_chunks * (p.value_dim + int64_t{2});
}

inline SplitParams split_keys(const AttentionParams& p, SplitGoal goal) {
  // Limits partial results to 16 MB, so that scratch does not grow with rows times keys. If one chunk's results would
  // take more, the keys are not split, because the call has enough rows to fill a GPU.
  constexpr int64_t kMaxPartials = (16 << 20) / sizeof(float);
  SplitParams split = {};
  split.first_key = first_seen_key(p);
  int64_t keys = p.key_len - split.first_key;
  int64_t groups = std::max<int64_t>(1, p.batch_size * p.num_kv_heads);
  int64_t chunks = std::min<int64_t>(divide_up(goal.chunks, groups), divide_up(keys, goal.min_chunk));
  chunks = std::min(chunks, kMaxPartials / std::max<int64_t>(1, partials_of(p, 1)));
  chunks = std::clamp<int64_t>(chunks, 1, goal.max_chunks);
  split.chunk_len = std::max(1, round_up(static_cast<int>(divide_up(keys, chunks)), 4));
  split.num_chunks = static_cast<int32_t>(std::max<int64_t>(1, divide_up(keys, split.chunk_len)));
  return split;
}

}  // namespace flashattn::gpu
