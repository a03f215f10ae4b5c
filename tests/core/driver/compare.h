// Compares results with the plain formula in float64.
//
// The allowed error is a sum of three terms: twice the largest error of the plain formula in float32, 1e-5, and half a
// unit in the last place of the output's dtype. No more is needed for 16-bit results, because the kernels compute
// them in float32, from the same rounded inputs as the formula. `relative` allows more.
#pragma once

#include <cstdio>
#include <string>

#include "call.h"

namespace flashattn::driver {

struct Check {
  std::string failure = "";                 // the first failure
  double worst = 0;                         // largest error / allowed error; above 1 a result is wrong
  uint64_t checksum = 0xcbf29ce484222325u;  // FNV-1a hash of all results

  void compare(const char* what, const Result& result, const std::vector<double>& truth,
               const std::vector<double>& unfused, Dtype dtype, double relative = 0) {
    if (!result.gaps_untouched() && failure.empty()) {
      failure = std::string("wrote between the elements of ") + what;
    }
    std::vector<double> got = result.numbers();
    add_to_checksum(got);
    double unfused_error = 0;
    for (size_t i = 0; i < truth.size(); ++i) {
      if (std::isfinite(truth[i])) unfused_error = std::max(unfused_error, std::abs(unfused[i] - truth[i]));
    }
    for (size_t i = 0; i < truth.size(); ++i) {
      double share;
      if (std::isfinite(truth[i])) {
        double beyond_rounding = std::abs(got[i] - truth[i]) - last_place(truth[i], dtype) / 2;
        share = std::max(beyond_rounding, 0.0) / (2 * unfused_error + 1e-5 + relative * std::abs(truth[i]));
        if (std::isnan(got[i])) share = kInf;
      } else {
        share = got[i] == truth[i] || (std::isnan(got[i]) && std::isnan(truth[i])) ? 0 : kInf;
      }
      worst = std::max(worst, share);
      if (!(share <= 1) && failure.empty()) {
        char text[160];
        std::snprintf(text, sizeof(text), "%s[%zu] is %.9g, expected %.9g; unfused in float32 errs by %.2g", what, i,
                      got[i], truth[i], unfused_error);
        failure = text;
      }
    }
  }

 private:
  void add_to_checksum(const std::vector<double>& numbers) {
    for (double x : numbers) {
      uint8_t bytes[sizeof(x)];
      std::memcpy(bytes, &x, sizeof(x));
      for (uint8_t byte : bytes) checksum = (checksum ^ byte) * 0x100000001b3u;
    }
  }
};

}  // namespace flashattn::driver
