// Tests that exp2 and tanh are as accurate as simd.h promises. There is a program for each instruction set, because the
// functions round differently with and without fused multiply-adds.
#include <cfloat>
#include <cmath>
#include <cstdio>

#include "simd.h"

using namespace flashattn::cpu::FLASHATTN_ISA;

namespace {

constexpr int kPoints = 1 << 20;

int failures = 0;

void expect(bool holds, const char* what) {
  if (!holds) {
    std::printf("does not hold: %s\n", what);
    ++failures;
  }
}

vfloat vector_exp2(vfloat x) {
  return exp2(x);
}
vfloat vector_tanh(vfloat x) {
  return tanh(x);
}

// The largest relative error at point(0) ... point(kPoints - 1).
template <typename Point>
double relative_error(vfloat (*function)(vfloat), double (*exact)(double), Point point) {
  double worst = 0;
  for (int i = 0; i < kPoints; i += kWidth) {
    float x[kWidth], y[kWidth];
    for (int lane = 0; lane < kWidth; ++lane) x[lane] = point(i + lane);
    store(y, function(load(x)));
    for (int lane = 0; lane < kWidth; ++lane) {
      double expected = exact(double(x[lane]));
      double error = std::abs(double(y[lane]) - expected) / std::abs(expected);
      worst = std::isnan(worst) || error <= worst ? worst : error;  // once NaN, it stays NaN
    }
  }
  return worst;
}

}  // namespace

int main() {
  // The divisor is kPoints + 1, so that the distance between points is no power of two. With such a distance the points
  // cover all of the polynomials' ranges.
  const auto part = [](int i) { return float(i + 1) / (kPoints + 1); };
  const auto sign = [](int i) { return i % 2 ? -1.0f : 1.0f; };
  double exp2_error = relative_error(vector_exp2, std::exp2, [&](int i) { return -126 * part(i); });
  double tanh_error = relative_error(vector_tanh, std::tanh, [&](int i) { return sign(i) * 12 * part(i); });
  double tanh_error_near_0 =
      relative_error(vector_tanh, std::tanh, [&](int i) { return sign(i) * std::exp2(-120 * part(i)); });

  expect(exp2_error < 1.3e-7, "exp2: relative error below 1.3e-7 from -126 to 0");
  expect(exp2(0.0f) == 1 && exp2(-126.0f) == 0x1p-126f, "exp2: exact at 0 and -126");
  expect(exp2(-127.0f) == 0 && exp2(-FLT_MAX) == 0 && exp2(-kInfinity) == 0, "exp2: 0 far below");
  expect(std::isnan(exp2(NAN)), "exp2: NaN stays NaN");
  expect(tanh_error < 3e-7 && tanh_error_near_0 < 3e-7, "tanh: relative error below 3e-7");
  expect(tanh(broadcast(FLT_MAX))[0] == 1 && tanh(broadcast(-kInfinity))[0] == -1, "tanh: 1 and -1 far out");
  expect(std::isnan(tanh(broadcast(NAN))[0]), "tanh: NaN stays NaN");
  std::printf(FLASHATTN_ISA_NAME ": relative error of exp2 %.2g, of tanh %.2g\n", exp2_error,
              std::fmax(tanh_error, tanh_error_near_0));
  return failures;
}
