// The tiles that a block has to compute, without those that its block map rules out. All threads list them in shared
// memory before the first tile.
#pragma once

#include "visibility.h"

namespace flashattn {

// Some queries of a head, or some keys: first to last.
struct Range {
  int first, last;

  // Returns part n, where each part has SIZE members. Parts after the last one are empty.
  template <int SIZE>
  FLASHATTN_FUNC Range part(int n) const {
    return Range{first + n * SIZE, minimum(first + (n + 1) * SIZE - 1, last)};
  }
};

// Returns the "or" of the block map's bytes, see call/block_map.h, for some queries of a head and some keys. QUERIES
// and KEYS are upper bounds of their numbers, as template arguments, so that all bytes are read at once. Both ranges
// begin at a multiple of their bound, or of 32.
template <int QUERIES, int KEYS>
FLASHATTN_FUNC int blocks_between(Visibility visibility, int head, Range queries, Range keys) {
  static_assert(QUERIES % kBlockSize == 0 || kBlockSize % QUERIES == 0, "blocks would be cut");
  static_assert(KEYS % kBlockSize == 0 || kBlockSize % KEYS == 0, "blocks would be cut");
  constexpr int kRows = (QUERIES + kBlockSize - 1) / kBlockSize, kColumns = (KEYS + kBlockSize - 1) / kBlockSize;
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

// A tile's number, and the block map's bits for the tile and each part of the block's rows.
struct ListedTile {
  static constexpr uint kEnd = ~0u;  // ends the list
  uint bits;

  FLASHATTN_FUNC bool exists() const { return bits != kEnd; }
  FLASHATTN_FUNC int tile() const { return bits & 0xffff; }
  FLASHATTN_FUNC bool shows(int part) const { return bits >> (16 + 2 * part) & kBlockShows; }
  FLASHATTN_FUNC bool changes(int part) const { return bits >> (16 + 2 * part) & kBlockChanges; }
};

// A list in shared memory: those of `count` tiles with a visible key, in their order, then an end mark.
struct TileList {
  uint* words;

  FLASHATTN_FUNC ListedTile operator[](int n) const { return ListedTile{words[n]}; }

  // All THREADS threads call it. blocks_of(tile, part): the block map's byte for one of PARTS parts of the rows.
  template <int THREADS, int PARTS, typename F>
  FLASHATTN_FUNC void find(int count, F blocks_of) const {
    static_assert(PARTS <= 8 && kBlockShows + kBlockChanges == 3, "two bits each");
    for (int tile = threadIdx.x; tile < count; tile += THREADS) {
      uint bits = tile;
      FLASHATTN_UNROLL
      for (int part = 0; part < PARTS; ++part) bits |= uint(blocks_of(tile, part)) << (16 + 2 * part);
      words[tile] = bits;
    }
    __syncthreads();
    if (threadIdx.x >= FLASHATTN_LANES) return;
    constexpr uint kShows = 0x55550000 * kBlockShows;  // for any part
    int lane = threadIdx.x, kept = 0;
    for (int first = 0; first < count; first += FLASHATTN_LANES) {
      uint bits = first + lane < count ? words[first + lane] : 0;
      uint shows = __ballot_sync(~0u, (bits & kShows) != 0);
      if ((bits & kShows) != 0) words[kept + __popc(shows & (1u << lane) - 1)] = bits;
      kept += __popc(shows);
      __syncwarp();
    }
    if (lane == 0) words[kept] = ListedTile::kEnd;
  }
};

// The tiles of keys that a block loops over, and what the warp's own queries see of them. PARTS: equal parts of the
// block's ROWS rows, each of which skips tiles on its own. KEYS: keys per tile.
template <int ROWS, int PARTS, int KEYS>
struct KeyTiles {
  static constexpr int kOwn = ROWS / PARTS;

  Visibility visibility;
  int own_part;
  KeySpan any;             // keys that some query of the block sees
  KeySpan own_all;         // keys that all of the warp's own queries see
  int origin, count;       // the first tile's first key, and how many tiles there are
  int own_begin, own_end;  // tiles of which, by the spans, an own query sees something
  int n = 0;               // how many tiles came before
  TileList list;
  ListedTile listed = {0};

  // queries: the block's. chunk: this block's number among `chunks` blocks that share the keys. list: used with a block
  // map; find() fills it.
  FLASHATTN_FUNC KeyTiles(Visibility visibility, Range queries, int own_part, TileList list, int chunk = 0,
                          int chunks = 1)
      : visibility(visibility), own_part(own_part), list(list) {
    any = visibility.seen_by_any(queries.first, queries.last);
    origin = any.begin / KEYS * KEYS;
    int all = any.begin < any.end ? (any.end - origin + KEYS - 1) / KEYS : 0, before = all * chunk / chunks;
    count = all * (chunk + 1) / chunks - before;
    origin += before * KEYS;
    Range own = queries.part<kOwn>(own_part);
    bool exists = own.first <= own.last;
    KeySpan own_any = exists ? visibility.seen_by_any(own.first, own.last) : KeySpan{0, 0};
    own_any = intersection(own_any, KeySpan{origin, origin + count * KEYS});
    own_all = exists ? visibility.open_to_all(own.first, own.last) : KeySpan{0, 0};
    bool sees = own_any.begin < own_any.end;
    own_begin = sees ? (own_any.begin - origin) / KEYS : 0;
    own_end = sees ? (own_any.end - origin + KEYS - 1) / KEYS : 0;
  }
  // All THREADS threads call it, and must synchronise afterwards.
  template <int THREADS>
  FLASHATTN_FUNC void find(int head, Range queries) const {
    if constexpr (has_block_map) {
      list.find<THREADS, PARTS>(count, [&](int tile, int part) {
        int key = origin + tile * KEYS;
        Range keys = {key, minimum(key + KEYS, visibility.params->key_len) - 1};
        return blocks_between<kOwn, KEYS>(visibility, head, queries.part<kOwn>(part), keys);
      });
    }
  }
  // Each thread calls it after find() and the synchronisation, when the list can be read.
  FLASHATTN_FUNC void begin() {
    if (has_block_map) listed = list[0];
  }

  FLASHATTN_FUNC int tile() const { return has_block_map ? listed.tile() : n; }
  FLASHATTN_FUNC int first() const { return origin + tile() * KEYS; }
  FLASHATTN_FUNC bool is_there() const { return has_block_map ? listed.exists() : n < count; }
  // Whether the own queries see any tile; with a block map, whether a tile is left.
  FLASHATTN_FUNC bool sees() const { return has_block_map ? is_there() : own_begin < own_end; }
  FLASHATTN_FUNC void next() {
    ++n;
    if (has_block_map && listed.exists()) listed = list[n];
  }
  // is_needed(): some own query sees a key of the tile. is_open(): all see all its keys, and no score is changed.
  FLASHATTN_FUNC bool is_needed() const {
    return own_begin <= tile() && tile() < own_end && (!has_block_map || listed.shows(own_part));
  }
  FLASHATTN_FUNC bool is_open() const {
    return own_all.contains(first(), KEYS) && !(has_block_map && listed.changes(own_part));
  }
};

}  // namespace flashattn
