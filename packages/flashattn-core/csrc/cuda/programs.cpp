// Two caches in front of the compiler: functions by their specialisation, machine code by its text.
#include "programs.h"

#include <memory>
#include <mutex>
#include <stdexcept>
#include <unordered_map>

#include "../gpu/disk_cache.h"
#include "device.h"
#include "launch.h"

namespace flashattn::cuda {
namespace {

// A function and what it is specialised for, on a device. Made for every call, so these are bytes and no words.
std::string specialisation(const gpu::Launch& launch, int device) {
  std::string name = launch.function;
  const auto append = [&](int32_t number) { name.append(reinterpret_cast<const char*>(&number), sizeof(number)); };
  name.reserve(name.size() + (launch.constants.size() + 1) * sizeof(int32_t));
  append(device);
  for (const gpu::Constant& constant : launch.constants) {
    std::visit([&](auto number) { append(number); }, constant.value);
  }
  return name;
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

// For ever.
CUfunction loaded(const std::string& cubin, const gpu::Launch& launch, int device) {
  constexpr uint32_t kWithoutAsking = 48 * 1024, kMaxDynamicShared = 8;  // of CUfunction_attribute
  void* module = nullptr;
  CUfunction function = nullptr;
  driver().load(&module, cubin.data());
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
}

CUfunction built(const gpu::Launch& launch, int device) {
  std::string of_device = architecture(device);
  try {
    return loaded(machine_code(launch, of_device), launch, device);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(error.what() + ("\nThis was " + launch.function) + " for " + of_device + ", by NVRTC " +
                             nvrtc_version() + ", on a driver for CUDA " + driver_version() +
                             ". Try a newer driver, or kernel=\"cuda_rowwise\".");
  }
}

}  // namespace

CUfunction function_of(const gpu::Launch& launch, int device) {
  static std::mutex mutex;
  static std::unordered_map<std::string, CUfunction> functions;
  std::string name = specialisation(launch, device);
  std::lock_guard lock(mutex);  // also while it compiles: of two threads that want a kernel one makes it
  auto found = functions.find(name);
  if (found == functions.end()) {
    found = functions.emplace(name, built(launch, device)).first;
  }
  return found->second;
}

}  // namespace flashattn::cuda
