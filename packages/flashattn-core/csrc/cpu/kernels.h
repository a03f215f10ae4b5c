// What each instruction set provides, and the choice of one of them at run time.
#pragma once

#include "block_map.h"
#include "forward.h"

namespace flashattn::cpu {

// The rows that are computed together, against one run of keys: `query_count` queries of each of
// `head_count` query heads that share a key/value head. What is loaded of keys and values
// serves all of them.
struct RowBlock {
  int64_t batch;
  int head_begin, head_count;  // query heads, all of one group
  int query_begin, query_count;
  int key_begin, key_end;  // nothing outside is read
  bool decoded;            // scores of few rows are dot products, see matmul.h; the gradient computes them likewise

  int rows() const { return head_count * query_count; }
};

// A block may have up to kMaxRows rows (a multiple of every vector's width); with kMinRows it fills the vectors of
// every instruction set.
constexpr int kMaxRows = 512, kMinRows = 64;

// What is left of a row after a run of keys, in floats: row_max, row_sum and value_dim unnormalised sums.
constexpr int64_t partial_row_size(int value_dim) {
  return 2 + int64_t{value_dim};
}

// Loops that reach the bounds of the machine, see roofline.h. They return a number so that nothing is left out.
struct RooflineLoops {
  float (*multiply_add)(int64_t steps);
  int64_t flops_per_step;
  float (*read)(const float* data, int64_t size);
};

// Up to 32 rows of a mask, from element `offset` on, and the bytes of their blocks.
struct MaskRows {
  const void* mask;
  MaskType type;
  int64_t offset, row_stride, key_stride;
  int rows, keys;
  uint8_t* blocks;
};

struct BackwardArgs;
struct KeyTile;
class Turns;

struct BackwardKernels {
  int max_rows;  // of a band that goes by a tile of keys
  // delta of rows [first, last), counted through batch elements, heads and queries.
  void (*delta)(const BackwardArgs&, int64_t first, int64_t last);
  // One tile's part of the query gradients, when it is its turn; its key and value gradients, finished.
  void (*tile)(const BackwardArgs&, const KeyTile&, Turns&);
};

struct Kernels {
  const char* name;
  // Attention of a block of rows over its keys, finished: writes all outputs.
  void (*attend)(const AttentionArgs&, const RowBlock&);
  // The same, unfinished: writes rows() * partial_row_size() floats.
  void (*attend_partial)(const AttentionArgs&, const RowBlock&, float* partial);
  // Adds what later keys have left of `rows` rows to what earlier ones have left.
  void (*merge)(int rows, int value_dim, float* partial, const float* later);
  // Writes all outputs, from what all keys have left.
  void (*finish)(const AttentionArgs&, const RowBlock&, const float* partial);
  // A row of a block map.
  void (*find_blocks)(const MaskRows&);
  const BackwardKernels& backward;
  const RooflineLoops& roofline;
};

namespace baseline {
extern const Kernels kernels;
extern const BackwardKernels backward_kernels;
void find_blocks(const MaskRows&);
extern const RooflineLoops roofline_loops;
}  // namespace baseline
namespace avx2 {
extern const Kernels kernels;
extern const BackwardKernels backward_kernels;
void find_blocks(const MaskRows&);
extern const RooflineLoops roofline_loops;
}  // namespace avx2
namespace avx512 {
extern const Kernels kernels;
extern const BackwardKernels backward_kernels;
void find_blocks(const MaskRows&);
extern const RooflineLoops roofline_loops;
}  // namespace avx512
namespace neon {
extern const Kernels kernels;
extern const BackwardKernels backward_kernels;
void find_blocks(const MaskRows&);
extern const RooflineLoops roofline_loops;
}  // namespace neon

// The best set that this machine runs, or the one that FLASHATTN_CPU_ISA names. Throws
// std::invalid_argument when that is unknown, or not to be had here.
const Kernels& kernels();

}  // namespace flashattn::cpu
