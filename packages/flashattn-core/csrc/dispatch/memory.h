// Memory of a primitive's arrays.
#pragma once

#include <vector>

#include "mlx/array.h"
#include "mlx/stream.h"

namespace flashattn {

namespace mx = mlx::core;

// Of the stream's device. Throws std::runtime_error where there is none.
void allocate(std::vector<mx::array>& outputs, const mx::Stream& stream);

// Advises the system that the arrays are written from end to end.
void prefer_huge_pages(std::vector<mx::array>& arrays);

// Whether each array begins where an element can. A view of bytes may begin in the middle of one.
bool are_aligned(const std::vector<mx::array>& inputs, const mx::Stream& stream);
// The inputs, with copies, which the stream makes before its next job, of those that do not.
std::vector<mx::array> aligned_on_cpu(const std::vector<mx::array>& inputs, const mx::Stream& stream);
std::vector<mx::array> aligned_on_gpu(const std::vector<mx::array>& inputs, const mx::Stream& stream);

}  // namespace flashattn
