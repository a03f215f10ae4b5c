// Builds kernels. A cache in memory maps a kernel's specialisation to its function, and a cache on disk maps its source
// text to machine code (a cubin).
#include "driver.h"

#include <algorithm>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <unordered_map>
#include <vector>

#include "../gpu/disk_cache.h"
#include "launch.h"

namespace flashattn::cuda {
namespace {

std::string with_point(int major, int minor) {
  return std::to_string(major) + "." + std::to_string(minor);
}

std::string architecture(int device) {
  int capability = properties(device).compute_capability;
  // The suffix "a" allows instructions that only this architecture has. The code runs on no other one.
  return "sm_" + std::to_string(capability) + (capability >= 90 ? "a" : "");
}

std::string nvrtc_version() {
  int major = 0, minor = 0;
  FLASHATTN_CALL(nvrtcVersion, &major, &minor);
  return with_point(major, minor);
}

std::string compiled(const std::string& text, const std::string& name, const std::string& architecture) {
  nvrtcProgram program = nullptr;
  FLASHATTN_CALL(nvrtcCreateProgram, &program, text.c_str(), (name + ".cu").c_str(), 0, nullptr, nullptr);
  std::unique_ptr<nvrtcProgram, nvrtcResult (*)(nvrtcProgram*)> owner(&program, nvrtcDestroyProgram);
  const auto result = [&](const auto& size_of, const auto& read) {
    size_t size = 0;
    check(size_of(program, &size), "reading the size of NVRTC's output");
    std::string bytes(size, '\0');
    check(read(program, bytes.data()), "reading NVRTC's output");
    return bytes;
  };
  std::string option = "--gpu-architecture=" + architecture;
  const char* options[] = {option.c_str()};
  if (nvrtcResult error = nvrtcCompileProgram(program, 1, options); error != nvrtcResult{}) {
    std::string log = result(nvrtcGetProgramLogSize, nvrtcGetProgramLog);
    throw std::runtime_error("[flash_attention] nvrtcCompileProgram: " + in_words(error) + "\n" + log.c_str());
  }
  return result(nvrtcGetCUBINSize, nvrtcGetCUBIN);
}

std::string machine_code(const gpu::Launch& launch, const std::string& architecture) {
  std::string text = source_text(launch), key = "NVRTC " + nvrtc_version() + ", " + architecture + "\n" + text;
  std::string cubin = gpu::read_kept("cubins", key);
  if (cubin.empty()) gpu::keep("cubins", key, cubin = compiled(text, launch.function, architecture));
  return cubin;
}

// Builds a kernel and loads it. It is never unloaded.
CUfunction built(const gpu::Launch& launch, int device) try {
  constexpr uint32_t kDefaultLimit = 48 * 1024;  // bytes of dynamic shared memory
  constexpr int kMaxDynamicShared = 8;           // a CUfunction_attribute
  CUcontext context = nullptr;                   // MLX's context; it may not be current in this thread
  FLASHATTN_CALL(cuDevicePrimaryCtxRetain, &context, device);
  FLASHATTN_CALL(cuCtxPushCurrent_v2, context);
  std::unique_ptr<CUcontext, CUresult (*)(CUcontext*)> current(&context, cuCtxPopCurrent_v2);
  CUmodule module = nullptr;
  CUfunction function = nullptr;
  FLASHATTN_CALL(cuModuleLoadData, &module, machine_code(launch, architecture(device)).data());
  FLASHATTN_CALL(cuModuleGetFunction, &function, module, launch.function.c_str());
  auto most = static_cast<uint32_t>(properties(device).shared_memory);
  if (launch.dynamic_shared > most) {
    throw std::runtime_error("[flash_attention] a block needs " + std::to_string(launch.dynamic_shared) +
                             " bytes of shared memory, but the GPU has " + std::to_string(most));
  }
  if (launch.dynamic_shared > kDefaultLimit) {
    FLASHATTN_CALL(cuFuncSetAttribute, function, kMaxDynamicShared, static_cast<int>(launch.dynamic_shared));
  }
  return function;
} catch (const std::runtime_error& error) {
  throw std::runtime_error(error.what() + ("\nThis happened while building " + launch.function) + " for " +
                           describe(device) + ". Try a newer driver, or kernel=\"cuda_rowwise\".");
}

}  // namespace

gpu::Device properties(int device) {
  constexpr int kMultiprocessors = 16, kMajor = 75, kMinor = 76, kSharedMemoryOfBlock = 97;  // CUdevice_attribute
  const auto attribute = [&](int number) {
    int value = 0;
    FLASHATTN_CALL(cuDeviceGetAttribute, &value, number, device);
    return value;
  };
  return {.compute_capability = 10 * attribute(kMajor) + attribute(kMinor),
          .multiprocessors = attribute(kMultiprocessors),
          .shared_memory = attribute(kSharedMemoryOfBlock)};
}

void check_device(int device) try {
  thread_local std::set<int> fit;  // devices that have passed; each call of attention checks its device
  if (fit.contains(device)) return;
  if (!cuTensorMapEncodeTiled) {
    throw NoKernelError(
        "[flash_attention] the driver has no cuTensorMapEncodeTiled: install version 550.54.14 or a newer one");
  }
  int capability = properties(device).compute_capability, count = 0;
  FLASHATTN_CALL(nvrtcGetNumSupportedArchs, &count);
  std::vector<int> known(count);  // compute capabilities: 90 means 9.0
  FLASHATTN_CALL(nvrtcGetSupportedArchs, known.data());
  std::string it_has =
      "[flash_attention] the GPU has compute capability " + with_point(capability / 10, capability % 10);
  if (capability < 80) {
    throw NoKernelError(it_has + ", expected 8.0 or more: compute on mx.cpu, or on a newer GPU");
  }
  if (std::find(known.begin(), known.end(), capability) == known.end()) {
    throw NoKernelError(it_has + ", which NVRTC " + nvrtc_version() + " does not know: install a newer NVRTC");
  }
  fit.insert(device);
} catch (const std::runtime_error& error) {
  throw NoKernelError(error.what());  // the caller may then choose another backend
}

std::string describe(int device) {
  int version = 0;
  FLASHATTN_CALL(cuDriverGetVersion, &version);
  return architecture(device) + ", driver for CUDA " + with_point(version / 1000, version % 1000 / 10) + ", NVRTC " +
         nvrtc_version();
}

CUfunction function_of(const gpu::Launch& launch, int device) {
  static std::mutex mutex;
  static std::map<int, std::unordered_map<std::string, std::shared_future<CUfunction>>> kernels;  // by device
  std::unique_lock lock(mutex);
  auto [kernel, is_new] = kernels[device].try_emplace(launch.specialisation);
  if (is_new) kernel->second = std::async(std::launch::deferred, built, launch, device);
  std::shared_future<CUfunction> wanted = kernel->second;
  lock.unlock();
  try {
    return wanted.get();  // the first thread builds the kernel; the others wait, and get its error if it fails
  } catch (const std::runtime_error&) {
    lock.lock();  // A later call tries again, because the reason may have gone: too little memory, or a driver's error.
    kernels[device].erase(launch.specialisation);
    throw;
  }
}

}  // namespace flashattn::cuda
