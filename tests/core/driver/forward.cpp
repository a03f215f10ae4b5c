// Runs both kernels over cases drawn at random, every option of the front door among them, and compares with the
// formula written plainly. Needs nothing but the C++ library, so it also runs where Python and MLX do not: cross-built,
// under an emulator.
//
//   forward CASES [FIRST]
#include "passes.h"

int main(int argc, char** argv) {
  return flashattn::driver::check_cases(argc, argv, true, flashattn::driver::check_forward);
}
