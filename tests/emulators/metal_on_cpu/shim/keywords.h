// Metal's keywords for address spaces. They expand to nothing where kernels are executed, and to OpenCL's address
// spaces where kernels are only checked.
#pragma once

#ifdef MSL_CHECK_ADDRESS_SPACES
#define device __global
#define threadgroup __local
#define thread __private
#define constant __constant
#undef kernel
#define kernel
#else
#define device
#define threadgroup
#define thread
#define constant const
#define kernel
#endif

#define METAL_FUNC inline __attribute__((always_inline))
