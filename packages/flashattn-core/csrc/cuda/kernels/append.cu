// Appends rows to a quantised cache, see op/append.h. Each warp writes at most one row of keys or of values. If an
// array is not written in place, the blocks also copy its other rows.
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

// Copies the elements of a head, apart from those of the new rows, which are from `begin` on and before `end`. Copies
// nothing if the array is written in place. The blocks of a head share the work.
template <typename T>
FLASHATTN_FUNC void copy_other_rows(const void* old, void* stored, int64_t first, int count, int begin, int end,
                                    int part, int parts) {
  if (old == nullptr) return;
  const T* from = static_cast<const T*>(old) + first;
  T* to = static_cast<T*>(stored) + first;
  constexpr int kOwn = 16 / sizeof(T);
  bool is_aligned = (int64_t(from) | int64_t(to)) % 16 == 0;
  FLASHATTN_ROLLED
  for (int i = (part * int(blockDim.x) + int(threadIdx.x)) * kOwn; i < count; i += parts * int(blockDim.x) * kOwn) {
    if (is_aligned && i + kOwn <= count && (i + kOwn <= begin || i >= end)) {
      *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
      continue;
    }
    for (int j = i; j < i + kOwn && j < count; ++j) {
      if (j < begin || j >= end) to[j] = from[j];
    }
  }
}

template <typename T, typename Sizes>
FLASHATTN_KERNEL append(const cuda::Arguments& arguments) {
  FLASHATTN_VALUE(AttentionParams, params);
  FLASHATTN_VALUE(SplitParams, split);
  int heads = params.num_kv_heads * params.batch_size;  // of all batch elements
  int of_both = int(blockIdx.x) % (2 * heads), part = int(blockIdx.x) / (2 * heads), parts = gridDim.x / (2 * heads);
  bool is_value = of_both >= heads;
  int head = of_both % heads, first = is_value ? 3 : 0, columns = is_value ? params.value_dim : params.head_dim;
  int words = columns * Sizes::bits / 32, groups = columns / Sizes::group_size;
  const auto* old = arguments.arrays + FLASHATTN_BINDING_old_key_words + first;
  void* const* to = arguments.arrays + FLASHATTN_BINDING_stored_key_words + first;
  int64_t start = int64_t(head) * params.key_len;  // the head's first row
  int begin = split.first_key, end = begin + split.chunk_len;
  copy_other_rows<uint>(old[0], to[0], start * words, params.key_len * words, begin * words, end * words, part, parts);
  for (int i = 1; i < 3; ++i) {
    copy_other_rows<T>(old[i], to[i], start * groups, params.key_len * groups, begin * groups, end * groups, part,
                       parts);
  }
  int position = part * Sizes::warps + int(warp_index());  // among the new rows
  if (position >= split.chunk_len) return;
  const Strides& strides = is_value ? params.value : params.key;
  const T* from = static_cast<const T*>(arguments.arrays[FLASHATTN_BINDING_new_keys + is_value]) +
                  head / params.num_kv_heads * strides.batch[0] + head % params.num_kv_heads * strides.head +
                  position * strides.row;
  int64_t row = start + begin + position;
  for (int g = 0; g < groups; ++g) {
    write_group<T, Sizes>(from + g * Sizes::group_size * strides.column, strides.column,
                          static_cast<uint*>(to[0]) + row * words + g * (Sizes::group_size * Sizes::bits / 32),
                          static_cast<T*>(to[1]) + row * groups + g, static_cast<T*>(to[2]) + row * groups + g);
  }
}
