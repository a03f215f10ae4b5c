// Fills outputs with NaN if a call fails, so that nobody mistakes them for a result.
#pragma once

#include <cstdint>
#include <functional>
#include <new>
#include <stdexcept>

#include "../call/dtype.h"

namespace flashattn::cpu {

// Writes NaN to `rows` rows of `columns` elements. A row begins at element row_offset(row), and its elements are
// `stride` apart.
void fill_with_nan(Dtype dtype, void* data, int64_t rows, int columns, int64_t stride,
                   const std::function<int64_t(int64_t)>& row_offset);
// Writes NaN to all elements of a row-major array (rows, columns).
void fill_with_nan(Dtype dtype, void* data, int64_t rows, int columns);

// Runs compute(). If it fails, leave_nan() fills all outputs with NaN, because MLX may use the outputs even then.
template <typename Compute, typename LeaveNan>
void whole_or_nan(const Compute& compute, const LeaveNan& leave_nan) {
  try {
    compute();
  } catch (const std::bad_alloc&) {
    leave_nan();
    throw std::runtime_error("[flash_attention] no memory for the kernel's working arrays");
  } catch (...) {
    leave_nan();
    throw;
  }
}

}  // namespace flashattn::cpu
