// Tensors (*B, heads, rows, columns) with any layout in memory: dimensions in any order, with gaps, stored backwards,
// or broadcast.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "draw.h"
#include "element.h"

namespace flashattn::driver {

enum Dimension { kBatch, kHead, kRow, kColumn };

struct Layout {
  std::vector<Dimension> order;  // from the widest stride to the narrowest
  int gap = 0;                   // unused elements after each row, each head and so on
  std::vector<Dimension> backwards = {};
};
inline const Layout kRowMajor = {{kBatch, kHead, kRow, kColumn}};

inline Layout any_layout(Draw& draw) {
  static const std::vector<std::vector<Dimension>> orders = {{kBatch, kHead, kRow, kColumn},
                                                             {kBatch, kRow, kHead, kColumn},
                                                             {kBatch, kHead, kColumn, kRow},
                                                             {kRow, kBatch, kHead, kColumn},
                                                             {kHead, kRow, kColumn, kBatch}};
  Layout layout = {draw.pick(orders), draw.pick({0, 3})};
  for (Dimension dimension : {kBatch, kHead, kRow, kColumn}) {
    if (draw.chance(10)) layout.backwards.push_back(dimension);
  }
  return layout;
}

struct Tensor {
  std::vector<int> batch_shape;
  Strides strides = {};
  int64_t origin = 0;           // the position of element 0, 0, ...
  std::vector<double> numbers;  // in the order of memory, up to the last element; gaps hold NaN

  // A dimension of size 1 gets stride 0, so that calls can broadcast it to any size.
  Tensor(const std::vector<int>& batch, int heads, int rows, int columns, const Layout& layout) : batch_shape(batch) {
    int64_t size = 1, last = 0;
    bool empty = false;
    const auto place = [&](Dimension dimension, int extent, int64_t& stride) {
      bool backwards = std::count(layout.backwards.begin(), layout.backwards.end(), dimension) > 0;
      stride = extent == 1 ? 0 : backwards ? -size : size;
      last += (extent - 1) * std::abs(stride);
      origin -= backwards ? (extent - 1) * stride : 0;
      size *= extent;
      empty = empty || extent == 0;
    };
    for (size_t d = layout.order.size(); d-- > 0; size += layout.gap) {
      switch (layout.order[d]) {
        case kBatch:
          for (size_t b = batch.size(); b-- > 0;) place(kBatch, batch[b], strides.batch[b]);
          break;
        case kHead: place(kHead, heads, strides.head); break;
        case kRow: place(kRow, rows, strides.row); break;
        case kColumn: place(kColumn, columns, strides.column); break;
      }
    }
    if (empty) {
      strides = {}, origin = 0, last = -1;
    }
    numbers.assign(static_cast<size_t>(last + 1), kNaN);
  }

  size_t offset(int64_t batch, int head, int row, int column) const {
    int64_t offset = origin + head * strides.head + row * strides.row + column * strides.column;
    for (size_t d = batch_shape.size(); d-- > 0; batch /= batch_shape[d]) {
      offset += batch % batch_shape[d] * strides.batch[d];
    }
    return static_cast<size_t>(offset);
  }
  double& at(int64_t batch, int head, int row, int column) { return numbers[offset(batch, head, row, column)]; }
  double at(int64_t batch, int head, int row, int column) const { return numbers[offset(batch, head, row, column)]; }

  template <typename Write>
  std::vector<uint8_t> in_memory(size_t bytes, Write write) const {
    std::vector<uint8_t> memory(numbers.size() * bytes);
    for (size_t i = 0; i < numbers.size(); ++i) write(numbers[i], memory.data() + i * bytes);
    return memory;
  }
  std::vector<uint8_t> in_memory(Dtype dtype) const {
    return in_memory(format(dtype).bytes, [&](double x, uint8_t* to) { write_element(x, dtype, to); });
  }
  // The address of element 0, 0, ... in the memory that in_memory() returned.
  uint8_t* first(std::vector<uint8_t>& memory, size_t element_size) const {
    return memory.data() + origin * static_cast<int64_t>(element_size);
  }
};

}  // namespace flashattn::driver
