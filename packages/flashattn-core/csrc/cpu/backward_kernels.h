// What the backward pass has of each instruction set.
#pragma once

#include "backward.h"
#include "kernels.h"

namespace flashattn::cpu {

// Keys that are taken together: with their gradients, a band of rows and the scores of all pairs, they fill a
// second-level cache of 1 MB at head_dim 128.
constexpr int kBackwardKeys = 288;

// The rows' gradients are summed up tile by tile of keys, in the order of the keys: whoever has the next tile waits
// until the one before is in. So the sum has one order, whatever the number of threads.
class Turns {
 public:
  virtual void wait(int band, int turn) = 0;  // until `turn` tiles are in
  virtual void done(int band) = 0;

 protected:
  ~Turns() = default;
};

// Rows of one head that go by together, and the sum of their gradients so far.
struct RowBand {
  RowBlock block;
  float* query_gradient;  // (rows, padded_dim(head_dim)), without the scale
  int first_tile;         // of the tiles that some row sees ...
  int tile_count;         // ... so many; 0: no row sees anything
};

// Rows of float buffers are padded to whole vectors of the widest set.
constexpr int padded_dim(int dim) {
  return (dim + 15) / 16 * 16;
}

// One tile of keys of a key/value head, and all the bands of rows of that head.
struct KeyTile {
  int64_t batch;
  int kv_head;
  int index;  // of the head's tiles
  int begin, end;
  const RowBand* bands;
  int band_count;
};

}  // namespace flashattn::cpu
