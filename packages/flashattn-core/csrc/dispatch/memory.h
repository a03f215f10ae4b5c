// Allocates a primitive's arrays and aligns its inputs.
#pragma once

#include <vector>

#include "mlx/array.h"
#include "mlx/stream.h"

namespace flashattn {

namespace mx = mlx::core;

// Allocates memory on the stream's device. Throws std::runtime_error if there is not enough.
void allocate(std::vector<mx::array>& outputs, const mx::Stream& stream);

// Asks the system for huge pages for these arrays. Huge pages suit arrays that are written from end to end.
void prefer_huge_pages(std::vector<mx::array>& arrays);

// Replaces each input whose first byte is not aligned to its element size by a copy. The stream makes the copies before
// its next job.
std::vector<mx::array> aligned_on_cpu(std::vector<mx::array> inputs, const mx::Stream& stream);

}  // namespace flashattn
