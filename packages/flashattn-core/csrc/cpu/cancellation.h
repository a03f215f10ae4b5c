// The wish that calls end early, and what becomes of a call that does: NaN, never half a result or a plausible one.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <new>
#include <stdexcept>

#include "attention.h"

namespace flashattn::cpu {

// Calls share one, which AttentionArgs names. A call that still runs, or has not begun, `kGraceSeconds` after
// the first request ends at its next tile of keys; so what is short finishes as always.
class Cancellation {
 public:
  static constexpr double kGraceSeconds = 0.5;

  void request();  // may be called by a signal handler
  bool requested() const;
  bool due() const;

 private:
  std::atomic<int64_t> requested_at_{0};  // nanoseconds of CLOCK_MONOTONIC; 0: not requested
};

// What stop_if_cancelled() throws.
struct Cancelled {};

// Writes NaN to `rows` rows of `columns` elements, `stride` elements apart. `row_offset(row)`: where a row begins.
void fill_with_nan(Dtype dtype, void* data, int64_t rows, int columns, int64_t stride,
                   const std::function<int64_t(int64_t)>& row_offset);
// The same for a row-major array.
void fill_with_nan(Dtype dtype, void* data, int64_t rows, int columns);

// A call that does not come to its end, cancelled or failed, leaves NaN in all of its outputs: MLX may take them for
// computed.
template <typename Compute, typename LeaveNan>
void whole_or_nan(const Compute& compute, const LeaveNan& leave_nan) {
  try {
    compute();
  } catch (const Cancelled&) {
    leave_nan();
  } catch (const std::bad_alloc&) {
    leave_nan();
    throw std::runtime_error("[flash_attention] no memory for what the kernel works with");
  } catch (...) {
    leave_nan();
    throw;
  }
}

}  // namespace flashattn::cpu
