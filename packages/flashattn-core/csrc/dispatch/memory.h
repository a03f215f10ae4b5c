// Allocation and alignment of a primitive's arrays.
#pragma once

#include <vector>

#include "mlx/array.h"
#include "mlx/stream.h"

namespace flashattn {

namespace mx = mlx::core;

// Allocates memory on the stream's device. Throws std::runtime_error if there is none.
void allocate(std::vector<mx::array>& outputs, const mx::Stream& stream);

// Asks the system for huge pages, which suit arrays that are written from end to end.
void prefer_huge_pages(std::vector<mx::array>& arrays);

// Whether each array begins at a multiple of its element size. A view of bytes may begin in the middle of an element.
bool are_aligned(const std::vector<mx::array>& inputs, const mx::Stream& stream);
// The inputs, with aligned copies in place of unaligned ones. The stream makes the copies before its next job.
std::vector<mx::array> aligned_on_cpu(const std::vector<mx::array>& inputs, const mx::Stream& stream);
std::vector<mx::array> aligned_on_gpu(const std::vector<mx::array>& inputs, const mx::Stream& stream);

}  // namespace flashattn
