// Tensors (*B, heads, rows, columns) in any order, with gaps, or broadcast.
#pragma once

#include <cstdint>
#include <vector>

#include "draw.h"
#include "element.h"

namespace flashattn::driver {

enum Dimension { kHead, kRow, kColumn };

struct Tensor {
  std::vector<int> batch_shape;
  Strides strides = {};
  std::vector<double> numbers;  // at the strides' positions; NaN in the gaps

  // An extent of 1 where the case has more is broadcast: stride 0. `order` from the widest stride to the narrowest.
  Tensor(const std::vector<int>& batch, int heads, int rows, int columns, const std::vector<Dimension>& order, int gap)
      : batch_shape(batch) {
    int64_t size = 1;
    const auto place = [&](int extent) {
      int64_t stride = extent == 1 ? 0 : size;
      size *= extent;
      return stride;
    };
    for (size_t d = order.size(); d-- > 0; size += gap) {
      switch (order[d]) {
        case kHead: strides.head = place(heads); break;
        case kRow: strides.row = place(rows); break;
        case kColumn: strides.column = place(columns); break;
      }
    }
    for (size_t d = batch.size(); d-- > 0;) strides.batch[d] = place(batch[d]);
    numbers.assign(static_cast<size_t>(size), kNaN);
  }

  size_t offset(int64_t batch, int head, int row, int column) const {
    int64_t offset = head * strides.head + row * strides.row + column * strides.column;
    for (size_t d = batch_shape.size(); d-- > 0; batch /= batch_shape[d]) {
      offset += batch % batch_shape[d] * strides.batch[d];
    }
    return static_cast<size_t>(offset);
  }
  double& at(int64_t batch, int head, int row, int column) { return numbers[offset(batch, head, row, column)]; }
  double at(int64_t batch, int head, int row, int column) const { return numbers[offset(batch, head, row, column)]; }

  std::vector<uint8_t> in_memory(cpu::Dtype dtype) const {
    std::vector<uint8_t> memory(numbers.size() * format(dtype).bytes);
    for (size_t i = 0; i < numbers.size(); ++i) {
      write_element(numbers[i], dtype, memory.data() + i * format(dtype).bytes);
    }
    return memory;
  }
};

inline const std::vector<Dimension>& any_order(Draw& draw) {
  static const std::vector<Dimension> orders[] = {
      {kHead, kRow, kColumn}, {kRow, kHead, kColumn}, {kHead, kColumn, kRow}};
  return orders[draw.below(3)];
}

}  // namespace flashattn::driver
