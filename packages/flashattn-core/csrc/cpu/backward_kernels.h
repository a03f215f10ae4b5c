// The types that the backward pass shares with its kernels, which are compiled once per instruction set.
#pragma once

#include "backward.h"
#include "kernels.h"

namespace flashattn::cpu {

// Makes tiles add their terms to a band's query gradients in the order of their keys. So the result does not depend on
// the number of threads.
class Turns {
 public:
  virtual void wait(int band, int turn) = 0;  // waits until `turn` of the band's tiles have added their terms
  virtual void done(int band) = 0;

 protected:
  ~Turns() = default;
};

// Rows of one key/value head that are computed together.
struct RowBand {
  RowBlock block;
  int first_tile;  // the first tile that some row sees
  int tile_count;  // number of tiles from first_tile to the last one that some row sees; 0 if no row sees a key
};

// One tile of keys of a key/value head, and all the bands of rows of that head.
struct KeyTile {
  int64_t batch;
  int kv_head;
  int index;  // among the head's tiles
  int begin, end;
  const RowBand* bands;
  int band_count;
  // The lower 16 bits of the float32 sums of query gradients, in query's shape; null if the gradients are float32.
  uint16_t* query_gradient_lower;
};

}  // namespace flashattn::cpu
