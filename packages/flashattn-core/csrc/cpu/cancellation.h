// Ends calls early. A cancelled call leaves NaN in all of its outputs, so nobody can mistake them for a result.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <new>
#include <stdexcept>

#include "../call/dtype.h"

namespace flashattn::cpu {

// Cancels the calls that one thread waits for. Each call belongs to an epoch, and a new epoch begins when the thread
// stops waiting. A request cancels only calls of the current epoch. If such a call still runs kGraceSeconds after the
// request, it ends at its next tile of keys. Calls of earlier epochs run to their end, because nobody waits for them.
class Cancellation {
 public:
  static constexpr double kGraceSeconds = 0.5;

  void request();  // may be called by a signal handler
  void begin_epoch();
  int64_t epoch() const;
  bool due(int64_t epoch) const;

 private:
  std::atomic<int64_t> epoch_{0};
  std::atomic<int64_t> requested_at_{0};  // nanoseconds of CLOCK_MONOTONIC; 0: not requested
};

// A call's Cancellation, and the epoch that the call belongs to.
struct Cancellable {
  const Cancellation* cancellation = nullptr;  // outlives the call; if null, the call cannot be cancelled
  int64_t epoch = 0;
};

struct Cancelled {};

// Throws Cancelled if the call must end early. Kernels call stop_if() before each tile of keys, about once in a
// millisecond.
void stop_if(const Cancellable& cancellable);

// Writes NaN to `rows` rows of `columns` elements. A row begins at element row_offset(row), and its elements are
// `stride` apart.
void fill_with_nan(Dtype dtype, void* data, int64_t rows, int columns, int64_t stride,
                   const std::function<int64_t(int64_t)>& row_offset);
// Writes NaN to all elements of a row-major array (rows, columns).
void fill_with_nan(Dtype dtype, void* data, int64_t rows, int columns);

// Runs compute(). If it is cancelled or fails, leave_nan() fills all outputs with NaN, because MLX may use the outputs
// even then.
template <typename Compute, typename LeaveNan>
void whole_or_nan(const Compute& compute, const LeaveNan& leave_nan) {
  try {
    compute();
  } catch (const Cancelled&) {
    leave_nan();
  } catch (const std::bad_alloc&) {
    leave_nan();
    throw std::runtime_error("[flash_attention] no memory for the kernel's working arrays");
  } catch (...) {
    leave_nan();
    throw;
  }
}

}  // namespace flashattn::cpu
