// Draws random numbers, which are the same in every run and on every machine.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <random>
#include <vector>

namespace flashattn::driver {

struct Draw {
  std::mt19937 bits;

  int below(int n) { return static_cast<int>(bits() % static_cast<unsigned>(n)); }
  bool chance(int percent) { return below(100) < percent; }
  double uniform() { return bits() * 0x1p-32; }
  double normal() { return (uniform() + uniform() + uniform() + uniform() - 2) * std::sqrt(3.0); }  // approximately
  template <typename T>
  const T& pick(const std::vector<T>& choices) {
    return choices[static_cast<size_t>(below(int(choices.size())))];
  }
  int pick(std::initializer_list<int> choices) { return choices.begin()[below(int(choices.size()))]; }
};

}  // namespace flashattn::driver
