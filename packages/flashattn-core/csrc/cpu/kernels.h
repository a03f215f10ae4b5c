// The functions that are compiled once per instruction set, and the choice of one set at run time.
#pragma once

#include "block_map.h"
#include "forward.h"

namespace flashattn::cpu {

// The rows that are computed together, against one run of keys: `query_count` queries of each of `head_count` query
// heads that share a key/value head, and so the loaded keys and values.
struct RowBlock {
  int64_t batch;
  int head_begin, head_count;  // query heads, all of one group
  int query_begin, query_count;
  int key_begin, key_end;  // no other keys are read
  bool decoded;            // set by decode(): few rows, and their gradient, use dot(), see matmul.h

  int rows() const { return head_count * query_count; }
};

// A block may have up to kMaxRows rows (a multiple of every vector's width); with kMinRows it fills the vectors of
// every instruction set.
constexpr int kMaxRows = 512, kMinRows = 64;

// The floats of a row's partial result after a run of keys: row_max, row_sum and value_dim unnormalised sums.
constexpr int64_t partial_row_size(int value_dim) {
  return 2 + int64_t{value_dim};
}

// Loops that reach the machine's limits, see roofline.h. They return a number so that the compiler keeps the work.
struct RooflineLoops {
  float (*multiply_add)(int64_t steps);
  int64_t flops_per_step;
  float (*read)(const float* data, int64_t size);
};

// Up to 32 rows of a mask, from element `offset` on, and where to write the flags of their blocks.
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
  int max_rows;  // of a band
  // Writes delta of rows [first, last), which count through batch elements, heads and queries.
  void (*delta)(const BackwardArgs&, int64_t first, int64_t last);
  // Adds a tile's part to the query gradients, in the order of Turns, and writes the tile's key and value gradients.
  void (*tile)(const BackwardArgs&, const KeyTile&, Turns&);
};

struct Kernels {
  const char* name;
  // Computes attention of a block of rows over its keys, and writes all outputs.
  void (*attend)(const AttentionArgs&, const RowBlock&);
  // Computes the same, but writes partial results: rows() * partial_row_size() floats.
  void (*attend_partial)(const AttentionArgs&, const RowBlock&, float* partial);
  // Merges partial results of `rows` rows: adds `later`, those of later keys, to `partial`.
  void (*merge)(int rows, int value_dim, float* partial, const float* later);
  // Writes all outputs, from the partial results of all keys.
  void (*finish)(const AttentionArgs&, const RowBlock&, const float* partial);
  // Computes a row of a block map.
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

// The best set that this machine runs, or the one that FLASHATTN_CPU_ISA names. Throws std::invalid_argument if that
// set is unknown, or this machine does not run it.
const Kernels& kernels();

}  // namespace flashattn::cpu
