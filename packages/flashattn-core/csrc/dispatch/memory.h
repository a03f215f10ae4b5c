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

// A view of bytes may begin in the middle of an element. aligned_on_cpu() returns the inputs with copies in place of
// such views, which the stream makes before its next job. require_aligned() throws std::invalid_argument.
std::vector<mx::array> aligned_on_cpu(std::vector<mx::array> inputs, const mx::Stream& stream);
void require_aligned(const std::vector<mx::array>& inputs, const mx::Stream& stream);

}  // namespace flashattn
