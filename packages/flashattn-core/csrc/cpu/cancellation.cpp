// Decides when a call must end early, and fills outputs with NaN.
#include "cancellation.h"

#include <algorithm>
#include <ctime>
#include <new>

#include "threads.h"

namespace flashattn::cpu {
namespace {

// The time of CLOCK_MONOTONIC in nanoseconds. Signal handlers may call now(), because they may call clock_gettime().
int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

template <typename Bits>
void fill(Bits nan, void* data, int64_t rows, int columns, int64_t stride,
          const std::function<int64_t(int64_t)>& row_offset) {
  const auto fill_rows = [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      Bits* element = static_cast<Bits*>(data) + row_offset(row);
      for (int c = 0; c < columns; ++c) element[c * stride] = nan;
    }
  };
  constexpr int64_t kRowsAtOnce = 256;
  try {
    parallel_for((rows + kRowsAtOnce - 1) / kRowsAtOnce,
                 [&](int64_t i) { fill_rows(i * kRowsAtOnce, std::min(rows, (i + 1) * kRowsAtOnce)); });
  } catch (const std::bad_alloc&) {  // parallel_for() needs memory, too, but fill_rows() needs none
    fill_rows(0, rows);
  }
}

}  // namespace

void Cancellation::request() {
  static_assert(decltype(requested_at_)::is_always_lock_free, "or a signal handler could wait for itself");
  int64_t not_yet = 0;
  requested_at_.compare_exchange_strong(not_yet, now(), std::memory_order_relaxed);
}

void Cancellation::begin_epoch() {
  // The request is cleared before the epoch changes, so that no call of the new epoch sees the old request.
  requested_at_.store(0, std::memory_order_seq_cst);
  epoch_.fetch_add(1, std::memory_order_seq_cst);
}

int64_t Cancellation::epoch() const {
  return epoch_.load(std::memory_order_relaxed);
}

bool Cancellation::due(int64_t epoch) const {
  int64_t requested_at = requested_at_.load(std::memory_order_seq_cst);
  return requested_at != 0 && epoch == epoch_.load(std::memory_order_seq_cst) &&
         static_cast<double>(now() - requested_at) >= kGraceSeconds * 1e9;
}

void stop_if(const Cancellable& cancellable) {
  if (cancellable.cancellation && cancellable.cancellation->due(cancellable.epoch)) {
    throw Cancelled();
  }
}

void fill_with_nan(Dtype dtype, void* data, int64_t rows, int columns, int64_t stride,
                   const std::function<int64_t(int64_t)>& row_offset) {
  switch (dtype) {
    case Dtype::float32: return fill<uint32_t>(0x7fc00000, data, rows, columns, stride, row_offset);
    case Dtype::float16: return fill<uint16_t>(0x7e00, data, rows, columns, stride, row_offset);
    case Dtype::bfloat16: return fill<uint16_t>(0x7fc0, data, rows, columns, stride, row_offset);
  }
}

void fill_with_nan(Dtype dtype, void* data, int64_t rows, int columns) {
  fill_with_nan(dtype, data, rows, columns, 1, [&](int64_t row) { return row * columns; });
}

}  // namespace flashattn::cpu
