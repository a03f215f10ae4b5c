// What the driver says of a GPU, and whether NVRTC compiles for it.
#include "device.h"

#include <algorithm>
#include <set>
#include <vector>

#include "libraries.h"

namespace flashattn::cuda {
namespace {

std::string with_point(int major, int minor) {
  return std::to_string(major) + "." + std::to_string(minor);
}

// By its number in CUdevice_attribute.
int attribute(int number, int device) {
  int value = 0;
  driver().device_attribute(&value, number, device);
  return value;
}

}  // namespace

gpu::Device properties(int device) {
  constexpr int kMultiprocessors = 16, kMajor = 75, kMinor = 76, kSharedMemoryOfBlock = 97;
  return {.compute_capability = 10 * attribute(kMajor, device) + attribute(kMinor, device),
          .multiprocessors = attribute(kMultiprocessors, device),
          .shared_memory = attribute(kSharedMemoryOfBlock, device)};
}

std::string architecture(int device) {
  int capability = properties(device).compute_capability;
  // The code runs on this device alone, so it may use what only its very architecture has.
  return "sm_" + std::to_string(capability) + (capability >= 90 ? "a" : "");
}

std::string nvrtc_version() {
  int major = 0, minor = 0;
  nvrtc().version(&major, &minor);
  return with_point(major, minor);
}

std::string driver_version() {
  int version = 0;
  driver().version(&version);
  return with_point(version / 1000, version % 1000 / 10);
}

void check_device(int device) try {
  thread_local std::set<int> fit;  // each call asks
  if (fit.contains(device)) {
    return;
  }
  int capability = properties(device).compute_capability, count = 0;
  nvrtc().num_architectures(&count);
  std::vector<int> known(count);  // 90 for 9.0
  nvrtc().list_architectures(known.data());
  bool is_known = std::find(known.begin(), known.end(), capability) != known.end();
  if (capability < 80 || !is_known) {
    throw NoKernelError("[flash_attention] the GPU has compute capability " +
                        with_point(capability / 10, capability % 10) +
                        (capability < 80 ? ", expected 8.0 or more: compute on mx.cpu, or on a newer GPU"
                                         : ", which NVRTC " + nvrtc_version() + " does not know: install a newer one"));
  }
  fit.insert(device);
} catch (const std::runtime_error& error) {
  throw NoKernelError(error.what());  // now there still is a choice
}

}  // namespace flashattn::cuda
