// Finds the tiles over which a block of threads loops. If the call has a block map, the block first lists the visible
// tiles in shared memory.
#pragma once

#include "visibility.h"

namespace flashattn {

// A range of queries of a head, or of keys. The range includes `last`.
struct Range {
  int first, last;

  // Cuts the range into parts of SIZE members, and returns part n. A part that begins after `last` is empty.
  template <int SIZE>
  FLASHATTN_FUNC Range part(int n) const {
    return Range{first + n * SIZE, minimum(first + (n + 1) * SIZE - 1, last)};
  }
};

// Returns the bitwise OR of the block map's bytes (see call/block_map.h) for a range of queries of a head and a range
// of keys. `queries` has at most QUERIES members, and `keys` at most KEYS. Each range begins at a multiple of its
// own bound or of 32. The bounds are constants, so the compiler unrolls the loops and a thread loads all bytes at once.
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

// An entry of a TileList. The lower 16 bits are the tile's number. The upper 16 bits are flags (kBlockShows and
// kBlockChanges), two for each part of the block's rows.
struct ListedTile {
  static constexpr uint kEnd = ~0u;  // the last entry of the list
  uint bits;

  FLASHATTN_FUNC bool exists() const { return bits != kEnd; }
  FLASHATTN_FUNC int tile() const { return bits & 0xffff; }
  FLASHATTN_FUNC bool shows(int part) const { return bits >> (16 + 2 * part) & kBlockShows; }
  FLASHATTN_FUNC bool changes(int part) const { return bits >> (16 + 2 * part) & kBlockChanges; }
};

// A list of visible tiles in shared memory, in ascending order, followed by an end mark.
struct TileList {
  uint* words;

  FLASHATTN_FUNC ListedTile operator[](int n) const { return ListedTile{words[n]}; }

  // Lists those of `count` tiles that the block map does not hide. All THREADS threads must call it. The rows are
  // divided into PARTS parts: blocks_of(tile, part) returns the block map's flags for this tile and this part.
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
    constexpr uint kShows = 0x55550000 * kBlockShows;  // the flag kBlockShows of every part
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

// The tiles of keys that a block loops over. The block's ROWS queries are divided into PARTS equal parts. Each warp (or
// warpgroup) computes one part, its own queries, and skips tiles that none of them sees. KEYS: keys per tile.
template <int ROWS, int PARTS, int KEYS>
struct KeyTiles {
  static constexpr int kOwn = ROWS / PARTS;

  Visibility visibility;
  int own_part;
  KeySpan any;             // the keys that some query of the block sees
  KeySpan own_all;         // keys that no mask hides or changes for the own queries
  int origin, count;       // the first tile's first key, and how many tiles there are
  int own_begin, own_end;  // tiles in the own queries' spans: own_begin to own_end - 1
  int n = 0;               // how many tiles the loop has passed
  TileList list;
  ListedTile listed = {0};

  // queries: the block's queries. list: memory for the list that find() makes if there is a block map. `chunks` blocks
  // share the keys of these queries, and this block is number `chunk`.
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
    own_all = exists ? visibility.unmasked(own.first, own.last) : KeySpan{0, 0};
    bool sees = own_any.begin < own_any.end;
    own_begin = sees ? (own_any.begin - origin) / KEYS : 0;
    own_end = sees ? (own_any.end - origin + KEYS - 1) / KEYS : 0;
  }
  // Lists the visible tiles if there is a block map. All THREADS threads must call it, and then synchronise.
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
  // Moves to the first tile. Each thread calls it after find() and the synchronisation that follows.
  FLASHATTN_FUNC void begin() {
    if (has_block_map) listed = list[0];
  }

  FLASHATTN_FUNC int tile() const { return has_block_map ? listed.tile() : n; }
  FLASHATTN_FUNC int first() const { return origin + tile() * KEYS; }
  FLASHATTN_FUNC bool is_there() const { return has_block_map ? listed.exists() : n < count; }
  // With a block map: whether the loop has another tile. Without a block map: whether the own queries see any tile.
  FLASHATTN_FUNC bool sees() const { return has_block_map ? is_there() : own_begin < own_end; }
  FLASHATTN_FUNC void next() {
    ++n;
    if (has_block_map && listed.exists()) listed = list[n];
  }
  // Whether some own query sees a key of the current tile.
  FLASHATTN_FUNC bool is_needed() const {
    return own_begin <= tile() && tile() < own_end && (!has_block_map || listed.shows(own_part));
  }
  // Whether masks neither hide nor change any score of the own queries and the current tile's keys.
  FLASHATTN_FUNC bool is_unmasked() const {
    return own_all.contains(first(), KEYS) && !(has_block_map && listed.changes(own_part));
  }
};

}  // namespace flashattn
