// The functions that are compiled once per instruction set. kernels() chooses the instruction set at run time.
#pragma once

#include "block_map.h"
#include "forward.h"

namespace flashattn::cpu {

// Rows that are computed together: `query_count` queries of each of `head_count` query heads. These heads share a
// key/value head, so a key and its value are loaded once for all rows.
struct RowBlock {
  int64_t batch;
  int head_begin, head_count;  // query heads, all of one group
  int query_begin, query_count;
  int key_begin, key_end;  // only these keys are read
  bool decoded;            // whether decode() runs this block; decode() computes few rows with dot(), see matmul.h

  int rows() const { return head_count * query_count; }
};

// A block has at most kMaxRows rows, a multiple of every instruction set's vector width. kMinRows rows fill the vectors
// of every instruction set.
constexpr int kMaxRows = 512, kMinRows = 64;

// The number of floats in a row's partial result: row_max, row_sum and value_dim unnormalised sums.
constexpr int64_t partial_row_size(int value_dim) {
  return 2 + int64_t{value_dim};
}

// Loops that reach the machine's limits, see roofline.h. They return a number so that the compiler does not remove
// their work.
struct RooflineLoops {
  float (*multiply_add)(int64_t steps);
  int64_t flops_per_step;
  float (*read)(const float* data, int64_t size);
};

// Up to 32 rows of a mask, from element `offset` on. find_blocks() writes the flags of their blocks to `blocks`.
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
  int max_rows;   // the most rows of a band
  int tile_keys;  // keys per tile
  // Writes the elements [first, last) of BackwardArgs::delta.
  void (*delta)(const BackwardArgs&, int64_t first, int64_t last);
  // Writes the gradients of the tile's keys and values. Adds the tile's terms to the query gradients, see Turns.
  void (*tile)(const BackwardArgs&, const KeyTile&, Turns&);
};

struct Kernels {
  const char* name;
  int max_dot_rows, max_dot_heads;  // see matmul.h
  // Computes attention of a block of rows over its keys, and writes all outputs.
  void (*attend)(const AttentionArgs&, const RowBlock&);
  // Computes attention as attend() does, but writes partial results: rows() * partial_row_size() floats.
  void (*attend_partial)(const AttentionArgs&, const RowBlock&, float* partial);
  // Merges two partial results of the same rows into `partial`. The keys of `later` come after the keys of `partial`.
  void (*merge)(int rows, int value_dim, float* partial, const float* later);
  // Writes all outputs. `partial` has the partial results over all keys.
  void (*finish)(const AttentionArgs&, const RowBlock&, const float* partial);
  // Computes a row of a block map.
  void (*find_blocks)(const MaskRows&);
  const BackwardKernels& backward;
  const RooflineLoops& roofline;
};

#ifdef FLASHATTN_ISA
namespace FLASHATTN_ISA {
extern const Kernels kernels;
extern const BackwardKernels backward_kernels;
void find_blocks(const MaskRows&);
extern const RooflineLoops roofline_loops;
}  // namespace FLASHATTN_ISA
#endif

// Returns the kernels of the best instruction set that this machine runs, or of the one that FLASHATTN_CPU_ISA names.
// Throws std::invalid_argument if the named set is unknown, or if this machine does not run it.
const Kernels& kernels();

}  // namespace flashattn::cpu
