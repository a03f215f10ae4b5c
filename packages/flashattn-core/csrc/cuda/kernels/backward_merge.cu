// Adds up dk_parts and dv_parts, always in the same order. Each part is a sum over some query heads of a group.
#include "gradient_block.h"

using namespace flashattn;

// COUNT neighbouring columns of a row.
template <typename T, int COUNT>
struct alignas(sizeof(T) * COUNT) Neighbours {
  T columns[COUNT];
};

// Sums COUNT columns of a row over `count` parts, which are `step` floats apart. Rounds the sums to T.
template <int COUNT, typename T>
FLASHATTN_FUNC void merge_parts(const float* parts, int64_t step, int count, T* to) {
  Neighbours<float, COUNT> sum = {};
  _Pragma("unroll 4") for (int n = 0; n < count; ++n) {
    auto part = *reinterpret_cast<const Neighbours<float, COUNT>*>(parts + n * step);
    FLASHATTN_UNROLL
    for (int i = 0; i < COUNT; ++i) sum.columns[i] += part.columns[i];
  }
  Neighbours<T, COUNT> rounded;
  FLASHATTN_UNROLL
  for (int i = 0; i < COUNT; ++i) rounded.columns[i] = T(sum.columns[i]);
  *reinterpret_cast<Neighbours<T, COUNT>*>(to) = rounded;
}

// The grid has one block for every KEYS keys of each key/value head and batch element.
template <typename T, typename Sizes>
FLASHATTN_KERNEL backward_merge(const cuda::BackwardArguments& arguments) {
  constexpr int WARPS = Sizes::warps, KEYS = Sizes::keys;
  FLASHATTN_VALUE(AttentionParams, params);
  FLASHATTN_VALUE(BackwardParams, backward);
  FLASHATTN_READ(float, dk_parts);
  FLASHATTN_READ(float, dv_parts);
  FLASHATTN_WRITTEN(T, dk);
  FLASHATTN_WRITTEN(T, dv);
  constexpr int kAtOnce = head_dim % 4 == 0 && value_dim % 4 == 0 ? 4 : 1, kOfKey = head_dim / kAtOnce;
  constexpr int kPieces = kOfKey + value_dim / kAtOnce;  // pieces of one key's dk and dv
  BlockPosition block = block_position(params, params.num_kv_heads);
  int head = block.head, batch = block.batch, chunks = head_chunks(params, backward);
  int64_t first_row = (int64_t(batch) * params.num_kv_heads + head) * params.key_len;
  int64_t rows = int64_t(params.batch_size) * params.num_kv_heads * params.key_len;
  FLASHATTN_UNROLL
  for (int at = threadIdx.x; at < KEYS * kPieces; at += WARPS * FLASHATTN_LANES) {
    int key = block.part * KEYS + at / kPieces, piece = at % kPieces;
    if (key >= params.key_len) continue;
    int64_t row = first_row + key;
    if (piece < kOfKey) {
      int column = piece * kAtOnce;
      merge_parts<kAtOnce>(dk_parts + row * head_dim + column, rows * head_dim, chunks,
                           row_of(dk, params, backward.dk, batch, head, key) + column);
    } else {
      int column = (piece - kOfKey) * kAtOnce;
      merge_parts<kAtOnce>(dv_parts + row * value_dim + column, rows * value_dim, chunks,
                           row_of(dv, params, backward.dv, batch, head, key) + column);
    }
  }
}
