// Two caches in front of the compiler: functions by their specialisation, machine code by its text.
#include "programs.h"

#include <mutex>
#include <stdexcept>
#include <unordered_map>

#include "cubin_cache.h"
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

std::string machine_code(const gpu::Launch& launch, const std::string& architecture) {
  std::string text = source_text(launch), key = "NVRTC " + nvrtc_version() + ", " + architecture + "\n" + text;
  std::string cubin = read_cubin(key);
  if (cubin.empty()) {
    cubin = compiled(text, launch.function, architecture);
    write_cubin(key, cubin);
  }
  return cubin;
}

CUfunction built(const gpu::Launch& launch, int device) {
  std::string of_device = architecture(device);
  try {
    return loaded(machine_code(launch, of_device), launch.function, static_cast<int>(launch.dynamic_shared), device);
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
