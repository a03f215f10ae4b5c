// The rule that results obey, and the loop over the cases.
//
// The plain formula in float64 is the truth. The same formula in float32, unfused, errs too; the kernels may err twice
// as much as it does at its worst, plus 1e-5, plus half of the last place that the output's dtype keeps. 16-bit inputs
// are rounded before anyone sees them, and the kernels compute in float32 whatever the dtype: nothing else of a 16-bit
// result is excused.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include "call.h"

namespace flashattn::driver {

struct Check {
  double slack = 1;                         // times what is allowed
  std::string failure = "";                 // the first one
  double worst = 0;                         // error as a share of what is allowed; above 1 the rule is broken
  uint64_t checksum = 0xcbf29ce484222325u;  // of all results: FNV-1a

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
        share = std::max(beyond_rounding, 0.0) / (slack * (2 * unfused_error + 1e-5 + relative * std::abs(truth[i])));
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

// PROGRAM CASES [FIRST]: check_case(case, inputs, draw, check) for each case; `quantised`: also with such keys. Case
// number n is the same in every run and on every machine. Prints the instruction set and the number of threads, the
// worst error, and a checksum of all outputs; or the first case that fails. Returns the program's exit code.
template <typename CheckCase>
int check_cases(int argc, char** argv, bool quantised, CheckCase check_case) try {
  if (argc < 2 || argc > 3) {
    std::fprintf(stderr, "expected %s CASES [FIRST]\n", argv[0]);
    return 2;
  }
  int cases = std::atoi(argv[1]), first = argc == 3 ? std::atoi(argv[2]) : 0;
  std::string instruction_set = cpu::describe();
  Check check;
  for (int number = first; number < first + cases; ++number) {
    Draw draw{std::mt19937(static_cast<unsigned>(number))};
    Case c = draw_case(draw, number, quantised && draw.chance(30));
    Inputs in = draw_inputs(c, draw);
    check_case(c, in, draw, check);
    if (!check.failure.empty()) {
      std::printf("%s: %s\n%s\n", instruction_set.c_str(), c.describe().c_str(), check.failure.c_str());
      return 1;
    }
  }
  std::printf("%s: %d cases, worst error %.2f of what is allowed, checksum %016llx\n", instruction_set.c_str(), cases,
              check.worst, static_cast<unsigned long long>(check.checksum));
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 2;
}

}  // namespace flashattn::driver
