// The keys or values of a tile: PlainRows have any storage type and any strides, QuantisedRows are quantised. Products
// can read keys and values in place if in_place() is true. Otherwise a tile is copied to floats, once for all rows of a
// block.
#pragma once

#include "dtype.h"
#include "forward.h"
#include "quantised.h"
#include "rows.h"

namespace flashattn::cpu::FLASHATTN_ISA {

// Elements of one group, from column `first` of a row on.
template <int Bits>
struct QuantisedRun {
  const uint8_t* row;
  int first;
  float scale, bias;
  FLASHATTN_INLINE_MEMBER vfloat at(int column) const { return dequantise<Bits>(row, first + column, scale, bias); }
};

template <typename T>
struct PlainRows {
  const T* data;
  int64_t row_stride, column_stride;
  int columns;

  // Whether products can read whole vectors up to `padded` columns.
  bool in_place(int padded) const { return column_stride == 1 && columns == padded; }
  // The address of the rows if they are floats with adjacent columns, otherwise null.
  const float* floats() const {
    return sizeof(T) == sizeof(float) && column_stride == 1 ? reinterpret_cast<const float*>(data) : nullptr;
  }
  PlainRows from(int row) const { return {data + row * row_stride, row_stride, column_stride, columns}; }
  float element(int row, int column) const { return to_float(data[row * row_stride + column * column_stride]); }
  // kWidth elements from `column` on; 0 past the row's end.
  FLASHATTN_INLINE_MEMBER vfloat part(int row, int column) const {
    return load_part(data + row * row_stride, column_stride, column, columns);
  }

  // The members of a right operand, see matmul.h. The functions may be called only if in_place() is true.
  static constexpr int kRun = kWidth;
  FLASHATTN_INLINE_MEMBER Run<T> run(int64_t row, int64_t column) const { return {data + row * row_stride + column}; }
  FLASHATTN_INLINE_MEMBER void prefetch(int64_t row, int64_t column) const {
    if (column % (kLine / sizeof(T)) == 0) prefetch_line(data + row * row_stride + column);
  }
  FLASHATTN_INLINE_MEMBER void skip(int n) { data += n; }
};

// Quantised rows. A row has groups of at least 32 elements, so it consists of whole vectors.
template <int Bits>
struct QuantisedRows {
  const uint8_t* data;
  int64_t row_stride;            // in bytes
  const float *scales, *biases;  // (rows, groups_per_row)
  int groups_per_row, group_shift;
  int first_column = 0;

  bool in_place(int) const { return true; }
  const float* floats() const { return nullptr; }
  QuantisedRows from(int row) const {
    int first = row * groups_per_row;
    return {data + row * row_stride, row_stride, scales + first, biases + first, groups_per_row, group_shift};
  }
  float element(int row, int column) const { return part(row, column / kWidth * kWidth)[column % kWidth]; }
  FLASHATTN_INLINE_MEMBER vfloat part(int row, int column) const { return run(row, column).at(0); }

  static constexpr int kRun = 32;
  FLASHATTN_INLINE_MEMBER QuantisedRun<Bits> run(int64_t row, int64_t column) const {
    int first = first_column + static_cast<int>(column);
    int64_t group = row * groups_per_row + (first >> group_shift);
    return {data + row * row_stride, first, scales[group], biases[group]};
  }
  FLASHATTN_INLINE_MEMBER void prefetch(int64_t row, int64_t column) const {
    if (column * Bits % (8 * kLine) < kWidth * Bits) prefetch_line(data + row * row_stride + column * Bits / 8);
  }
  FLASHATTN_INLINE_MEMBER void skip(int n) { first_column += n; }
};

// The three arrays of quantised keys, or of quantised values, with any strides.
struct QuantisedTensor {
  const void *words, *scales, *biases;
  const Strides &word_strides, &scale_strides, &bias_strides;
};

// Converts the tile's scales and biases to floats in `store`. Reads words in place if the words of a row are adjacent.
// Otherwise copies them to `store`, after the scales and biases.
template <int Bits>
static QuantisedRows<Bits> quantised_rows(float* store, const AttentionArgs& args, const RowBlock& block, Span tile,
                                          int dim, const QuantisedTensor& tensor) {
  const Strides& words = tensor.word_strides;
  int groups = dim / args.params.group_size, count = tile.end - tile.begin;
  with_dtype(args.group_dtype, [&](auto type) {
    using T = decltype(type);
    const auto convert = [&](float* target, const void* data, const Strides& strides) {
      const T* source = key_row<T>(args, block, data, strides, tile.begin);
      bool adjacent = strides.row == groups && (groups == 1 || strides.column == 1);  // all rows are one long row
      int columns = adjacent ? count * groups : groups;
      for (int j = 0; j < (adjacent ? 1 : count); ++j) {
        for (int c = 0; c < columns; c += kWidth) {
          vfloat part = load_part(source + j * strides.row, adjacent ? 1 : strides.column, c, columns);
          store_part(target + j * columns, 1, c, columns, part);
        }
      }
    };
    convert(store, tensor.scales, tensor.scale_strides);
    convert(store + count * groups, tensor.biases, tensor.bias_strides);
  });
  QuantisedRows<Bits> rows = {
      nullptr, 0, store, store + count * groups, groups, __builtin_ctz(static_cast<unsigned>(args.params.group_size))};
  const uint32_t* first = key_row<uint32_t>(args, block, tensor.words, words, tile.begin);
  int words_per_row = dim * Bits / 32;
  if (words.column == 1 || words_per_row == 1) {
    rows.data = reinterpret_cast<const uint8_t*>(first);
    rows.row_stride = words.row * 4;
    return rows;
  }
  uint8_t* copy = reinterpret_cast<uint8_t*>(store + 2 * int64_t{count} * groups);
  rows.data = copy;
  rows.row_stride = int64_t{words_per_row} * 4;
  for (int j = 0; j < count; ++j) {
    for (int w = 0; w < words_per_row; ++w, copy += 4) {
      __builtin_memcpy(copy, first + j * words.row + w * words.column, 4);
    }
  }
  return rows;
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
