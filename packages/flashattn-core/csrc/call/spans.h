// The span of keys that causal, window and key range leave to a query, for the host and the CPU. GPU kernels have the
// same arithmetic in gpu/kernels/visibility.h. What hides keys inside of a span is each backend's.
//
// Both ends of a span never fall from one query to the next: which tiles are skipped follows from the first and the
// last query of a block.
#pragma once

#include "params.h"

namespace flashattn {

// In this file everything is inlined: the CPU kernels that include it are compiled once for each instruction set.
#define FLASHATTN_SPAN_FUNC static inline __attribute__((always_inline))

struct Span {
  int begin, end;  // empty when begin >= end
};

// The key range of a batch element: [start, stop), numbers of any size.
struct KeyRange {
  int64_t start, stop;
};

// Empty spans are {0, 0}.
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

// A window hides the keys before this one from every query. What cuts the keys of a decode step begins here.
FLASHATTN_SPAN_FUNC int first_seen_key(const AttentionParams& p) {
  int64_t before_window = int64_t{p.key_len} - p.query_len - p.window + 1;
  return p.window > 0 && before_window > 0 ? static_cast<int>(before_window) : 0;
}

// Whether blocks of queries see about as many keys as each other, and many: without a window, and under a causal mask
// beside at least four keys a query.
FLASHATTN_SPAN_FUNC bool sees_evenly(bool causal, int window, int query_len, int key_len) {
  return window == 0 && (!causal || key_len / 4 >= query_len);
}

}  // namespace flashattn
