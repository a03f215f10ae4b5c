// Matrix products in register tiles. They read the left operand element by element, and the right operand in vectors.
// The right operand is packed, or it is read in place and may have any storage type. dot() computes the scores of a few
// rows. It reads both operands in vectors along head_dim.
#pragma once

#include "dtype.h"
#include "simd.h"

namespace flashattn::cpu::FLASHATTN_ISA {

// A left operand: element (r, k) is data[r * row_stride + k * depth_stride].
struct Left {
  const float* data;
  int64_t row_stride, depth_stride;
};

// The elements of a row from some column on.
template <typename T>
struct Run {
  const T* data;
  FLASHATTN_INLINE_MEMBER vfloat at(int column) const { return load(data + column); }
};

// A right operand: element (k, c) is data[k * depth_stride + c]. Other types of right operand have the same members.
// Up to kRun elements of a row are read from one run, so that quantised rows load the scale of these elements once.
struct Right {
  const float* data;
  int64_t depth_stride;

  static constexpr int kRun = kWidth;
  FLASHATTN_INLINE_MEMBER Run<float> run(int64_t k, int64_t column) const { return {data + k * depth_stride + column}; }
  void prefetch(int64_t, int64_t) const {}  // a copy is in the second-level cache already
  FLASHATTN_INLINE_MEMBER void skip(int n) { data += n; }
};

// The index of element (k, column) in a packed (depth, columns) matrix. It consists of panels, one after the other.
// Each panel is kTileVectors vectors wide; the last one may be narrower.
FLASHATTN_INLINE int64_t packed_index(int64_t k, int column, int depth, int columns) {
  constexpr int kPanel = kTileVectors * kWidth;
  int first = column / kPanel * kPanel;
  return int64_t{first} * depth + k * smaller(kPanel, columns - first) + (column - first);
}

// A packed right operand: a (depth, columns) matrix, from row `first` and `column` on.
struct Packed {
  const float* data;
  int depth, columns, first, column = 0;

  static constexpr int kRun = kWidth;
  FLASHATTN_INLINE_MEMBER Run<float> run(int64_t k, int64_t c) const {
    return {data + packed_index(first + k, column, depth, columns) + c};
  }
  FLASHATTN_INLINE_MEMBER void skip(int n) { column += n; }
};

// A row-major result. If scale is null, the product replaces row r. Otherwise row r becomes row r * scale[r] + product.
struct Result {
  float* data;
  int64_t row_stride;
  const float* scale;
};

// Computes one register tile. All sums stay in registers.
template <int Rows, int Vectors, typename Operand>
FLASHATTN_INLINE void multiply_tile(Left left, Operand right, int depth, Result result) {
  static_assert((Vectors & (Vectors - 1)) == 0, "otherwise a run of a tile could reach into the next group");
  vfloat sum[Rows][Vectors] = {};
  for (int k = 0; k < depth; ++k) {
    vfloat row[Vectors];
#pragma GCC unroll 4
    for (int c = 0; c < Vectors; ++c) {
      constexpr int kRun = Operand::kRun;
      row[c] = right.run(k, c * kWidth / kRun * kRun).at(c * kWidth % kRun);
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      vfloat x = broadcast(left.data[r * left.row_stride + k * left.depth_stride]);
#pragma GCC unroll 4
      for (int c = 0; c < Vectors; ++c) {
        sum[r][c] += x * row[c];
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < Vectors; ++c) {
      float* target = result.data + r * result.row_stride + c * kWidth;
      store(target, result.scale ? load(target) * result.scale[r] + sum[r][c] : sum[r][c]);
    }
  }
}

// Calls visit(Count<n>{}) for the n from 1 to 8 that equals `count`.
template <int n>
struct Count {
  static constexpr int value = n;
};
template <typename Visit>
FLASHATTN_INLINE void with_count(int count, Visit visit) {
  switch (count) {
    case 1: return visit(Count<1>{});
    case 2: return visit(Count<2>{});
    case 3: return visit(Count<3>{});
    case 4: return visit(Count<4>{});
    case 5: return visit(Count<5>{});
    case 6: return visit(Count<6>{});
    case 7: return visit(Count<7>{});
    case 8: return visit(Count<8>{});
  }
}

// Computes `Rows` rows of the result, each `columns` (a multiple of kWidth) wide.
template <int Rows, typename Operand>
FLASHATTN_INLINE void multiply_rows(Left left, Operand right, int depth, int columns, Result result) {
  constexpr int kVectors = Rows <= kTileRows ? kTileVectors : kTileVectors / 2;
  const auto take = [&](auto vectors) {
    multiply_tile<Rows, vectors.value>(left, right, depth, result);
    right.skip(vectors.value * kWidth);
    result.data += vectors.value * kWidth;
    columns -= vectors.value * kWidth;
  };
  while (columns >= kVectors * kWidth) take(Count<kVectors>{});
  if (columns >= 2 * kWidth) take(Count<2>{});
  if (columns >= kWidth) take(Count<1>{});
}

// Multiplies left (rows, depth) by right (depth, columns), see Result. `columns` is a multiple of kWidth. A strip of
// the left operand stays in the first-level cache while it meets all columns. If it is row-major, the next strip is
// prefetched, because keys that are read in place may not be in the second-level cache.
template <typename Operand>
static void multiply(Left left, Operand right, int rows, int depth, int columns, Result result) {
  const auto take = [&](auto count) {
    const float* next = left.data + count.value * left.row_stride;
    for (int r = 0; left.depth_stride == 1 && r < smaller(count.value, rows - count.value); ++r) {
      for (int k = 0; k < depth; k += kLine / sizeof(float)) prefetch_line(next + r * left.row_stride + k);
    }
    multiply_rows<count.value>(left, right, depth, columns, result);
    left.data = next;
    result.data += count.value * result.row_stride;
    result.scale = result.scale ? result.scale + count.value : nullptr;
    rows -= count.value;
  };
  while (rows > kTileRows + 2) take(Count<kTileRows>{});
  if (rows == 8) take(Count<4>{});  // twice 4 rows and all vectors of a tile need fewer loads than 8 rows and half
  with_count(rows, take);
}

// The least power of two that is not less than n.
constexpr int power_of_two(int n) {
  int power = 1;
  while (power < n) power *= 2;
  return power;
}

// The most rows that dot() computes. For more rows multiply() is better, because the rows fill its vectors, and it
// needs no sums across a vector.
constexpr int kMaxDotRows = kWidth == 4 ? 2 : 8;

// The most heads of a group that a decode step computes with dot(), in one or two parts.
constexpr int kMaxDotHeads = kWidth == 4 ? 2 : 16;

// Writes the product of key j and row r to scores[j * kScoreStride + r]. The scores of kKeys keys fill a vector.
// `scores` needs room for whole vectors, even if key_count is not a multiple of kKeys. `queries` is row-major (Rows,
// depth), and depth is a multiple of kWidth.
//
// In a decode step this loop waits for memory. So it prefetches keys, kAhead keys ahead, and the `values` for the next
// product.
template <int Rows, typename Operand, typename Values>
static void dot_rows(Operand keys, Values values, int key_count, const float* queries, int depth, float* scores) {
  constexpr int kScoreStride = power_of_two(Rows);
  constexpr int kKeys = kWidth / kScoreStride;
  constexpr int kAhead = 16;
  for (int first = 0; first < key_count; first += kKeys) {
    int key[kKeys];
    for (int j = 0; j < kKeys; ++j) key[j] = smaller(first + j, key_count - 1);
    vfloat sum[kWidth] = {};
    constexpr int kRun = Operand::kRun;
    for (int begin = 0; begin < depth; begin += kRun) {
#pragma GCC unroll 8
      for (int i = 0; i < kRun; i += kWidth) {
        int d = begin + i;
        vfloat x[kKeys];
#pragma GCC unroll 16
        for (int j = 0; j < kKeys; ++j) {
          x[j] = keys.run(key[j], begin).at(i);
          keys.prefetch(first + j + kAhead, d);
          values.prefetch(first + j, d);
        }
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
          vfloat query = load(queries + r * depth + d);
#pragma GCC unroll 16
          for (int j = 0; j < kKeys; ++j) sum[j * kScoreStride + r] += x[j] * query;
        }
      }
    }
    store(scores + first * kScoreStride, sum_each(sum));
  }
}

template <typename Operand, typename Values>
static void dot(Operand keys, Values values, int key_count, const float* queries, int rows, int depth, float* scores) {
  with_count(rows, [&](auto n) {
    if constexpr (n.value <= kMaxDotRows) {
      dot_rows<n.value>(keys, values, key_count, queries, depth, scores);
    }
  });
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
