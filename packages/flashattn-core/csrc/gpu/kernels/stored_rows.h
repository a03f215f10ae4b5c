// Rows of keys or values as they are in memory: plain elements with any strides, or MLX's affine quantisation. A thread
// unpacks quantised elements to floats in registers, a few neighbours at a time.
#pragma once

#include "elements.h"
#include "offsets.h"

namespace flashattn {

// Rows in device or threadgroup memory.
template <typename Pointer>
struct PlainRows {
  Pointer data;
  RowLayout layout;

  FLASHATTN_FUNC PlainRows from(int row) const FLASHATTN_THREAD {
    return PlainRows{data + layout.offset(row, 0), layout};
  }

  // Does nothing. Kernels call batch() for both types of rows, and QuantisedRows::batch() reads scales and biases.
  FLASHATTN_FUNC PlainRows batch(int, int, uint) const FLASHATTN_THREAD { return *this; }

  FLASHATTN_FUNC float element(int row, int column) const FLASHATTN_THREAD {
    return float(data[layout.offset(row, column)]);
  }

  // Loads COUNT neighbouring elements, from `first` on. `first` must be a multiple of COUNT. Elements beyond `columns`,
  // and elements of a row that does not exist, are 0. WIDTH: `columns`, rounded up so that all threads load the same
  // number of elements.
  template <int WIDTH, int COUNT, typename U>
  FLASHATTN_FUNC void load(FLASHATTN_THREAD U* target, int row, int first, int columns,
                           bool exists) const FLASHATTN_THREAD {
    if (exists && (WIDTH == columns || first + COUNT <= columns)) {  // one wide load, if rows are packed
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

// Quantised rows. Element i of a row is scale * q + bias in float32, where q has quant_bits bits. The row's words form
// one little-endian number, in which q begins at bit i * quant_bits. scale and bias belong to group i / group_size. A
// group has 32 or more elements, so the elements that a lane loads together are always in one group, and none of them
// lies beyond the row's end.
struct QuantisedRows {
  const FLASHATTN_DEVICE uint* words;
  const FLASHATTN_DEVICE uchar* scales;  // their dtype is group_dtype
  const FLASHATTN_DEVICE uchar* biases;
  RowLayout word_layout, scale_layout, bias_layout;

  FLASHATTN_FUNC QuantisedRows from(int row) const FLASHATTN_THREAD {
    QuantisedRows rows = *this;
    rows.words += word_layout.offset(row, 0);
    rows.scales += scale_layout.offset(row, 0) * size_of_dtype(group_dtype);
    rows.biases += bias_layout.offset(row, 0) * size_of_dtype(group_dtype);
    return rows;
  }

  FLASHATTN_FUNC float element(int row, int column) const FLASHATTN_THREAD {
    float result;
    unpack<1>(&result, row, column, group(row, column));
    return result;
  }

  // Like PlainRows::load(), with a COUNT of at most 8.
  template <int WIDTH, int COUNT>
  FLASHATTN_FUNC void load(FLASHATTN_THREAD float* target, int row, int first, int,
                           bool exists) const FLASHATTN_THREAD {
    constexpr int kRun = COUNT < 4 ? COUNT : 4;
    if (exists) {
      float2 scale_and_bias = group(row, first);
      FLASHATTN_UNROLL
      for (int i = 0; i < COUNT; i += kRun) {
        unpack<kRun>(target + i, row, first + i, scale_and_bias);
      }
    } else {
      FLASHATTN_UNROLL
      for (int i = 0; i < COUNT; ++i) {
        target[i] = 0;
      }
    }
  }

  // Scale and bias of a column's group.
  FLASHATTN_FUNC float2 group(int row, int column) const FLASHATTN_THREAD {
    int index = column / group_size;
    return float2{load_float(scales, group_dtype, scale_layout.offset(row, index)),
                  load_float(biases, group_dtype, bias_layout.offset(row, index))};
  }

  // Unpacks COUNT elements of one group, from `column` on. `column` is a multiple of COUNT. COUNT is 1, 2 or 4.
  template <int COUNT>
  FLASHATTN_FUNC void unpack(FLASHATTN_THREAD float* target, int row, int column,
                             float2 scale_and_bias) const FLASHATTN_THREAD {
    uint bits = load_bits(row, uint(column * quant_bits), uint(COUNT * quant_bits));
    FLASHATTN_UNROLL
    for (int i = 0; i < COUNT; ++i) {
      uint q = bits >> (i * quant_bits) & ((1u << quant_bits) - 1);
      target[i] = multiply_add(scale_and_bias.x, float(q), scale_and_bias.y);
    }
  }

  FLASHATTN_FUNC QuantisedBatch batch(int count, int columns, uint lane) const FLASHATTN_THREAD;

 private:
  // Returns `count` bits of a row, from bit `first` on, in the lowest bits of the result. The result's other bits are
  // arbitrary. Reads only the bytes that have these bits. `first` must be a multiple of `count`. So 16 or 32 bits are
  // aligned in memory. All other counts that occur fit in three bytes.
  FLASHATTN_FUNC uint load_bits(int row, uint first, uint count) const FLASHATTN_THREAD {
    const FLASHATTN_DEVICE uchar* source = byte(row, first / 8);
    if (count == 32) {
      return *reinterpret_cast<const FLASHATTN_DEVICE uint*>(source);
    }
    if (count == 16) {
      return *reinterpret_cast<const FLASHATTN_DEVICE ushort*>(source);
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

  FLASHATTN_FUNC const FLASHATTN_DEVICE uchar* byte(int row, uint index) const FLASHATTN_THREAD {
    return reinterpret_cast<const FLASHATTN_DEVICE uchar*>(words + word_layout.offset(row, int(index / 4))) + index % 4;
  }
};

// A few quantised rows that the lanes of a SIMD group load together. Each scale and each bias is read by one lane.
struct QuantisedBatch {
  QuantisedRows rows;
  int groups;  // per row
  float own;   // lane 2 * (n * groups + g) has the scale of row n's group g, and the next lane has the bias

  // Like PlainRows::load(). All lanes of the SIMD group must call it, each for its own columns.
  template <int WIDTH, int COUNT>
  FLASHATTN_FUNC void load(FLASHATTN_THREAD float* target, int row, int first, int,
                           bool exists) const FLASHATTN_THREAD {
    constexpr int kAligned = COUNT & -COUNT;  // kAligned columns share a group, because kAligned divides group_size
    constexpr int kRun = kAligned < 4 ? kAligned : 4;
    FLASHATTN_UNROLL
    for (int i = 0; i < COUNT; i += kAligned) {
      int holder = exists ? 2 * (row * groups + (first + i) / group_size) : 0;
      float2 group = float2{FLASHATTN_LANE_VALUE(own, holder), FLASHATTN_LANE_VALUE(own, holder + 1)};
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

// Reads a batch of `count` rows. Together the rows may have at most 16 groups, because each group takes two lanes.
FLASHATTN_FUNC QuantisedBatch QuantisedRows::batch(int count, int columns, uint lane) const FLASHATTN_THREAD {
  int groups = columns / group_size;
  int row = int(lane) / 2 / groups, index = int(lane) / 2 % groups;
  bool has_scale = lane % 2 == 0;
  const FLASHATTN_DEVICE uchar* array = has_scale ? scales : biases;
  RowLayout layout = has_scale ? scale_layout : bias_layout;
  float own = row < count ? load_float(array, group_dtype, layout.offset(row, index)) : 0.0f;
  return QuantisedBatch{*this, groups, own};
}

// Plain keys or values of one key/value head.
template <typename T>
FLASHATTN_FUNC PlainRows<const FLASHATTN_DEVICE T*> rows_of(const FLASHATTN_DEVICE T* tensor,
                                                            FLASHATTN_UNIFORM AttentionParams& params,
                                                            FLASHATTN_UNIFORM Strides& strides, int batch, int head) {
  return PlainRows<const FLASHATTN_DEVICE T*>{head_of(tensor, params, strides, batch, head), row_layout(strides)};
}

// Quantised keys or values of one key/value head.
FLASHATTN_FUNC QuantisedRows quantised_rows(const FLASHATTN_DEVICE uint* words, const FLASHATTN_DEVICE uchar* scales,
                                            const FLASHATTN_DEVICE uchar* biases,
                                            FLASHATTN_UNIFORM AttentionParams& params,
                                            FLASHATTN_UNIFORM Strides& strides,
                                            FLASHATTN_UNIFORM Strides& scale_strides,
                                            FLASHATTN_UNIFORM Strides& bias_strides, int batch, int head) {
  int size = size_of_dtype(group_dtype);
  return QuantisedRows{head_of(words, params, strides, batch, head),
                       scales + (batch_offset(params, scale_strides, batch) + head * scale_strides.head) * size,
                       biases + (batch_offset(params, bias_strides, batch) + head * bias_strides.head) * size,
                       row_layout(strides),
                       RowLayout{scale_strides.row, scale_strides.column},
                       RowLayout{bias_strides.row, bias_strides.column}};
}

// K: the type of keys and values, or uint if they are quantised. Element: their type in threadgroup memory.
template <typename K>
struct Stored {
  typedef K Element;
};
template <>
struct Stored<uint> {
  typedef float Element;  // a 16-bit float would round the unpacked element
};

// A kernel's arguments for keys and values. Scales and biases exist only if keys and values are quantised.
template <typename K>
struct StoredInputs {
  const FLASHATTN_DEVICE K* key;
  const FLASHATTN_DEVICE K* value;
  FLASHATTN_GROUPS(FLASHATTN_FIELD)
};
#define FLASHATTN_STORED_INPUTS(K) (StoredInputs<K>{key, value, FLASHATTN_GROUPS(FLASHATTN_FIELD_VALUE)})

// The rows of one key/value head.
template <typename T>
FLASHATTN_FUNC PlainRows<const FLASHATTN_DEVICE T*> keys_of(StoredInputs<T> stored,
                                                            FLASHATTN_UNIFORM AttentionParams& params, int batch,
                                                            int head) {
  return rows_of(stored.key, params, params.key, batch, head);
}
template <typename T>
FLASHATTN_FUNC PlainRows<const FLASHATTN_DEVICE T*> values_of(StoredInputs<T> stored,
                                                              FLASHATTN_UNIFORM AttentionParams& params, int batch,
                                                              int head) {
  return rows_of(stored.value, params, params.value, batch, head);
}
FLASHATTN_FUNC QuantisedRows keys_of(StoredInputs<uint> stored, FLASHATTN_UNIFORM AttentionParams& params, int batch,
                                     int head) {
  return quantised_rows(stored.key, stored.key_scales, stored.key_biases, params, params.key, params.key_scales,
                        params.key_biases, batch, head);
}
FLASHATTN_FUNC QuantisedRows values_of(StoredInputs<uint> stored, FLASHATTN_UNIFORM AttentionParams& params, int batch,
                                       int head) {
  return quantised_rows(stored.value, stored.value_scales, stored.value_biases, params, params.value,
                        params.value_scales, params.value_biases, batch, head);
}

}  // namespace flashattn
