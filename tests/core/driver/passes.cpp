// Runs the forward or backward pass on random cases, which cover every option of flash_attention(), and compares the
// results with the plain formulas. The program needs neither Python nor MLX, so it also runs under an emulator of
// another processor. Case number n is the same in every run and on every machine.
//
//   passes forward|backward CASES [FIRST]
//
// Prints the instruction set, the number of threads, the worst error and a checksum of all outputs. If a case fails, it
// prints the number of that case.
#include "passes.h"

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

using namespace flashattn;
using namespace flashattn::driver;

int main(int argc, char** argv) try {
  bool forward = std::string(argv[1]) == "forward";
  int cases = std::atoi(argv[2]), first = argc == 4 ? std::atoi(argv[3]) : 0;
  std::string instruction_set = cpu::describe();
  Check check;
  for (int number = first; number < first + cases; ++number) {
    Draw draw{std::mt19937(static_cast<unsigned>(number))};
    Case c = draw_case(draw, forward && draw.chance(30));  // quantised keys and values have no gradient
    Inputs in = draw_inputs(c, draw);
    forward ? check_forward(c, in, draw, check) : check_backward(c, in, draw, check);
    if (!check.failure.empty()) {
      std::printf("%s: case %d: %s\n", instruction_set.c_str(), number, check.failure.c_str());
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
