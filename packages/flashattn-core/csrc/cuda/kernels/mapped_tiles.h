// What the block map of a mask says of the tiles that come next: 32 of them are looked up at once, a lane each.
#pragma once

#include "visibility.h"

namespace flashattn {

// Bit n is of the n-th tile from `first` on.
struct MappedTiles {
  int first;
  uint shows;                   // to some row of the block
  uint own_shows, own_changes;  // for the warp's own rows

  // By all lanes of a warp. of_block(tile), of_own(tile): what Visibility::blocks() has for the tile that begins there;
  // `size` is a tile's. From `end` on there are none.
  template <int SIZE, typename F, typename G>
  FLASHATTN_FUNC void look_up(int begin, int end, F of_block, G of_own) {
    int tile = begin + int(threadIdx.x % FLASHATTN_LANES) * SIZE;
    int block = tile < end ? of_block(tile) : 0, own = tile < end ? of_own(tile) : 0;
    first = begin;
    shows = __ballot_sync(~0u, block & kBlockShows);
    own_shows = __ballot_sync(~0u, own & kBlockShows);
    own_changes = __ballot_sync(~0u, own & kBlockChanges);
  }

  // The first tile from `tile` on that shows something; `end` or beyond: there is none.
  template <int SIZE, typename F, typename G>
  FLASHATTN_FUNC int next(int tile, int end, F of_block, G of_own) {
    while (tile < end) {
      if (tile >= first + FLASHATTN_LANES * SIZE) look_up<SIZE>(tile, end, of_block, of_own);
      uint left = shows >> (tile - first) / SIZE;
      if (left != 0) return tile + (__ffs(left) - 1) * SIZE;
      tile = first + FLASHATTN_LANES * SIZE;
    }
    return tile;
  }

  template <int SIZE>
  FLASHATTN_FUNC bool own_bit(uint bits, int tile) const {
    return bits >> (tile - first) / SIZE & 1;
  }
};

// Queries of one head: a block's, or a warp's own.
struct QueryRange {
  int first, last;

  FLASHATTN_FUNC int count() const { return last - first + 1; }
};

// The tiles of keys that a block looks at, one after the other, and what they are to the warp's own queries. The block
// map hides some of them. All lanes of a warp call its functions.
template <int KEYS>
struct KeyTiles {
  Visibility visibility;
  int head;
  QueryRange block, own;
  KeySpan any;               // of the block
  KeySpan own_any, own_all;  // of the warp's own queries: without them nothing
  int first;                 // the tile's first key
  MappedTiles mapped;

  FLASHATTN_FUNC KeyTiles(Visibility visibility, int head, QueryRange block, QueryRange own)
      : visibility(visibility), head(head), block(block), own(own) {
    bool exists = own.first <= own.last;
    any = visibility.seen_by_any(block.first, block.last);
    own_any = exists ? visibility.seen_by_any(own.first, own.last) : KeySpan{0, 0};
    own_all = exists ? visibility.open_to_all(own.first, own.last) : KeySpan{0, 0};
    if (!has_block_map && (has_visible || has_bias)) own_all = KeySpan{0, 0};
    first = any.begin / KEYS * KEYS;
    if (has_block_map && is_there()) {
      look_up();
      skip();
    }
  }

  FLASHATTN_FUNC bool is_there() const { return first < any.end; }
  FLASHATTN_FUNC void next() {
    first += KEYS;
    if (has_block_map) skip();
  }
  // Whether some own query sees some of its keys; and whether all see all of them, and no score is changed.
  FLASHATTN_FUNC bool is_needed() const {
    return own_any.meets(first, KEYS) && (!has_block_map || mapped.own_bit<KEYS>(mapped.own_shows, first));
  }
  FLASHATTN_FUNC bool is_open() const {
    return own_all.contains(first, KEYS) && !(has_block_map && mapped.own_bit<KEYS>(mapped.own_changes, first));
  }

 private:
  FLASHATTN_FUNC auto of(QueryRange queries) const {
    return [=](int tile) { return visibility.blocks(head, 1, queries.first, queries.count(), tile, KEYS); };
  }
  FLASHATTN_FUNC void look_up() { mapped.look_up<KEYS>(first, any.end, of(block), of(own)); }
  FLASHATTN_FUNC void skip() { first = mapped.next<KEYS>(first, any.end, of(block), of(own)); }
};

}  // namespace flashattn
