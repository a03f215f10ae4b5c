// Appends rows to a quantised cache, see op/append.h. Each warp writes one row of keys or of values. If an array is not
// written in place, the warps also copy its other rows.
//
// The result has the bits of mx.quantize() in MLX's build for CUDA. So divisions are rounded correctly, halves are
// rounded away from zero, the largest element counts as at least 0, and elements are divided by the float32 scale.
#include "kernel.h"

using namespace flashattn;

// Quantises a group. Lane i reads the elements from i * kOwn on.
template <typename T, typename Sizes>
FLASHATTN_FUNC void write_group(const T* group, int64_t step, uint* words, T* scale, T* bias) {
  constexpr int kOwn = Sizes::group_size / FLASHATTN_LANES, kBits = kOwn * Sizes::bits, kLanes = 32 / kBits;
  constexpr float kMost = (1 << Sizes::bits) - 1;
  int lane = lane_index();
  float own[kOwn], smallest = INFINITY, largest = 0;
  FLASHATTN_UNROLL
  for (int i = 0; i < kOwn; ++i) {
    own[i] = float(group[(lane * kOwn + i) * step]);
    smallest = fminf(smallest, own[i]);
    largest = fmaxf(largest, own[i]);
  }
  smallest = -lane_max<FLASHATTN_LANES>(-smallest);
  largest = lane_max<FLASHATTN_LANES>(largest);
  float width = fmaxf((largest - smallest) / kMost, 1e-7f);
  bool from_smallest = fabsf(smallest) > fabsf(largest);
  float edge = from_smallest ? smallest : largest;
  width = from_smallest ? width : -width;
  float steps = roundf(edge / width);
  if (steps != 0) {  // so that 0 is represented exactly
    width = edge / steps;
  } else {
    edge = 0;
  }
  uint word = 0;
  FLASHATTN_UNROLL
  for (int i = 0; i < kOwn; ++i) {  // fminf() makes the largest number of NaN
    word |= uint(fminf(roundf((own[i] - edge) / width), kMost)) << (lane % kLanes * kBits + i * Sizes::bits);
  }
  FLASHATTN_UNROLL
  for (int other = 1; other < kLanes; other *= 2) word |= __shfl_xor_sync(~0u, word, other);
  if (lane % kLanes == 0) words[lane / kLanes] = word;
  if (lane == 0) {
    *scale = T(width);
    *bias = T(edge);
  }
}

// Copies a row, unless the array is written in place.
template <typename T>
FLASHATTN_FUNC void copy_row(const void* from, void* to, int64_t first, int count) {
  if (from == nullptr) return;
  FLASHATTN_ROLLED
  for (int i = lane_index(); i < count; i += FLASHATTN_LANES) {
    static_cast<T*>(to)[first + i] = static_cast<const T*>(from)[first + i];
  }
}

template <typename T, typename Sizes>
FLASHATTN_KERNEL append(const cuda::Arguments& arguments) {
  FLASHATTN_VALUE(AttentionParams, params);
  FLASHATTN_VALUE(SplitParams, split);
  const auto* old = arguments.arrays + FLASHATTN_BINDING_old_key_words;
  bool copies = false;
  FLASHATTN_UNROLL
  for (int i = 0; i < 6; ++i) copies |= old[i] != nullptr;
  uint rows = copies ? params.key_len : split.chunk_len;
  uint heads = params.num_kv_heads * uint(params.batch_size), index = blockIdx.x * Sizes::warps + warp_index();
  if (index >= 2 * heads * rows) return;
  int row = int(index % rows) + (copies ? 0 : split.first_key), position = row - split.first_key;
  uint head = index / rows % heads;  // of all batch elements
  bool is_value = index / rows >= heads;
  int first = is_value ? 3 : 0, columns = is_value ? params.value_dim : params.head_dim;
  int words = columns * Sizes::bits / 32, groups = columns / Sizes::group_size;
  int64_t stored = int64_t(head) * params.key_len + row;
  void* const* to = arguments.arrays + FLASHATTN_BINDING_stored_key_words + first;
  if (position < 0 || position >= split.chunk_len) {
    copy_row<uint>(old[first], to[0], stored * words, words);
    copy_row<T>(old[first + 1], to[1], stored * groups, groups);
    copy_row<T>(old[first + 2], to[2], stored * groups, groups);
    return;
  }
  const Strides& strides = is_value ? params.value : params.key;
  const T* from = static_cast<const T*>(arguments.arrays[FLASHATTN_BINDING_new_keys + is_value]) +
                  head / params.num_kv_heads * strides.batch[0] + head % params.num_kv_heads * strides.head +
                  position * strides.row;
  for (int g = 0; g < groups; ++g) {
    write_group<T, Sizes>(from + g * Sizes::group_size * strides.column, strides.column,
                          static_cast<uint*>(to[0]) + stored * words + g * (Sizes::group_size * Sizes::bits / 32),
                          static_cast<T*>(to[1]) + stored * groups + g, static_cast<T*>(to[2]) + stored * groups + g);
  }
}
