// The wish that calls end early, and what becomes of a call that does: NaN, never half a result or a plausible one.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <new>
#include <stdexcept>

#include "../call/dtype.h"

namespace flashattn::cpu {

// Calls that somebody waits for share one. It counts epochs: a new one begins when the one who waited has gone on. A
// request reaches the calls of its own epoch that still run, or have not begun, `kGraceSeconds` later: they end at
// their next tile of keys. What is short finishes as always, and so does what nobody waits for any more.
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

// A call's part in one.
struct Cancellable {
  const Cancellation* cancellation = nullptr;  // outlives the call; null: it runs to its end
  int64_t epoch = 0;

  bool due() const { return cancellation && cancellation->due(epoch); }
};

// Throws Cancelled if the call is to end early. Kernels ask before each tile of keys, a millisecond's work or so;
// pieces that have not begun then never begin, see parallel_for().
struct Cancelled {};
void stop_if(const Cancellable& cancellable);

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
    throw std::runtime_error("[flash_attention] no memory for the kernel's working arrays");
  } catch (...) {
    leave_nan();
    throw;
  }
}

}  // namespace flashattn::cpu
