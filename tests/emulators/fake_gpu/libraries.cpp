// A fake CUDA driver and NVRTC, with the functions that csrc/cuda calls. An environment variable with the name of a
// function sets the error code that this function returns. With -DOLD_DRIVER, cuTensorMapEncodeTiled() is
// missing.
#include <cstdio>
#include <cstdlib>
#include <cstring>

static int number(const char* variable, int otherwise) {
  const char* value = std::getenv(variable);
  return value ? std::atoi(value) : otherwise;
}

#define FAKE(name, parameters, ...)                 \
  extern "C" int name parameters {                  \
    if (int error = number(#name, 0)) return error; \
    __VA_ARGS__;                                    \
    return 0;                                       \
  }

FAKE(cuGetErrorString, (int, const char** text), *text = "it says why")
FAKE(cuDriverGetVersion, (int* version), *version = 12020)
FAKE(cuDeviceGetAttribute, (int* value, int attribute, int),
     *value = attribute == 75   ? number("MAJOR", 9)
              : attribute == 76 ? 0
                                : 100'000)
static int contexts = 0;  // how many contexts are pushed and not popped yet
FAKE(cuDevicePrimaryCtxRetain, (int** context, int), *context = &contexts)
FAKE(cuCtxPushCurrent_v2, (int* context), ++*context)
FAKE(cuCtxPopCurrent_v2, (int**), --contexts)
FAKE(cuModuleLoadData, (const void** module, const char* code), if (contexts != 1) return 201; *module = code;
     std::printf("loads %s\n", code))
FAKE(cuModuleGetFunction, (const void** function, const void* module, const char*), *function = module)
FAKE(cuFuncSetAttribute, (void*, int, int bytes), std::printf("has %d bytes\n", bytes))
#ifndef OLD_DRIVER
FAKE(cuTensorMapEncodeTiled, ())
#endif

extern "C" const char* nvrtcGetErrorString(int) {
  return "NVRTC_ERROR";
}
FAKE(nvrtcVersion, (int* major, int* minor), *major = 13, *minor = number("MINOR", 0))
FAKE(nvrtcGetNumSupportedArchs, (int* count), *count = 3)
FAKE(nvrtcGetSupportedArchs, (int* all), all[0] = 70, all[1] = 80, all[2] = 90)
FAKE(nvrtcCreateProgram, (char** program, const char* text), *program = strdup(text))
FAKE(nvrtcDestroyProgram, (char** program), std::free(*program))
FAKE(nvrtcGetProgramLogSize, (void*, size_t* size), *size = sizeof("the log"))
FAKE(nvrtcGetProgramLog, (void*, char* log), std::strcpy(log, "the log"))
FAKE(nvrtcGetCUBINSize, (const char* program, size_t* size), *size = std::strlen(program) + 1)
FAKE(nvrtcGetCUBIN, (const char* program, char* cubin), std::strcpy(cubin, program))
FAKE(nvrtcCompileProgram, (const char* program, int, const char* const* options),
     std::printf("compiles %s %s\n", program, options[0]))
