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

// Rows of one head that go by together.
struct RowBand {
  RowBlock block;
  int first_tile;  // of the tiles that some row sees ...
  int tile_count;  // ... so many; 0: no row sees anything
};

// One tile of keys of a key/value head, and all the bands of rows of that head.
struct KeyTile {
  int64_t batch;
  int kv_head;
  int index;  // of the head's tiles
  int begin, end;
  const RowBand* bands;
  int band_count;
  // Lower halves of the sums of gradients so far, in query's shape. Of 16-bit gradients, else null.
  uint16_t* query_gradient_lower;
};

}  // namespace flashattn::cpu
