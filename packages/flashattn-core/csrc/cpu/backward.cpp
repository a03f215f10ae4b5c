// Splits the backward pass into tiles of keys and spreads them over the threads.
#include "backward.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include "backward_kernels.h"
#include "batch.h"
#include "threads.h"

namespace flashattn::cpu {
namespace {

// The Turns of one key/value head. added_[band] counts the tiles whose terms are in the band's query gradients.
class HeadTurns final : public Turns {
 public:
  explicit HeadTurns(size_t bands) : added_(bands) {}

  void wait(int band, int turn) override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return added_[band] == turn || failure_; });
    if (failure_) {  // the awaited tile will never add its terms
      std::rethrow_exception(failure_);
    }
  }
  void done(int band) override {
    {
      std::lock_guard lock(mutex_);
      ++added_[band];
    }
    changed_.notify_all();
  }
  void give_up(const std::exception_ptr& why) {
    {
      std::lock_guard lock(mutex_);
      failure_ = why;
    }
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<int> added_;
  std::exception_ptr failure_;
};

// Splits the rows of one key/value head into bands, ordered by query.
std::vector<RowBand> bands_of(const AttentionArgs& args, int64_t batch, int kv_head, const BackwardKernels& isa) {
  const AttentionParams& p = args.params;
  int group = p.num_heads / p.num_kv_heads;
  int heads = std::clamp(group, 1, isa.max_rows);
  int queries = std::max(1, isa.max_rows / heads);
  KeyRange range = key_range(args, batch);
  std::vector<RowBand> bands;
  for (int query = 0; query < p.query_len; query += queries) {
    for (int head = 0; head < group; head += heads) {
      RowBand band = {};
      band.block = {.batch = batch,
                    .head_begin = kv_head * group + head,
                    .head_count = std::min(heads, group - head),
                    .query_begin = query,
                    .query_count = std::min(queries, p.query_len - query),
                    .key_begin = 0,
                    .key_end = p.key_len,
                    .decoded = false};
      // [begin, end) becomes the union of the queries' spans. Empty spans are left out. The union has no gap, because
      // each end of the other spans moves up by at most one key from one query to the next.
      int begin = p.key_len, end = 0;
      for (int i = query; i < query + band.block.query_count; ++i) {
        Span span = seen_span(p, range, i);
        if (span.begin < span.end) {
          begin = std::min(begin, span.begin);
          end = std::max(end, span.end);
        }
      }
      // Removes blocks of keys from both ends if the block map hides them from all rows of the band.
      QueryRows rows = {
          batch,
          {band.block.head_begin, band.block.head_begin + band.block.head_count},
          {query, query + band.block.query_count},
      };
      const auto hidden = [&](int key) { return (mapped_block(args, rows, key / kBlockSize) & kBlockShows) == 0; };
      while (begin < end && hidden(begin)) begin = std::min(end, (begin / kBlockSize + 1) * kBlockSize);
      while (begin < end && hidden(end - 1)) end = (end - 1) / kBlockSize * kBlockSize;
      if (begin < end) {
        band.first_tile = begin / isa.tile_keys;
        band.tile_count = (end - 1) / isa.tile_keys - band.first_tile + 1;
      }
      bands.push_back(band);
    }
  }
  return bands;
}

// Writes zeros to the query gradients of a block whose rows see no key.
void clear_query_gradient(const BackwardArgs& args, const RowBlock& block) {
  const AttentionParams& p = args.forward.params;
  size_t row_size = p.head_dim * size_of(args.forward.dtype);
  for (int head = block.head_begin; head < block.head_begin + block.head_count; ++head) {
    int64_t row = (block.batch * p.num_heads + head) * p.query_len + block.query_begin;
    std::fill_n(static_cast<char*>(args.query_gradient) + row * row_size, block.query_count * row_size, 0);
  }
}

}  // namespace

void backward(const BackwardArgs& args) {
  const AttentionParams& p = args.forward.params;
  const BackwardKernels& isa = kernels().backward;
  int64_t rows = p.batch_size * p.num_heads * p.query_len;
  constexpr int64_t kRowsAtOnce = 256;
  parallel_for((rows + kRowsAtOnce - 1) / kRowsAtOnce,
               [&](int64_t i) { isa.delta(args, i * kRowsAtOnce, std::min(rows, (i + 1) * kRowsAtOnce)); });

  int64_t heads = p.batch_size * p.num_kv_heads;
  std::unique_ptr<uint16_t[]> lower;
  if (args.forward.dtype != Dtype::float32) {
    lower = std::make_unique_for_overwrite<uint16_t[]>(rows * p.head_dim);
  }
  std::vector<std::vector<RowBand>> bands;
  std::vector<std::unique_ptr<HeadTurns>> turns;
  for (int64_t head = 0; head < heads; ++head) {
    bands.push_back(bands_of(args.forward, head / p.num_kv_heads, static_cast<int>(head % p.num_kv_heads), isa));
    turns.push_back(std::make_unique<HeadTurns>(bands.back().size()));
    for (const RowBand& band : bands.back()) {
      if (band.tile_count == 0) clear_query_gradient(args, band.block);
    }
  }
  // Threads take tiles in the order of their keys. So a thread only waits for tiles that have already been taken.
  int64_t tiles = (p.key_len + isa.tile_keys - 1) / isa.tile_keys;
  parallel_for(tiles * heads, [&](int64_t i) {
    int64_t head = i % heads;
    int index = static_cast<int>(i / heads), begin = index * isa.tile_keys;
    KeyTile tile = {.batch = head / p.num_kv_heads,
                    .kv_head = static_cast<int>(head % p.num_kv_heads),
                    .index = index,
                    .begin = begin,
                    .end = std::min(begin + isa.tile_keys, p.key_len),
                    .bands = bands[head].data(),
                    .band_count = static_cast<int>(bands[head].size()),
                    .query_gradient_lower = lower.get()};
    try {
      isa.tile(args, tile, *turns[head]);
    } catch (...) {
      for (auto& head_turns : turns) head_turns->give_up(std::current_exception());
      throw;
    }
  });
}

}  // namespace flashattn::cpu
