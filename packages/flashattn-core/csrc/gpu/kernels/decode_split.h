// Decoding for few queries and many keys. The rows of a key/value head are the queries of all its query heads. In phase
// 1 the keys are cut into chunks, and each chunk is read once for all rows. Phase 2 merges each row's partial results.
#pragma once

#include "decode_rows.h"
#include "epilogue.h"

namespace flashattn {

// The results of phase 1 for each row and chunk. Three arrays lie one after the other in memory. The first has the
// outputs, not yet divided by the sums. The second has the maxima, and the third has the sums.
template <typename Pointer>
struct Partials {
  Pointer out;
  Pointer max;
  Pointer sum;

  FLASHATTN_FUNC Partials(Pointer memory, FLASHATTN_UNIFORM AttentionParams& params,
                          FLASHATTN_UNIFORM SplitParams& split)
      : out(memory) {
    int64_t count = params.batch_size * params.num_heads * params.query_len * split.num_chunks;
    max = out + count * value_dim;
    sum = max + count;
  }
};

// The index of a row's partial result for a chunk. Results of the same row are neighbours.
FLASHATTN_FUNC int64_t partial_index(FLASHATTN_UNIFORM AttentionParams& params, FLASHATTN_UNIFORM SplitParams& split,
                                     int batch, int head, int query, int chunk) {
  int64_t row = (int64_t(batch) * params.num_heads + head) * params.query_len + query;
  return row * split.num_chunks + chunk;
}

template <typename Rows>
FLASHATTN_FUNC void store_partials(FLASHATTN_THREAD Rows& rows, Partials<FLASHATTN_DEVICE float*> partials,
                                   FLASHATTN_UNIFORM AttentionParams& params, FLASHATTN_UNIFORM SplitParams& split,
                                   int batch, int chunk, uint lane) {
  RowPosition position = rows.first;
  FLASHATTN_UNROLL
  for (int r = 0; r < Rows::kRows; ++r) {
    if (position.query < params.query_len) {  // otherwise the row is padding
      int64_t index = partial_index(params, split, batch, position.head, position.query, chunk);
      store_lane_columns(partials.out + index * value_dim, rows.output[r], 1.0f, lane);
      if (lane == 0) {
        partials.max[index] = rows.softmax[r].row_max;
        partials.sum[index] = rows.softmax[r].row_sum;
      }
    }
    position.next();
  }
}

// The keys of a chunk that at least one query sees.
FLASHATTN_FUNC KeySpan seen_in_chunk(Visibility visibility, FLASHATTN_UNIFORM SplitParams& split, int chunk) {
  int begin = split.first_key + chunk * split.chunk_len;
  return intersection(visibility.seen_by_any(0, visibility.params->query_len - 1),
                      KeySpan{begin, begin + split.chunk_len});
}

// Phase 1 for kernels in which each SIMD group works alone. It computes one chunk for ROWS rows of a key/value head,
// from first_row on.
template <int D, int DV, int ROWS, typename T, typename K>
FLASHATTN_FUNC void decode_split_body(const FLASHATTN_DEVICE T* query, StoredInputs<K> stored,
                                      FLASHATTN_UNIFORM AttentionParams& params, MaskInputs masks,
                                      Partials<FLASHATTN_DEVICE float*> partials, FLASHATTN_UNIFORM SplitParams& split,
                                      int batch, int kv_head, int chunk, int first_row, uint lane) {
  using Rows = DecodeRows<T, D, DV, ROWS>;
  if (chunk >= split.num_chunks) {
    return;
  }
  Visibility visibility = visibility_of(params, masks, batch);
  FLASHATTN_THREAD Rows rows;
  rows.load(query, row_position(first_row, kv_head, params.num_heads / params.num_kv_heads), visibility, batch, lane);

  auto keys = keys_of(stored, params, batch, kv_head);
  auto values = values_of(stored, params, batch, kv_head);
  KeySpan any = seen_in_chunk(visibility, split, chunk), all = visibility.seen_by_all(0, params.query_len - 1);
  rows.attend(keys, values, visibility, all, any.begin, any.end, Rows::kKeys, 0, lane);
  store_partials(rows, partials, params, split, batch, chunk, lane);
}

// Phase 1 for more rows. All SIMD groups of a threadgroup compute the same chunk. Each computes Rows::kRows rows, from
// its own first_row on. The threadgroup copies each tile of keys and values to threadgroup memory once, for all these
// rows. TILE: keys per tile, a multiple of Rows::kKeys. KeyLoader and ValueLoader copy a tile. All threads of the
// threadgroup call them together.
template <typename Rows, int TILE, typename KeyLoader, typename ValueLoader, typename T, typename K, typename Element>
FLASHATTN_FUNC void decode_split_shared_body(const FLASHATTN_DEVICE T* query, StoredInputs<K> stored,
                                             FLASHATTN_UNIFORM AttentionParams& params, MaskInputs masks,
                                             Partials<FLASHATTN_DEVICE float*> partials,
                                             FLASHATTN_UNIFORM SplitParams& split, FLASHATTN_SHARED Element* key_tile,
                                             FLASHATTN_SHARED Element* value_tile, int batch, int kv_head, int chunk,
                                             int first_row, uint lane, uint thread_index) {
  using Tile = PlainRows<const FLASHATTN_SHARED Element*>;
  Visibility visibility = visibility_of(params, masks, batch);
  FLASHATTN_THREAD Rows rows;
  rows.load(query, row_position(first_row, kv_head, params.num_heads / params.num_kv_heads), visibility, batch, lane);

  auto keys = keys_of(stored, params, batch, kv_head);
  auto values = values_of(stored, params, batch, kv_head);
  KeySpan any = seen_in_chunk(visibility, split, chunk), all = visibility.seen_by_all(0, params.query_len - 1);
  for (int tile = any.begin; tile < any.end; tile += TILE) {
    int tile_end = minimum(tile + TILE, any.end);
    FLASHATTN_BARRIER;  // the previous tile has been read
    KeyLoader::load(key_tile, keys.from(tile), tile_end - tile, head_dim, thread_index);
    ValueLoader::load(value_tile, values.from(tile), tile_end - tile, value_dim, thread_index);
    FLASHATTN_BARRIER;
    rows.attend(Tile{key_tile, RowLayout{KeyLoader::kStride, 1}}, Tile{value_tile, RowLayout{ValueLoader::kStride, 1}},
                visibility, all, tile, tile_end, Rows::kKeys, tile, lane);
  }
  store_partials(rows, partials, params, split, batch, chunk, lane);
}

// Phase 2: one SIMD group merges one row.
template <int DV, typename T>
FLASHATTN_FUNC void decode_merge_body(RowOutputs<T> outputs, FLASHATTN_UNIFORM AttentionParams& params,
                                      const FLASHATTN_DEVICE uchar* sinks,
                                      Partials<const FLASHATTN_DEVICE float*> partials,
                                      FLASHATTN_UNIFORM SplitParams& split, int batch, int head, int query, uint lane) {
  constexpr int kColumns = DV / FLASHATTN_LANES;
  int64_t first = partial_index(params, split, batch, head, query, 0);

  float chunk_max = -INFINITY;
  for (int chunk = int(lane); chunk < split.num_chunks; chunk += FLASHATTN_LANES) {
    chunk_max = maximum(chunk_max, partials.max[first + chunk]);
  }
  OnlineSoftmax whole = empty_row();
  whole.raise(FLASHATTN_LANE_MAX(chunk_max));

  float output[kColumns] = {};
  // A pass of this loop merges up to 32 chunks. Each lane computes one chunk's weight. Then all lanes together add up
  // the outputs of these chunks.
  for (int chunks = 0; chunks < split.num_chunks; chunks += FLASHATTN_LANES) {
    int count = minimum(FLASHATTN_LANES, split.num_chunks - chunks);
    float weight = 0, sum = 0;
    if (int(lane) < count) {
      weight = whole.probability(partials.max[first + chunks + int(lane)]);
      sum = weight * partials.sum[first + chunks + int(lane)];
    }
    whole.row_sum += FLASHATTN_LANE_SUM(sum);
    for (int c = 0; c < count; ++c) {
      float chunk_weight = FLASHATTN_LANE_VALUE(weight, c);
      const FLASHATTN_DEVICE float* partial = partials.out + (first + chunks + c) * value_dim;
      FLASHATTN_UNROLL
      for (int i = 0; i < kColumns; ++i) {
        int column = int(lane) * kColumns + i;
        if (DV == value_dim || column < value_dim) {
          output[i] = multiply_add(chunk_weight, partial[column], output[i]);
        }
      }
    }
  }
  RowResult result = finish_row(whole, sinks, params, batch, head);
  store_lane_columns(outputs.out_row(params, batch, head, query), output, result.normalise, lane);
  if (has_exact_out) {
    store_lane_columns(outputs.exact_row(params, batch, head, query), output, result.normalise, lane);
  }
  if (lane == 0) {
    outputs.store_result(params, batch, head, query, result);
  }
}

}  // namespace flashattn
