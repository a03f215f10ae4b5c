// Computes the span of keys that the causal mask, the window and the key range leave visible to a query. Other masks
// may hide keys inside the span. Host code and CPU kernels use this file; GPU kernels have the same arithmetic in
// gpu/kernels/visibility.h.
//
// From one query to the next, neither end of the span moves back, except for empty spans. So the spans of the
// first and the last query of a block decide which tiles of keys the block skips.
#pragma once

#include "params.h"

namespace flashattn {

// Forces inlining. CPU kernels include this file and are compiled once per instruction set. The linker must not merge
// these copies of a function, because one of them may use AVX-512.
#define FLASHATTN_SPAN_FUNC static inline __attribute__((always_inline))

struct Span {
  int begin, end;  // empty when begin >= end
};

// The key range [start, stop) of a batch element. Either end may lie outside the keys.
struct KeyRange {
  int64_t start, stop;
};

// The span of keys that the query sees; {0, 0} if it sees none.
FLASHATTN_SPAN_FUNC Span seen_span(const AttentionParams& p, KeyRange range, int query) {
  int64_t begin = range.start > 0 ? range.start : 0;
  int64_t end = range.stop < p.key_len ? range.stop : p.key_len;
  int64_t diagonal = int64_t{query} + p.key_len - p.query_len;  // the key at the query's own position
  if (p.causal && diagonal + 1 < end) {
    end = diagonal + 1;
  }
  if (p.window > 0 && diagonal - p.window + 1 > begin) {
    begin = diagonal - p.window + 1;
  }
  if (begin >= end) {
    return {0, 0};
  }
  return {static_cast<int>(begin), static_cast<int>(end)};
}

// The first key that the window leaves visible to some query.
FLASHATTN_SPAN_FUNC int first_seen_key(const AttentionParams& p) {
  int64_t before_window = int64_t{p.key_len} - p.query_len - p.window + 1;
  return p.window > 0 && before_window > 0 ? static_cast<int>(before_window) : 0;
}

// The number of (query, key) pairs that the causal mask and the window leave visible.
FLASHATTN_SPAN_FUNC int64_t visible_pairs(bool causal, int window, int64_t query_len, int64_t key_len) {
  if (!causal && window == 0) return query_len * key_len;
  int64_t most = window > 0 && window < key_len ? window : key_len;  // the most keys that a query sees
  int64_t queries = query_len < key_len ? query_len : key_len;       // queries that see at least one key
  int64_t fewest = key_len - queries + 1, growing = most - fewest;   // growing: how many queries see less than `most`
  growing = growing < 0 ? 0 : growing < queries ? growing : queries;
  return growing * fewest + growing * (growing - 1) / 2 + (queries - growing) * most;
}

// Whether all blocks of queries see about equally many keys. A window prevents this, and so does a causal mask if there
// are fewer than four keys per query.
FLASHATTN_SPAN_FUNC bool sees_evenly(bool causal, int window, int query_len, int key_len) {
  return window == 0 && (!causal || key_len / 4 >= query_len);
}

}  // namespace flashattn
