// Rows of keys or values as they lie in memory: elements of any stride, or MLX's affine quantisation, of which a few
// neighbours at a time become floats in registers.
#pragma once

#include "arguments.h"

namespace flashattn {

// In device or in threadgroup memory.
template <typename Pointer>
struct PlainRows {
  Pointer data;
  RowLayout layout;

  METAL_FUNC PlainRows from(int row) const thread { return PlainRows{data + layout.offset(row, 0), layout}; }

  // What a SIMD group reads of `count` rows together: nothing yet.
  METAL_FUNC PlainRows batch(int, int, uint) const thread { return *this; }

  METAL_FUNC float element(int row, int column) const thread { return float(data[layout.offset(row, column)]); }

  // COUNT neighbouring elements, the first a multiple of COUNT; 0 beyond `columns`, and in a row that does not exist.
  // WIDTH: `columns` rounded up to what the threads divide.
  template <int WIDTH, int COUNT, typename U>
  METAL_FUNC void load(thread U* target, int row, int first, int columns, bool exists) const thread {
    if (exists && (WIDTH == columns || first + COUNT <= columns)) {  // as one wide load, where rows are packed
      Pointer from = data + layout.offset(row, first);
      FLASHATTN_UNROLL
      for (int i = 0; i < COUNT; ++i) {
        target[i] = U(from[packed_rows ? i : i * layout.column]);
      }
    } else {
      FLASHATTN_UNROLL
      for (int i = 0; i < COUNT; ++i) {
        target[i] = exists && first + i < columns ? U(data[layout.offset(row, first + i)]) : U(0);
      }
    }
  }
};

struct QuantisedBatch;

// Element i of a row is scale * q + bias in float32: q the quant_bits bits from bit i * quant_bits on of the row's
// words, read as one little-endian number; scale and bias those of its group, i / group_size. A row is whole groups,
// of 32 or more: it fills its lanes and fragments.
struct QuantisedRows {
  const device uint* words;
  const device uchar* scales;  // of group_dtype
  const device uchar* biases;
  RowLayout word_layout, scale_layout, bias_layout;

  METAL_FUNC QuantisedRows from(int row) const thread {
    QuantisedRows rows = *this;
    rows.words += word_layout.offset(row, 0);
    rows.scales += scale_layout.offset(row, 0) * size_of_dtype(group_dtype);
    rows.biases += bias_layout.offset(row, 0) * size_of_dtype(group_dtype);
    return rows;
  }

  METAL_FUNC float element(int row, int column) const thread {
    float result;
    unpack<1>(&result, row, column, group(row, column));
    return result;
  }

  // As in PlainRows. COUNT: 4 or less.
  template <int WIDTH, int COUNT>
  METAL_FUNC void load(thread float* target, int row, int first, int, bool exists) const thread {
    if (exists) {
      unpack<COUNT>(target, row, first, group(row, first));
    } else {
      FLASHATTN_UNROLL
      for (int i = 0; i < COUNT; ++i) {
        target[i] = 0;
      }
    }
  }

  // Scale and bias of a column's group.
  METAL_FUNC float2 group(int row, int column) const thread {
    int index = column / group_size;
    return float2{load_float(scales, group_dtype, scale_layout.offset(row, index)),
                  load_float(biases, group_dtype, bias_layout.offset(row, index))};
  }

  // COUNT elements of one group; COUNT is 1, 2 or 4, and the column a multiple of it.
  template <int COUNT>
  METAL_FUNC void unpack(thread float* target, int row, int column, float2 scale_and_bias) const thread {
    uint bits = load_bits(row, uint(column * quant_bits), uint(COUNT * quant_bits));
    FLASHATTN_UNROLL
    for (int i = 0; i < COUNT; ++i) {
      uint q = bits >> (i * quant_bits) & ((1u << quant_bits) - 1);
      target[i] = metal::fma(scale_and_bias.x, float(q), scale_and_bias.y);
    }
  }

  METAL_FUNC QuantisedBatch batch(int count, int columns, uint lane) const thread;

 private:
  // `count` bits of a row from bit `first` on, the lowest of the result; above them there may be others. No byte is
  // read that has none of them: 16 and 32 bits are aligned, and all other counts that there are lie in three bytes.
  METAL_FUNC uint load_bits(int row, uint first, uint count) const thread {
    const device uchar* source = byte(row, first / 8);
    if (count == 32) {
      return *reinterpret_cast<const device uint*>(source);
    }
    if (count == 16) {
      return *reinterpret_cast<const device ushort*>(source);
    }
    uint bits = *source;
    FLASHATTN_UNROLL
    for (uint b = 1; b < 3; ++b) {
      if (first % 8 + count > b * 8) {
        bits |= uint(*byte(row, first / 8 + b)) << (b * 8);
      }
    }
    return bits >> (first % 8);
  }

  METAL_FUNC const device uchar* byte(int row, uint index) const thread {
    return reinterpret_cast<const device uchar*>(words + word_layout.offset(row, int(index / 4))) + index % 4;
  }
};

// A few rows that the lanes of a SIMD group read together: each scale and bias once, a lane has one of them.
struct QuantisedBatch {
  QuantisedRows rows;
  int groups;  // of a row
  float own;   // of row n, group g: in lane 2 * (n * groups + g) the scale, in the next one the bias

  // As in PlainRows. The SIMD group's lanes are all here, each with columns of its own.
  template <int WIDTH, int COUNT>
  METAL_FUNC void load(thread float* target, int row, int first, int, bool exists) const thread {
    constexpr int kAligned = COUNT & -COUNT;  // so many columns are in one group: groups are multiples of 32
    constexpr int kRun = kAligned < 4 ? kAligned : 4;
    FLASHATTN_UNROLL
    for (int i = 0; i < COUNT; i += kAligned) {
      int holder = exists ? 2 * (row * groups + (first + i) / group_size) : 0;
      float2 group = float2{metal::simd_shuffle(own, ushort(holder)), metal::simd_shuffle(own, ushort(holder + 1))};
      FLASHATTN_UNROLL
      for (int j = i; j < i + kAligned; j += kRun) {
        if (exists) {
          rows.unpack<kRun>(target + j, row, first + j, group);
        } else {
          FLASHATTN_UNROLL
          for (int r = j; r < j + kRun; ++r) {
            target[r] = 0;
          }
        }
      }
    }
  }
};

// `count` rows with 16 groups or fewer in all.
METAL_FUNC QuantisedBatch QuantisedRows::batch(int count, int columns, uint lane) const thread {
  int groups = columns / group_size;
  int row = int(lane) / 2 / groups, index = int(lane) / 2 % groups;
  bool has_scale = lane % 2 == 0;
  const device uchar* array = has_scale ? scales : biases;
  RowLayout layout = has_scale ? scale_layout : bias_layout;
  float own = row < count ? load_float(array, group_dtype, layout.offset(row, index)) : 0.0f;
  return QuantisedBatch{*this, groups, own};
}

// K, a kernel's template argument: the type of keys and values, or uint for quantised words. Element: what threadgroup
// memory holds of them.
template <typename K>
struct Stored {
  typedef K Element;
};
template <>
struct Stored<uint> {
  typedef float Element;  // 16 bits would round
};

// Keys or values of one key/value head.
template <typename T>
METAL_FUNC PlainRows<const device T*> rows_of(const device T* tensor, const constant AttentionParams& params,
                                              const constant Strides& strides, int batch, int head) {
  return PlainRows<const device T*>{head_of(tensor, params, strides, batch, head), row_layout(strides)};
}

template <typename T>
METAL_FUNC PlainRows<const device T*> stored_rows(const device T* tensor, const constant AttentionParams& params,
                                                  const constant Strides& strides, int batch, int head,
                                                  const constant QuantParams*, bool, const device uchar*,
                                                  const device uchar*) {
  return rows_of(tensor, params, strides, batch, head);
}
METAL_FUNC QuantisedRows stored_rows(const device uint* words, const constant AttentionParams& params,
                                     const constant Strides& strides, int batch, int head,
                                     const constant QuantParams* quant, bool are_keys, const device uchar* scales,
                                     const device uchar* biases) {
  const constant Strides& scale_strides = are_keys ? quant->key_scales : quant->value_scales;
  const constant Strides& bias_strides = are_keys ? quant->key_biases : quant->value_biases;
  int size = size_of_dtype(group_dtype);
  return QuantisedRows{head_of(words, params, strides, batch, head),
                       scales + (batch_offset(params, scale_strides, batch) + head * scale_strides.head) * size,
                       biases + (batch_offset(params, bias_strides, batch) + head * bias_strides.head) * size,
                       row_layout(strides),
                       RowLayout{scale_strides.row, scale_strides.column},
                       RowLayout{bias_strides.row, bias_strides.column}};
}

#define FLASHATTN_KEYS(batch, kv_head) \
  stored_rows(key, params, params.key, batch, kv_head, quant, true, key_scales, key_biases)
#define FLASHATTN_VALUES(batch, kv_head) \
  stored_rows(value, params, params.value, batch, kv_head, quant, false, value_scales, value_biases)

}  // namespace flashattn
