#include "driver.h"

#include <dlfcn.h>

#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>

#include "../call/kernel_table.h"

namespace flashattn::cuda {
namespace {

// A library that libmlx has loaded. RTLD_NOLOAD: never a second one, of another version.
void* library(const char* what, std::initializer_list<const char*> files, const char* cure) {
  for (const char* file : files) {
    if (void* found = dlopen(file, RTLD_LAZY | RTLD_NOLOAD)) {
      return found;
    }
  }
  throw NoKernelError(std::string("[flash_attention] ") + what + " is missing: " + cure);
}

template <typename F>
void find(F& function, void* library, const char* name) {
  function = reinterpret_cast<F>(dlsym(library, name));
  if (!function) {
    throw NoKernelError(std::string("[flash_attention] ") + name + " is missing in NVIDIA's " +
                        "libraries: install a newer driver");
  }
}

using Program = void*;

struct Nvrtc {
  const char* (*error_string)(int);
  int (*version)(int*, int*);
  int (*create)(Program*, const char*, const char*, int, const char* const*, const char* const*);
  int (*destroy)(Program*);
  int (*compile)(Program, int, const char* const*);
  int (*log_size)(Program, size_t*);
  int (*log)(Program, char*);
  int (*cubin_size)(Program, size_t*);
  int (*cubin)(Program, char*);

  Nvrtc() {
    void* nvrtc = library("NVRTC", {"libnvrtc.so.13", "libnvrtc.so.12"}, "reinstall mlx[cuda12] or mlx[cuda13]");
    find(error_string, nvrtc, "nvrtcGetErrorString");
    find(version, nvrtc, "nvrtcVersion");
    find(create, nvrtc, "nvrtcCreateProgram");
    find(destroy, nvrtc, "nvrtcDestroyProgram");
    find(compile, nvrtc, "nvrtcCompileProgram");
    find(log_size, nvrtc, "nvrtcGetProgramLogSize");
    find(log, nvrtc, "nvrtcGetProgramLog");
    find(cubin_size, nvrtc, "nvrtcGetCUBINSize");
    find(cubin, nvrtc, "nvrtcGetCUBIN");
  }

  void check(int result, const char* function) const {
    if (result != 0) {
      throw std::runtime_error(std::string("[flash_attention] ") + function + ": " + error_string(result));
    }
  }
};

struct Driver {
  int (*error_string)(int, const char**);
  int (*version)(int*);
  int (*device_name)(char*, int, int);
  int (*device_attribute)(int*, int, int);
  int (*load)(void**, const void*);
  int (*get_function)(CUfunction*, void*, const char*);
  int (*set_attribute)(CUfunction, int, int);
  int (*encode_tiled)(void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*, const uint32_t*,
                      int, int, int, int);

  Driver() {
    void* driver = library("NVIDIA's driver", {"libcuda.so.1"}, "install it");
    find(error_string, driver, "cuGetErrorString");
    find(version, driver, "cuDriverGetVersion");
    find(device_name, driver, "cuDeviceGetName");
    find(device_attribute, driver, "cuDeviceGetAttribute");
    find(load, driver, "cuModuleLoadData");
    find(get_function, driver, "cuModuleGetFunction");
    find(set_attribute, driver, "cuFuncSetAttribute");
    find(encode_tiled, driver, "cuTensorMapEncodeTiled");
  }

  void check(int result, const std::string& what) const {
    if (result != 0) {
      const char* text = nullptr;
      error_string(result, &text);
      throw std::runtime_error("[flash_attention] " + what + ": " + (text ? text : "error " + std::to_string(result)));
    }
  }
};

const Nvrtc& nvrtc() {
  static const Nvrtc functions;
  return functions;
}

const Driver& driver() {
  static const Driver functions;
  return functions;
}

struct Capability {
  int major, minor;
};

// Asked for once: calls are checked often.
Capability capability(int device) {
  static std::mutex mutex;
  static std::map<int, Capability> known;
  std::lock_guard lock(mutex);
  if (auto of_device = known.find(device); of_device != known.end()) {
    return of_device->second;
  }
  constexpr int kMajor = 75, kMinor = 76;  // of CUdevice_attribute
  Capability found = {};
  driver().check(driver().device_attribute(&found.major, kMajor, device), "cuDeviceGetAttribute");
  driver().check(driver().device_attribute(&found.minor, kMinor, device), "cuDeviceGetAttribute");
  return known[device] = found;
}

}  // namespace

int compute_capability(int device) {
  auto [major, minor] = capability(device);
  return 10 * major + minor;
}

std::string architecture(int device) {
  auto [major, minor] = capability(device);
  // The code runs on this device alone, so it may use what only its very architecture has.
  return "sm_" + std::to_string(major) + std::to_string(minor) + (major >= 9 ? "a" : "");
}

std::string device_name(int device) {
  char name[256] = {};
  driver().check(driver().device_name(name, sizeof(name), device), "cuDeviceGetName");
  return name;
}

std::string nvrtc_version() {
  int major = 0, minor = 0;
  nvrtc().check(nvrtc().version(&major, &minor), "nvrtcVersion");
  return std::to_string(major) + "." + std::to_string(minor);
}

std::string driver_version() {
  int version = 0;
  driver().check(driver().version(&version), "cuDriverGetVersion");
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

void check_device(int device) {
  nvrtc();
  auto [major, minor] = capability(device);
  if (major < 8) {
    throw NoKernelError("[flash_attention] the GPU has compute capability " + std::to_string(major) + "." +
                        std::to_string(minor) + ", expected 8.0 or more");
  }
}

TensorMap tensor_map(const BoxOfArray& box) {
  // Of CUtensorMapDataType and so on. What is outside of the array is zero.
  constexpr int kFloat16 = 6, kBfloat16 = 9, kNotInterleaved = 0, kSwizzle128 = 3, kIntoL2By256 = 3, kZeros = 0;
  constexpr uint32_t kDimensions = 4, kColumns = 64;
  const uint32_t sizes[kDimensions] = {kColumns, static_cast<uint32_t>(box.rows), 1, 1}, steps[] = {1, 1, 1, 1};
  TensorMap map;
  driver().check(
      driver().encode_tiled(&map, box.bfloat ? kBfloat16 : kFloat16, kDimensions, const_cast<void*>(box.address),
                            box.sizes, box.steps, sizes, steps, kNotInterleaved, kSwizzle128, kIntoL2By256, kZeros),
      "cuTensorMapEncodeTiled");
  return map;
}

std::string compiled(const std::string& text, const std::string& name, const std::vector<std::string>& options) {
  Program created = nullptr;
  nvrtc().check(nvrtc().create(&created, text.c_str(), (name + ".cu").c_str(), 0, nullptr, nullptr),
                "nvrtcCreateProgram");
  const auto destroy = [](Program program) { nvrtc().destroy(&program); };
  std::unique_ptr<void, decltype(destroy)> program(created, destroy);
  std::vector<const char*> arguments;
  for (const std::string& option : options) {
    arguments.push_back(option.c_str());
  }
  int result = nvrtc().compile(program.get(), static_cast<int>(arguments.size()), arguments.data());
  size_t size = 0;
  if (result != 0) {
    nvrtc().log_size(program.get(), &size);
    std::string log(size, '\0');
    nvrtc().log(program.get(), log.data());
    throw std::runtime_error("[flash_attention] NVRTC " + nvrtc_version() + " does not compile " + name + " with " +
                             options.front() + ": " + nvrtc().error_string(result) + "\n" + log.c_str());
  }
  nvrtc().check(nvrtc().cubin_size(program.get(), &size), "nvrtcGetCUBINSize");
  std::string cubin(size, '\0');
  nvrtc().check(nvrtc().cubin(program.get(), cubin.data()), "nvrtcGetCUBIN");
  return cubin;
}

CUfunction loaded(const std::string& cubin, const std::string& name, int dynamic_shared) {
  constexpr int kWithoutAsking = 48 * 1024, kMaxDynamicShared = 8;  // of CUfunction_attribute
  void* module = nullptr;
  CUfunction function = nullptr;
  driver().check(driver().load(&module, cubin.data()), "cuModuleLoadData of " + name);
  driver().check(driver().get_function(&function, module, name.c_str()), "cuModuleGetFunction of " + name);
  if (dynamic_shared > kWithoutAsking) {
    driver().check(driver().set_attribute(function, kMaxDynamicShared, dynamic_shared),
                   name + " needs " + std::to_string(dynamic_shared) + " bytes of shared memory");
  }
  return function;
}

}  // namespace flashattn::cuda
