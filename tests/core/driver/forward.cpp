// Runs both kernels over cases drawn at random, every option of the front door among them, and compares with the
// formula written plainly. Needs nothing but the C++ library, so it also runs where Python and MLX do not: cross-built,
// under an emulator.
//
//   forward CASES [FIRST]
#include "check.h"

using namespace flashattn;
using namespace flashattn::driver;

int main(int argc, char** argv) {
  return check_cases(argc, argv, true, [](const Case& c, const Inputs& in, Draw& draw, Check& check) {
    Call call(c, in, draw);
    Outputs truth = plain_attention<double>(c, in), unfused = plain_attention<float>(c, in);
    check.compare("out", call.out, truth.out, unfused.out, c.dtype);
    check.compare("lse", call.lse, truth.lse, unfused.lse, cpu::Dtype::float32);
  });
}
