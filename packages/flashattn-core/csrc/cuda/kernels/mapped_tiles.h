// What the block map of a mask says of the tiles that come next: 32 of them are looked up at once, a lane each.
#pragma once

#include "visibility.h"

namespace flashattn {

// Bit n is of tile `first` + n.
struct MappedTiles {
  int first;
  uint shows;                   // to some row of the block
  uint own_shows, own_changes;  // for the warp's own rows

  // The first tile from `tile` on that shows something; `count`: there is none. By all lanes of a warp. of_block(tile),
  // of_own(tile): what Visibility::blocks() has for it.
  template <typename F, typename G>
  FLASHATTN_FUNC int next(int tile, int count, F of_block, G of_own) {
    while (tile < count) {
      if (tile >= first + FLASHATTN_LANES) look_up(tile, count, of_block, of_own);
      uint left = shows >> (tile - first);
      if (left != 0) return tile + __ffs(left) - 1;
      tile = first + FLASHATTN_LANES;
    }
    return count;
  }
  FLASHATTN_FUNC bool bit(uint bits, int tile) const { return bits >> (tile - first) & 1; }

 private:
  template <typename F, typename G>
  FLASHATTN_FUNC void look_up(int begin, int count, F of_block, G of_own) {
    int tile = begin + int(threadIdx.x % FLASHATTN_LANES);
    int block = tile < count ? of_block(tile) : 0, own = tile < count ? of_own(tile) : 0;
    first = begin;
    shows = __ballot_sync(~0u, block & kBlockShows);
    own_shows = __ballot_sync(~0u, own & kBlockShows);
    own_changes = __ballot_sync(~0u, own & kBlockChanges);
  }
};

// Queries of one head: a block's, or a warp's own. Or keys.
struct Range {
  int first, last;
};

// What arrays do between some queries of a head and some keys, as call/block_map.h has it. At most so many QUERIES and
// KEYS, whose number is known here so that all blocks are read at once: each by itself would take a trip to memory.
template <int QUERIES, int KEYS>
FLASHATTN_FUNC int blocks_between(Visibility visibility, int head, Range queries, Range keys) {
  constexpr int kRows = (QUERIES + 2 * kBlockSize - 2) / kBlockSize,
                kColumns = (KEYS + 2 * kBlockSize - 2) / kBlockSize;
  if (queries.first > queries.last || keys.first > keys.last) return 0;
  const Strides& strides = visibility.params->block_map;
  const uchar* map = visibility.inputs.block_map + head * strides.head;
  int found = 0;
  FLASHATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const uchar* row = map + minimum(queries.first / kBlockSize + r, queries.last / kBlockSize) * strides.row;
    FLASHATTN_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      found |= row[minimum(keys.first / kBlockSize + c, keys.last / kBlockSize) * strides.column];
    }
  }
  return found;
}

// The tiles of keys that a block looks at, one after the other, and what they are to the warp's own queries. The block
// map hides some of them. All lanes of a warp call its functions.
// ROWS: how many queries a block has at most. KEYS: of a tile.
template <int ROWS, int KEYS>
struct KeyTiles {
  Visibility visibility;
  int head;
  Range block, own;
  KeySpan any;             // of the block
  KeySpan own_all;         // of the warp's own queries
  int origin, count;       // the first tile's first key, and how many tiles there are, hidden or not
  int own_begin, own_end;  // tiles that an own query sees something of, by the spans
  int n = 0;               // how many tiles came before
  int mapped_tile = 0;     // with a block map: how many tiles from the origin on, hidden or not
  MappedTiles mapped;

  // chunk: of `chunks` blocks that share the keys, which one this is.
  FLASHATTN_FUNC KeyTiles(Visibility visibility, int head, Range block, Range own, int chunk = 0, int chunks = 1)
      : visibility(visibility), head(head), block(block), own(own) {
    any = visibility.seen_by_any(block.first, block.last);
    origin = any.begin / KEYS * KEYS;
    int all = any.begin < any.end ? (any.end - origin + KEYS - 1) / KEYS : 0, before = all * chunk / chunks;
    count = all * (chunk + 1) / chunks - before;
    origin += before * KEYS;
    bool exists = own.first <= own.last;
    KeySpan own_any = exists ? visibility.seen_by_any(own.first, own.last) : KeySpan{0, 0};
    own_any = intersection(own_any, KeySpan{origin, origin + count * KEYS});
    own_all = exists ? visibility.open_to_all(own.first, own.last) : KeySpan{0, 0};
    bool sees = own_any.begin < own_any.end;
    own_begin = sees ? (own_any.begin - origin) / KEYS : 0;
    own_end = sees ? (own_any.end - origin + KEYS - 1) / KEYS : 0;
    if (has_block_map) {
      mapped.first = -FLASHATTN_LANES;
      skip();
    }
  }

  FLASHATTN_FUNC int tile() const { return has_block_map ? mapped_tile : n; }
  FLASHATTN_FUNC int first() const { return origin + tile() * KEYS; }
  FLASHATTN_FUNC bool is_there() const { return tile() < count; }
  // Whether the own queries see a tile. With a block map: whether there is one.
  FLASHATTN_FUNC bool sees() const { return has_block_map ? is_there() : own_begin < own_end; }
  FLASHATTN_FUNC void next() {
    ++n;
    if (has_block_map) {
      ++mapped_tile;
      skip();
    }
  }
  // Whether some own query sees some of its keys; and whether all see all of them, and no score is changed.
  FLASHATTN_FUNC bool is_needed() const {
    return own_begin <= tile() && tile() < own_end && (!has_block_map || mapped.bit(mapped.own_shows, mapped_tile));
  }
  FLASHATTN_FUNC bool is_open() const {
    return own_all.contains(first(), KEYS) && !(has_block_map && mapped.bit(mapped.own_changes, mapped_tile));
  }

 private:
  FLASHATTN_FUNC int blocks(Range queries, int tile) const {
    int key = origin + tile * KEYS, end = minimum(key + KEYS, visibility.params->key_len);
    return blocks_between<ROWS, KEYS>(visibility, head, queries, {key, end - 1});
  }
  FLASHATTN_FUNC void skip() {
    mapped_tile = mapped.next(
        mapped_tile, count, [this](int tile) { return blocks(block, tile); },
        [this](int tile) { return blocks(own, tile); });
  }
};

}  // namespace flashattn
