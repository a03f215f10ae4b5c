#include "driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <vector>

#include "../call/kernel_table.h"

namespace flashattn::cuda {
namespace {

// A library that libmlx has loaded. RTLD_NOLOAD: never a second one, of another version.
class Library {
 public:
  Library(std::string name, std::initializer_list<const char*> files, std::string cure)
      : name_(std::move(name)), cure_(std::move(cure)) {
    for (const char* file : files) {
      handle_ = handle_ ? handle_ : dlopen(file, RTLD_LAZY | RTLD_NOLOAD);
    }
    if (!handle_) {
      throw NoKernelError("[flash_attention] " + name_ + " is not there: " + cure_);
    }
  }

  template <typename F>
  F* find(const char* function) const {
    if (void* found = dlsym(handle_, function)) {
      return reinterpret_cast<F*>(found);
    }
    throw NoKernelError("[flash_attention] " + name_ + " has no " + function + ": " + cure_);
  }

  virtual std::string in_words(int error) const = 0;

 private:
  std::string name_, cure_;
  void* handle_ = nullptr;
};

// Throws std::runtime_error where the library's function returns an error.
template <typename... Parameters>
class Function {
 public:
  Function(const Library& library, const char* name)
      : library_(library), name_(name), function_(library.find<int(Parameters...)>(name)) {}

  void operator()(Parameters... parameters) const {
    if (int error = function_(parameters...)) {
      throw std::runtime_error(std::string("[flash_attention] ") + name_ + ": " + library_.in_words(error));
    }
  }

 private:
  const Library& library_;
  const char* name_;
  int (*function_)(Parameters...);
};

using Program = void*;

struct Nvrtc : Library {
  Function<int*, int*> version{*this, "nvrtcVersion"};
  Function<int*> num_architectures{*this, "nvrtcGetNumSupportedArchs"};
  Function<int*> list_architectures{*this, "nvrtcGetSupportedArchs"};
  Function<Program*, const char*, const char*, int, const char* const*, const char* const*> create{
      *this, "nvrtcCreateProgram"};
  Function<Program*> destroy{*this, "nvrtcDestroyProgram"};
  Function<Program, int, const char* const*> compile{*this, "nvrtcCompileProgram"};
  Function<Program, size_t*> log_size{*this, "nvrtcGetProgramLogSize"};
  Function<Program, char*> log{*this, "nvrtcGetProgramLog"};
  Function<Program, size_t*> cubin_size{*this, "nvrtcGetCUBINSize"};
  Function<Program, char*> cubin{*this, "nvrtcGetCUBIN"};
  const char* (*error_string)(int) = find<const char*(int)>("nvrtcGetErrorString");
  std::vector<int> architectures;  // 90 for 9.0

  Nvrtc() : Library("NVRTC", {"libnvrtc.so.13", "libnvrtc.so.12"}, "reinstall mlx[cuda13] or mlx[cuda12]") {
    int count = 0;
    num_architectures(&count);
    architectures.resize(count);
    list_architectures(architectures.data());
  }

  std::string in_words(int error) const override { return error_string(error); }
};

struct Driver : Library {
  Function<int*> version{*this, "cuDriverGetVersion"};
  Function<int*, int, int> device_attribute{*this, "cuDeviceGetAttribute"};
  Function<void**, const void*> load{*this, "cuModuleLoadData"};
  Function<CUfunction*, void*, const char*> get_function{*this, "cuModuleGetFunction"};
  Function<CUfunction, int, int> set_attribute{*this, "cuFuncSetAttribute"};
  Function<void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*, const uint32_t*, int, int,
           int, int>
      encode_tiled{*this, "cuTensorMapEncodeTiled"};
  int (*error_string)(int, const char**) = find<int(int, const char**)>("cuGetErrorString");

  Driver() : Library("NVIDIA's driver", {"libcuda.so.1"}, "install version 525 or a newer one") {}

  std::string in_words(int error) const override {
    const char* words = nullptr;
    error_string(error, &words);
    return words ? words : "error " + std::to_string(error);
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
  return std::to_string(major) + "." + std::to_string(minor);
}

std::string driver_version() {
  int version = 0;
  driver().version(&version);
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

void check_device(int device) try {
  int capability = properties(device).compute_capability;
  const std::vector<int>& known = nvrtc().architectures;
  bool is_known = std::find(known.begin(), known.end(), capability) != known.end();
  if (capability < 80 || !is_known) {
    throw NoKernelError("[flash_attention] the GPU has compute capability " + std::to_string(capability / 10) + "." +
                        std::to_string(capability % 10) +
                        (capability < 80 ? ", expected 8.0 or more: compute on mx.cpu, or on a newer GPU"
                                         : ", which NVRTC " + nvrtc_version() + " does not know: install a newer one"));
  }
} catch (const std::runtime_error& error) {
  throw NoKernelError(error.what());  // now there still is a choice
}

TensorMap tensor_map(const BoxOfArray& box) {
  // Of CUtensorMapDataType and so on. What is outside of the array is zero.
  constexpr int kFloat16 = 6, kBfloat16 = 9, kNotInterleaved = 0, kSwizzle128 = 3, kIntoL2By256 = 3, kZeros = 0;
  constexpr uint32_t kDimensions = 4, kColumns = 64;
  const uint32_t sizes[kDimensions] = {kColumns, static_cast<uint32_t>(box.rows), 1, 1}, steps[] = {1, 1, 1, 1};
  TensorMap map;
  driver().encode_tiled(&map, box.bfloat ? kBfloat16 : kFloat16, kDimensions, const_cast<void*>(box.address), box.sizes,
                        box.steps, sizes, steps, kNotInterleaved, kSwizzle128, kIntoL2By256, kZeros);
  return map;
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

CUfunction loaded(const std::string& cubin, const std::string& name, int dynamic_shared, int device) {
  constexpr int kWithoutAsking = 48 * 1024, kMaxDynamicShared = 8;  // of CUfunction_attribute
  void* module = nullptr;
  CUfunction function = nullptr;
  driver().load(&module, cubin.data());
  driver().get_function(&function, module, name.c_str());
  if (int most = properties(device).shared_memory; dynamic_shared > most) {
    throw std::runtime_error("[flash_attention] a block needs " + std::to_string(dynamic_shared) +
                             " bytes of shared memory, and the GPU has " + std::to_string(most));
  }
  if (dynamic_shared > kWithoutAsking) {
    driver().set_attribute(function, kMaxDynamicShared, dynamic_shared);
  }
  return function;
}

}  // namespace flashattn::cuda
