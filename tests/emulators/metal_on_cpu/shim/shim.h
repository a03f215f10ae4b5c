// The subset of metal_stdlib that kernels need, in plain C++ (clang's vector extensions).
//
// Included before the kernels' own, already preprocessed, text. With MSL_CHECK_ADDRESS_SPACES shim and text are C++ for
// OpenCL, whose address spaces are real. Declarations are enough for that: nothing is executed.
#pragma once

#ifdef MSL_CHECK_ADDRESS_SPACES
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#pragma OPENCL EXTENSION cl_clang_storage_class_specifiers : enable
#else
#include "../runtime/abi.h"
#endif

#include "keywords.h"
#include "types.h"
//
#include "traits.h"
//
#include "limits.h"
#include "vectors.h"
//
#include "math.h"
//
#include "barriers.h"
#ifdef MSL_CHECK_ADDRESS_SPACES
#include "declarations.h"
#else
#include "simd.h"
#include "simdgroup_matrix.h"
//
#include "arguments.h"
#endif

using metal::vec;
