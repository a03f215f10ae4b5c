// Fills outputs with NaN.
#include "whole_or_nan.h"

#include <algorithm>
#include <new>

#include "threads.h"

namespace flashattn::cpu {
namespace {

template <typename Bits>
void fill(Bits nan, void* data, int64_t rows, int columns, int64_t stride,
          const std::function<int64_t(int64_t)>& row_offset) {
  const auto fill_rows = [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      Bits* element = static_cast<Bits*>(data) + row_offset(row);
      for (int c = 0; c < columns; ++c) element[c * stride] = nan;
    }
  };
  constexpr int64_t kRowsAtOnce = 256;
  try {
    parallel_for((rows + kRowsAtOnce - 1) / kRowsAtOnce,
                 [&](int64_t i) { fill_rows(i * kRowsAtOnce, std::min(rows, (i + 1) * kRowsAtOnce)); });
  } catch (const std::bad_alloc&) {  // parallel_for() needs memory, too, but fill_rows() needs none
    fill_rows(0, rows);
  }
}

}  // namespace

void fill_with_nan(Dtype dtype, void* data, int64_t rows, int columns, int64_t stride,
                   const std::function<int64_t(int64_t)>& row_offset) {
  switch (dtype) {
    case Dtype::float32: return fill<uint32_t>(0x7fc00000, data, rows, columns, stride, row_offset);
    case Dtype::float16: return fill<uint16_t>(0x7e00, data, rows, columns, stride, row_offset);
    case Dtype::bfloat16: return fill<uint16_t>(0x7fc0, data, rows, columns, stride, row_offset);
  }
}

void fill_with_nan(Dtype dtype, void* data, int64_t rows, int columns) {
  fill_with_nan(dtype, data, rows, columns, 1, [&](int64_t row) { return row * columns; });
}

}  // namespace flashattn::cpu
