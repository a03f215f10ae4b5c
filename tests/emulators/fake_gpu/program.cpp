// `program KERNEL BYTES` loads a kernel with BYTES of dynamic shared memory. It loads the kernel twice, as two calls of
// attention do.
#include <signal.h>

#include <cstdio>
#include <cstdlib>

#include "call/choose.h"
#include "cuda/driver.h"
#include "cuda/launch.h"

namespace flashattn::cuda {
std::string source_text(const gpu::Launch& launch) {
  return "text of " + launch.function;
}
}  // namespace flashattn::cuda

using namespace flashattn;

int main(int, char** arguments) try {
  signal(SIGXFSZ, SIG_IGN);  // Python ignores this signal, too
  gpu::Launch launch = {};
  launch.function = arguments[1];
  launch.dynamic_shared = std::atoi(arguments[2]);
  cuda::check_device(0);
  try {
    cuda::function_of(launch, 0);
  } catch (const std::runtime_error&) {
  }
  cuda::function_of(launch, 0);  // finds the kernel in the cache, or tries again
} catch (const NoKernelError& error) {
  std::printf("NoKernelError: %s\n", error.what());
} catch (const std::runtime_error& error) {
  std::printf("runtime_error: %s\n", error.what());
}
