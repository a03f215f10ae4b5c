// Two caches stand in front of the compiler: functions by their specialisation, machine code by its text.
#include "driver.h"

#include <algorithm>
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
  // The code runs on this device alone, so it may use what only its very architecture has.
  return "sm_" + std::to_string(capability) + (capability >= 90 ? "a" : "");
}

std::string nvrtc_version() {
  int major = 0, minor = 0;
  nvrtc().version(&major, &minor);
  return with_point(major, minor);
}

std::string compiled(const std::string& text, const std::string& name, const std::string& architecture) {
  Program created = nullptr;
  nvrtc().create(&created, text.c_str(), (name + ".cu").c_str(), 0, nullptr, nullptr);
  std::unique_ptr<void, void (*)(Program)> program(created, [](Program done) { nvrtc().destroy(&done); });
  const auto result = [&](const auto& size_of, const auto& read) {
    size_t size = 0;
    size_of(created, &size);
    std::string bytes(size, '\0');
    read(created, bytes.data());
    return bytes;
  };
  std::string option = "--gpu-architecture=" + architecture;
  const char* options[] = {option.c_str()};
  try {
    nvrtc().compile(created, 1, options);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(std::string(error.what()) + "\n" + result(nvrtc().log_size, nvrtc().log).c_str());
  }
  return result(nvrtc().cubin_size, nvrtc().cubin);
}

std::string machine_code(const gpu::Launch& launch, const std::string& architecture) {
  std::string text = source_text(launch), key = "NVRTC " + nvrtc_version() + ", " + architecture + "\n" + text;
  std::string cubin = gpu::read_kept("cubins", key);
  if (cubin.empty()) {
    cubin = compiled(text, launch.function, architecture);
    gpu::keep("cubins", key, cubin);
  }
  return cubin;
}

// Loaded for ever.
CUfunction built(const gpu::Launch& launch, int device) try {
  constexpr uint32_t kWithoutAsking = 48 * 1024, kMaxDynamicShared = 8;  // of CUfunction_attribute
  void *module = nullptr, *context = nullptr;  // MLX's context, which need not be this thread's
  driver().retain_context(&context, device);
  driver().push_context(context);
  std::unique_ptr<void, void (*)(void*)> current(context, [](void* popped) { driver().pop_context(&popped); });
  CUfunction function = nullptr;
  driver().load(&module, machine_code(launch, architecture(device)).data());
  driver().get_function(&function, module, launch.function.c_str());
  auto most = static_cast<uint32_t>(properties(device).shared_memory);
  if (launch.dynamic_shared > most) {
    throw std::runtime_error("[flash_attention] a block needs " + std::to_string(launch.dynamic_shared) +
                             " bytes of shared memory, and the GPU has " + std::to_string(most));
  }
  if (launch.dynamic_shared > kWithoutAsking) {
    driver().set_attribute(function, kMaxDynamicShared, static_cast<int>(launch.dynamic_shared));
  }
  return function;
} catch (const std::runtime_error& error) {
  throw std::runtime_error(error.what() + ("\nThis was " + launch.function) + " for " + describe(device) +
                           ". Try a newer driver, or kernel=\"cuda_rowwise\".");
}

}  // namespace

gpu::Device properties(int device) {
  constexpr int kMultiprocessors = 16, kMajor = 75, kMinor = 76, kSharedMemoryOfBlock = 97;  // of CUdevice_attribute
  const auto attribute = [&](int number) {
    int value = 0;
    driver().device_attribute(&value, number, device);
    return value;
  };
  return {.compute_capability = 10 * attribute(kMajor) + attribute(kMinor),
          .multiprocessors = attribute(kMultiprocessors),
          .shared_memory = attribute(kSharedMemoryOfBlock)};
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

std::string describe(int device) {
  int version = 0;
  driver().version(&version);
  return architecture(device) + ", driver for CUDA " + with_point(version / 1000, version % 1000 / 10) + ", NVRTC " +
         nvrtc_version();
}

CUfunction function_of(const gpu::Launch& launch, int device) {
  static std::mutex mutex;
  struct Kernel {
    CUfunction function = nullptr;
    std::string error;
  };
  static std::map<int, std::unordered_map<std::string, Kernel>> kernels;  // of each device
  std::lock_guard lock(mutex);  // also while it compiles: of two threads that want a kernel one makes it
  Kernel& kernel = kernels[device][launch.specialisation];
  if (!kernel.function && kernel.error.empty()) {
    try {
      kernel.function = built(launch, device);
    } catch (const std::runtime_error& error) {
      kernel.error = error.what();
    }
  }
  if (!kernel.function) {
    throw std::runtime_error(kernel.error);
  }
  return kernel.function;
}

}  // namespace flashattn::cuda
