// Runs the loops of roofline_loops.cpp on all threads, and times them.
#include "roofline.h"

#include <chrono>
#include <vector>

#include "kernels.h"
#include "threads.h"

namespace flashattn::cpu {
namespace {

// Pieces of work per thread. If the system interrupts a thread, the other threads take some of its pieces.
constexpr int64_t kPieces = 16;

template <typename Work>
double seconds(Work work) {
  auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

double peak_flops() {
  const RooflineLoops& loops = kernels().roofline;
  int64_t pieces = kPieces * num_threads();
  std::vector<float> results(pieces);  // stored, so that the compiler does not remove the work
  int64_t steps = 1000;
  const auto work = [&] { parallel_for(pieces, [&](int64_t i) { results[i] = loops.multiply_add(steps); }); };
  double time = seconds(work);
  for (constexpr double kEnough = 0.03; time < kEnough; time = seconds(work)) {
    steps = static_cast<int64_t>(static_cast<double>(steps) * 1.2 * kEnough / time) + 1;
  }
  return static_cast<double>(pieces * steps * loops.flops_per_step) / time;
}

double read_bandwidth() {
  const RooflineLoops& loops = kernels().roofline;
  constexpr int64_t kFloats = int64_t{64} << 20;
  std::vector<float> buffer(kFloats, 1.0f);
  int64_t pieces = kPieces * num_threads();
  int64_t piece = kFloats / pieces;
  std::vector<float> results(pieces);
  const auto work = [&] {
    parallel_for(pieces, [&](int64_t i) { results[i] = loops.read(buffer.data() + i * piece, piece); });
  };
  work();  // wakes the threads and fills the TLBs
  return static_cast<double>(pieces * piece * static_cast<int64_t>(sizeof(float))) / seconds(work);
}

}  // namespace flashattn::cpu
