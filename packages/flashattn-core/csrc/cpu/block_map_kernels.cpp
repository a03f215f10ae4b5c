// Computes a row of a block map in one pass over the mask's rows. Compiled once per instruction set, see simd.h.
#include "block_map.h"
#include "kernels.h"
#include "simd.h"

namespace flashattn::cpu::FLASHATTN_ISA {
namespace {

// Bits is a vector that holds one row of a block, as unsigned integers.
template <typename T>
struct RowOfBlock {
  typedef T Bits __attribute__((vector_size(kBlockSize * sizeof(T))));
};

// Loads kBlockSize elements of a row from `first` on. Beyond the row's end it repeats the last element, because a
// repeated element changes no flag.
template <typename T>
FLASHATTN_INLINE void load_row(typename RowOfBlock<T>::Bits& bits, const T* row, int64_t stride, int first, int count) {
  if (stride == 1 && first + kBlockSize <= count) {
    __builtin_memcpy(&bits, row + first, sizeof(bits));
    return;
  }
  for (int i = 0; i < kBlockSize; ++i) bits[i] = row[smaller(first + i, count - 1) * stride];
}

template <typename Bits>
FLASHATTN_INLINE bool any_bit(const Bits& bits) {
  uint64_t words[sizeof(Bits) / sizeof(uint64_t)], any = 0;
  __builtin_memcpy(words, &bits, sizeof(bits));
  for (uint64_t word : words) any |= word;
  return any != 0;
}

// T is the unsigned type of an element's bits, and kHidden are the bits that hide a key. A bool element changes a score
// only if it hides the key. An additive element changes a score unless it is 0 or -0.
template <typename T, T kHidden, bool kIsBool>
void find(const MaskRows& rows) {
  typedef typename RowOfBlock<T>::Bits Bits;
  constexpr int kBlocksAtOnce = 16;  // few enough that `shows` and `changes` stay in the first-level cache
  const T* mask = static_cast<const T*>(rows.mask) + rows.offset;
  int blocks = (rows.keys + kBlockSize - 1) / kBlockSize;
  for (int first = 0; first < blocks; first += kBlocksAtOnce) {
    int count = smaller(kBlocksAtOnce, blocks - first);
    decltype(Bits{} == Bits{}) shows[kBlocksAtOnce] = {}, changes[kBlocksAtOnce] = {};
    for (int r = 0; r < rows.rows; ++r) {
      for (int b = 0; b < count; ++b) {
        Bits bits;
        load_row<T>(bits, mask + r * rows.row_stride, rows.key_stride, (first + b) * kBlockSize, rows.keys);
        shows[b] |= bits != kHidden;
        changes[b] |= kIsBool ? bits == kHidden : bits + bits != T{0};
      }
    }
    for (int b = 0; b < count; ++b) {
      rows.blocks[first + b] =
          static_cast<uint8_t>((any_bit(shows[b]) ? kBlockShows : 0) | (any_bit(changes[b]) ? kBlockChanges : 0));
    }
  }
}

}  // namespace

void find_blocks(const MaskRows& rows) {
  switch (rows.type) {
    case MaskType::boolean: return find<uint8_t, 0, true>(rows);
    case MaskType::float32: return find<uint32_t, 0xff800000, false>(rows);
    case MaskType::float16: return find<uint16_t, 0xfc00, false>(rows);
    case MaskType::bfloat16: return find<uint16_t, 0xff80, false>(rows);
  }
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
