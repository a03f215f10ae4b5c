// What cases are drawn with: the same numbers in every run and on every machine.
#pragma once

#include <cmath>
#include <random>
#include <vector>

namespace flashattn::driver {

struct Draw {
  std::mt19937 bits;

  int below(int n) { return static_cast<int>(bits() % static_cast<unsigned>(n)); }
  bool chance(int percent) { return below(100) < percent; }
  double uniform() { return bits() * 0x1p-32; }
  double normal() { return (uniform() + uniform() + uniform() + uniform() - 2) * std::sqrt(3.0); }  // nearly
  int pick(const std::vector<int>& choices) { return choices[static_cast<size_t>(below(int(choices.size())))]; }
};

}  // namespace flashattn::driver
