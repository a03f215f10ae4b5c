// Cuts one call into blocks of rows and spreads them over the threads.
#include "attention.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "kernels.h"
#include "threads.h"

namespace flashattn::cpu {
namespace {

// All heads of a group share their keys, so they go into the same block as far as they fit.
struct HeadCut {
  int heads_per_block, blocks_per_group;
  int64_t blocks;  // of all groups and batch elements

  HeadCut(const AttentionParams& params, int max_heads) {
    int group = params.num_heads / params.num_kv_heads;
    blocks_per_group = (group + max_heads - 1) / max_heads;
    heads_per_block = (group + blocks_per_group - 1) / blocks_per_group;
    blocks = params.batch_size * params.num_kv_heads * blocks_per_group;
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
            .key_end = params.key_len};
  }
};

// The more rows share what is loaded and packed of keys and values, the better, as long as their queries and
// outputs take no more than half of the second-level cache.
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

}  // namespace

void prefill(const AttentionArgs& args) {
  const AttentionParams& params = args.params;
  const Kernels& isa = kernels();
  int max_rows = rows_in_cache(params.head_dim, params.value_dim);
  HeadCut cut(params, max_rows);
  // Enough blocks for the threads to end together. Not a function of their number: nor is then the result.
  constexpr int kBlocks = 64;
  int64_t queries = (params.query_len * cut.blocks + kBlocks - 1) / kBlocks;
  int least = (kMinRows + cut.heads_per_block - 1) / cut.heads_per_block;
  int most = max_rows / cut.heads_per_block;
  int queries_per_block = static_cast<int>(std::clamp<int64_t>(queries, std::min(least, most), most));
  int64_t tiles = (params.query_len + queries_per_block - 1) / queries_per_block;
  // The last queries see the most keys under a causal mask: they go first, so that the threads end together.
  parallel_for(tiles * cut.blocks, [&](int64_t i) {
    RowBlock block = cut.block(params, i % cut.blocks);
    block.query_begin = static_cast<int>(tiles - 1 - i / cut.blocks) * queries_per_block;
    block.query_count = std::min(queries_per_block, params.query_len - block.query_begin);
    isa.attend(args, block);
  });
}

void decode(const AttentionArgs& args) {
  const AttentionParams& params = args.params;
  const Kernels& isa = kernels();
  HeadCut cut(params, kMaxRows / params.query_len);
  // FlashDecoding: each run of keys is a piece of work of its own. The cut depends on the shape alone, and
  // the merge goes in order: the result is the same for any number of threads.
  constexpr int kKeysPerRun = 512;
  int first_key = params.window > 0 ? std::max(0, params.key_len - params.query_len - params.window + 1) : 0;
  int64_t runs = std::max(1, (params.key_len - first_key + kKeysPerRun - 1) / kKeysPerRun);
  if (runs == 1) {
    parallel_for(cut.blocks, [&](int64_t i) { isa.attend(args, cut.block(params, i)); });
    return;
  }
  int64_t size = int64_t{cut.heads_per_block} * params.query_len * partial_row_size(params.value_dim);
  auto partials = std::make_unique_for_overwrite<float[]>(cut.blocks * runs * size);
  std::vector<std::atomic<int64_t>> finished(cut.blocks);
  parallel_for(cut.blocks * runs, [&](int64_t i) {
    int64_t head = i / runs;
    RowBlock block = cut.block(params, head);
    block.key_begin = first_key + static_cast<int>(i % runs) * kKeysPerRun;
    block.key_end = std::min(block.key_begin + kKeysPerRun, params.key_len);
    isa.attend_partial(args, block, partials.get() + i * size);
    if (finished[head].fetch_add(1, std::memory_order_acq_rel) == runs - 1) {  // the last run to finish merges them all
      isa.merge(args, cut.block(params, head), partials.get() + head * runs * size, runs, size);
    }
  });
}

}  // namespace flashattn::cpu
