// Runs the forward pass and then the gradient over the cases that forward.cpp runs too, and compares the gradient with
// its formulas written plainly.
//
//   backward CASES [FIRST]
#include "passes.h"

int main(int argc, char** argv) {
  return flashattn::driver::check_cases(argc, argv, false, flashattn::driver::check_backward);
}
