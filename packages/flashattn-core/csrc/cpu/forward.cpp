// Splits one call into blocks of rows, or chunks of keys, and spreads them over the threads.
#include "forward.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "batch.h"
#include "kernels.h"
#include "threads.h"

namespace flashattn::cpu {
namespace {

// How query heads are split into blocks. The heads of a group share their keys, and go into one block if they fit.
struct HeadCut {
  int heads_per_block, blocks_per_group;
  int64_t blocks;  // in all groups and batch elements
  bool decoded;

  HeadCut(const AttentionParams& params, int max_heads, bool decoded) : decoded(decoded) {
    int group = std::max(1, params.num_heads / params.num_kv_heads);
    blocks_per_group = (group + max_heads - 1) / max_heads;
    heads_per_block = (group + blocks_per_group - 1) / blocks_per_group;
    blocks = params.num_heads == 0 ? 0 : params.batch_size * params.num_kv_heads * blocks_per_group;
  }

  RowBlock block(const AttentionParams& params, int64_t index) const {
    int group = params.num_heads / params.num_kv_heads;
    int first_in_group = static_cast<int>(index % blocks_per_group) * heads_per_block;
    int kv_head = static_cast<int>(index / blocks_per_group % params.num_kv_heads);
    return {.batch = index / blocks_per_group / params.num_kv_heads,
            .head_begin = kv_head * group + first_in_group,
            .head_count = std::min(heads_per_block, group - first_in_group),
            .query_begin = 0,
            .query_count = params.query_len,
            .key_begin = 0,
            .key_end = params.key_len,
            .decoded = decoded};
  }
};

// Returns how many rows a block may have. Larger blocks load and pack keys and values less often, but their queries and
// outputs should take no more than half of the second-level cache.
int rows_in_cache(int head_dim, int value_dim) {
#ifdef _SC_LEVEL2_CACHE_SIZE
  static const long reported = sysconf(_SC_LEVEL2_CACHE_SIZE);
#else
  constexpr long reported = 0;
#endif
  long cache = reported > 0 ? reported : 512 << 10;
  long row = static_cast<long>(sizeof(float)) * (head_dim + value_dim);
  return static_cast<int>(std::clamp<long>(cache / 2 / row, kMinRows, kMaxRows));
}

// Visits the queries of a decode step one by one. So the bits of a query's result do not depend on the call's other
// queries. For example, speculative decoding gets the same bits from one call for several tokens as from several calls.
// A group of more heads than dot() takes may be visited in two parts, and the second part finds the keys in a cache.
// visit(part, row) gets the index of the part's first row.
template <typename Visit>
void for_each_part(const RowBlock& block, const Kernels& isa, Visit visit) {
  int heads = block.head_count;
  int most = heads > isa.max_dot_rows && heads <= isa.max_dot_heads ? (heads + 1) / 2 : heads;
  RowBlock part = block;
  part.query_count = 1;
  for (; part.query_begin < block.query_count; ++part.query_begin) {
    for (int head = 0; head < heads; head += most) {
      part.head_begin = block.head_begin + head;
      part.head_count = std::min(most, heads - head);
      visit(part, part.query_begin * heads + head);
    }
  }
}

constexpr int64_t divide_up(int64_t n, int64_t divisor) {
  return (n + divisor - 1) / divisor;
}

// A decode step computes its chunks of keys in rounds, to limit the memory for partial results. A round works on
// `heads` blocks of heads. Each block has `slots` slots, and a slot holds the partial results of one chunk. After the
// first round, slot 0 holds the merged results of all earlier chunks. The slots take at most 2 MB, but 4 * threads + 1
// slots are always allowed. With fewer slots, threads would idle at the end of a round.
struct Rounds {
  int64_t heads, slots;

  Rounds(int64_t all_heads, int64_t chunks, int64_t slot_bytes) {
    constexpr int64_t kBytes = 2 << 20, kSlotsPerThread = 4, kFewSlots = 8;
    int64_t most = std::max(kBytes / slot_bytes, kSlotsPerThread * num_threads() + 1);
    // Prefers many heads with few slots, because a single thread merges all slots of a head.
    heads = std::clamp<int64_t>(most / std::min(chunks, kFewSlots), 1, all_heads);
    slots = std::min(chunks, most / heads);
    // Removes slots that do not reduce the number of rounds. Then the last round is about as long as the others.
    slots = 1 + divide_up(chunks - 1, divide_up(chunks - 1, slots - 1));
  }
};

}  // namespace

void prefill(const AttentionArgs& args) {
  const AttentionParams& params = args.params;
  const Kernels& isa = kernels();
  int max_rows = rows_in_cache(params.head_dim, params.value_dim);
  HeadCut cut(params, max_rows, false);
  // With this many blocks, threads end at about the same time. The number is a constant, so that results do not depend
  // on the number of threads.
  constexpr int kBlocks = 64;
  int64_t queries = (params.query_len * cut.blocks + kBlocks - 1) / kBlocks;
  int least = (kMinRows + cut.heads_per_block - 1) / cut.heads_per_block;
  int most = max_rows / cut.heads_per_block;
  int queries_per_block = static_cast<int>(std::clamp<int64_t>(queries, std::min(least, most), most));
  int64_t tiles = (params.query_len + queries_per_block - 1) / queries_per_block;
  // Under a causal mask the last queries see the most keys. They go first, so that the threads end at about the same
  // time.
  parallel_for(tiles * cut.blocks, [&](int64_t i) {
    RowBlock block = cut.block(params, i % cut.blocks);
    block.query_begin = static_cast<int>(tiles - 1 - i / cut.blocks) * queries_per_block;
    block.query_count = std::min(queries_per_block, params.query_len - block.query_begin);
    isa.attend(args, block);
  });
}

// FlashDecoding: splits the keys into chunks, which threads compute independently. Chunks begin at multiples of
// kChunkLen, and are merged one by one, in order. So the bits are the same for any number of threads and slots.
void decode(const AttentionArgs& args) {
  const AttentionParams& params = args.params;
  const Kernels& isa = kernels();
  HeadCut cut(params, kMaxRows, true);
  constexpr int kChunkLen = 512;
  int first_chunk = first_seen_key(params) / kChunkLen;
  int64_t chunks = std::max(1, (params.key_len + kChunkLen - 1) / kChunkLen - first_chunk);
  if (chunks == 1 || cut.blocks == 0 || params.query_len == 0) {
    parallel_for(cut.blocks, [&](int64_t i) {
      for_each_part(cut.block(params, i), isa, [&](const RowBlock& part, int) { isa.attend(args, part); });
    });
    return;
  }
  int64_t row_size = partial_row_size(params.value_dim);
  int64_t slot_size = int64_t{cut.heads_per_block} * params.query_len * row_size;
  Rounds rounds(cut.blocks, chunks, slot_size * int64_t{sizeof(float)});
  auto partials = std::make_unique_for_overwrite<float[]>(rounds.heads * rounds.slots * slot_size);
  std::vector<std::atomic<int64_t>> finished(rounds.heads);

  for (int64_t head = 0; head < cut.blocks; head += rounds.heads) {
    int64_t heads = std::min(rounds.heads, cut.blocks - head);
    // taken: slots in use when a round begins. After the first round, slot 0 has the merged results of earlier chunks.
    for (int64_t begin = 0, end, taken = 0; begin < chunks; begin = end, taken = 1) {
      end = std::min(chunks, begin + rounds.slots - taken);
      int64_t count = end - begin;
      for (auto& each : finished) each.store(0, std::memory_order_relaxed);
      parallel_for(heads * count, [&](int64_t i) {
        float* slots = partials.get() + i / count * rounds.slots * slot_size;
        RowBlock chunk = cut.block(params, head + i / count);
        chunk.key_begin = (first_chunk + static_cast<int>(begin + i % count)) * kChunkLen;
        chunk.key_end = std::min(chunk.key_begin + kChunkLen, params.key_len);
        // The chunk's keys stay in the second-level cache until all parts have read them.
        float* partial = slots + (taken + i % count) * slot_size;
        for_each_part(chunk, isa,
                      [&](const RowBlock& part, int row) { isa.attend_partial(args, part, partial + row * row_size); });
        if (finished[i / count].fetch_add(1, std::memory_order_acq_rel) < count - 1) return;
        // The thread that finishes a head's last chunk of this round merges all of the head's slots.
        for (int64_t slot = 1; slot < taken + count; ++slot) {
          isa.merge(chunk.rows(), params.value_dim, slots, slots + slot * slot_size);
        }
        if (end == chunks) {
          for_each_part(chunk, isa,
                        [&](const RowBlock& part, int row) { isa.finish(args, part, slots + row * row_size); });
        }
      });
    }
  }
}

}  // namespace flashattn::cpu
