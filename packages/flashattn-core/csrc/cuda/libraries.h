// NVRTC and NVIDIA's driver: their functions that this module calls. libmlx is linked to both, and this module to none.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "../call/kernel_table.h"

struct CUfunc_st;
using CUfunction = CUfunc_st*;

namespace flashattn::cuda {

// What is looked up through libmlx is of the version that MLX itself calls, whatever else the process has loaded.
class Library {
 public:
  Library(const char* name, const char* cure) : name_(name), cure_(cure) {}

  template <typename F>
  F* find(const char* function) const {
    if (void* found = dlsym(libmlx_, function)) {
      return reinterpret_cast<F*>(found);
    }
    throw NoKernelError(std::string("[flash_attention] ") + name_ + " has no " + function + ": " + cure_);
  }

  virtual std::string in_words(int error) const = 0;

 private:
  const char *name_, *cure_;
  void* libmlx_ = dlopen("libmlx.so", RTLD_LAZY | RTLD_NOLOAD);
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

  Nvrtc() : Library("NVRTC", "reinstall mlx[cuda13] or mlx[cuda12]") {}

  std::string in_words(int error) const override { return error_string(error); }
};

struct Driver : Library {
  Function<int*> version{*this, "cuDriverGetVersion"};
  Function<int*, int, int> device_attribute{*this, "cuDeviceGetAttribute"};
  Function<void**, int> retain_context{*this, "cuDevicePrimaryCtxRetain"};
  Function<void*> push_context{*this, "cuCtxPushCurrent_v2"};
  Function<void**> pop_context{*this, "cuCtxPopCurrent_v2"};
  Function<void**, const void*> load{*this, "cuModuleLoadData"};
  Function<CUfunction*, void*, const char*> get_function{*this, "cuModuleGetFunction"};
  Function<CUfunction, int, int> set_attribute{*this, "cuFuncSetAttribute"};
  Function<void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*, const uint32_t*, int, int,
           int, int>
      encode_tiled{*this, "cuTensorMapEncodeTiled"};
  int (*error_string)(int, const char**) = find<int(int, const char**)>("cuGetErrorString");

  Driver() : Library("NVIDIA's driver", "install version 525 or a newer one") {}

  std::string in_words(int error) const override {
    const char* words = nullptr;
    error_string(error, &words);
    return words ? words : "error " + std::to_string(error);
  }
};

// Both throw NoKernelError, with the cure, where a function is missing.
inline const Nvrtc& nvrtc() {
  static const Nvrtc functions;
  return functions;
}
inline const Driver& driver() {
  static const Driver functions;
  return functions;
}

}  // namespace flashattn::cuda
