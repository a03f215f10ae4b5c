// The subset of metal_stdlib that kernels need, in C++ with clang's vector extensions.
//
// This header is included before the kernels' text, which is already preprocessed. With MSL_CHECK_ADDRESS_SPACES,
// header and text are compiled as C++ for OpenCL, and are not executed. So declarations without definitions are enough.
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
