// In encode.cpp's place where MLX has no CUDA: nothing gets this far.
#include <stdexcept>

#include "encode.h"

namespace flashattn::cuda {
namespace {

[[noreturn]] void missing() {
  throw std::runtime_error("[flash_attention] this MLX has no CUDA");
}

}  // namespace

void encode(const gpu::Work&, mx::Stream) {
  missing();
}
void allocate(mx::array&, mx::Stream) {
  missing();
}
void* address(const mx::array&) {
  missing();
}
void check(mx::Device) {
  missing();
}
gpu::Device device() {
  return {};
}
std::string describe(mx::Device) {
  missing();
}

}  // namespace flashattn::cuda
