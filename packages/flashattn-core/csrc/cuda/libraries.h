// The functions of NVRTC and of NVIDIA's driver that this module calls, declared as in NVIDIA's headers. This module is
// linked only to libmlx, which is linked to NVRTC and to the driver. All functions here are weak symbols, so they are
// null if libmlx was built without CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#define FLASHATTN_WEAK __attribute__((weak, visibility("default")))

enum nvrtcResult : int;
enum CUresult : int;
using nvrtcProgram = struct _nvrtcProgram*;
using CUcontext = struct CUctx_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;

extern "C" {
FLASHATTN_WEAK const char* nvrtcGetErrorString(nvrtcResult);
FLASHATTN_WEAK nvrtcResult nvrtcVersion(int* major, int* minor);
FLASHATTN_WEAK nvrtcResult nvrtcGetNumSupportedArchs(int* count);
FLASHATTN_WEAK nvrtcResult nvrtcGetSupportedArchs(int* all);
FLASHATTN_WEAK nvrtcResult nvrtcCreateProgram(nvrtcProgram*, const char* text, const char* name, int headers,
                                              const char* const* texts, const char* const* names);
FLASHATTN_WEAK nvrtcResult nvrtcDestroyProgram(nvrtcProgram*);
FLASHATTN_WEAK nvrtcResult nvrtcCompileProgram(nvrtcProgram, int count, const char* const* options);
FLASHATTN_WEAK nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram, size_t*);
FLASHATTN_WEAK nvrtcResult nvrtcGetProgramLog(nvrtcProgram, char*);
FLASHATTN_WEAK nvrtcResult nvrtcGetCUBINSize(nvrtcProgram, size_t*);
FLASHATTN_WEAK nvrtcResult nvrtcGetCUBIN(nvrtcProgram, char*);

FLASHATTN_WEAK CUresult cuGetErrorString(CUresult, const char**);
FLASHATTN_WEAK CUresult cuDriverGetVersion(int*);
FLASHATTN_WEAK CUresult cuDeviceGetAttribute(int* value, int attribute, int device);
FLASHATTN_WEAK CUresult cuDevicePrimaryCtxRetain(CUcontext*, int device);
FLASHATTN_WEAK CUresult cuCtxPushCurrent_v2(CUcontext);
FLASHATTN_WEAK CUresult cuCtxPopCurrent_v2(CUcontext*);
FLASHATTN_WEAK CUresult cuModuleLoadData(CUmodule*, const void* cubin);
FLASHATTN_WEAK CUresult cuModuleGetFunction(CUfunction*, CUmodule, const char* name);
FLASHATTN_WEAK CUresult cuFuncSetAttribute(CUfunction, int attribute, int value);
FLASHATTN_WEAK CUresult cuTensorMapEncodeTiled(void* map, int type, uint32_t rank, void* array, const uint64_t* sizes,
                                               const uint64_t* steps, const uint32_t* box, const uint32_t* every,
                                               int interleave, int swizzle, int promotion, int fill);
}

namespace flashattn::cuda {

inline std::string in_words(nvrtcResult error) {
  return nvrtcGetErrorString(error);
}
inline std::string in_words(CUresult error) {
  const char* words = nullptr;
  cuGetErrorString(error, &words);
  return words ? words : "error " + std::to_string(error);
}

// Calls a function of NVRTC or the driver, and throws std::runtime_error if it returns an error.
#define FLASHATTN_CALL(function, ...) ::flashattn::cuda::check(function(__VA_ARGS__), #function)
template <typename Result>
void check(Result result, const char* function) {
  if (result != Result{}) {
    throw std::runtime_error(std::string("[flash_attention] ") + function + ": " + in_words(result));
  }
}

}  // namespace flashattn::cuda
