// CUDA's built-in variables, vectors and functions, including those in which the threads of a block or warp meet.
#pragma once

struct CudaIndex {
  unsigned x, y, z;
};
CUDA_FUNC CudaIndex cuda_index(MslBuiltin builtin) {
  const unsigned* values = msl_this_thread()->values[builtin];
  return {values[0], values[1], values[2]};
}
#define threadIdx cuda_index(thread_position_in_threadgroup)
#define blockIdx cuda_index(threadgroup_position_in_grid)
#define gridDim cuda_index(threadgroups_per_grid)
#define blockDim cuda_index(threads_per_threadgroup)

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

template <class To, class From>
CUDA_FUNC To cuda_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}
CUDA_FUNC float __int_as_float(int x) {
  return cuda_bits<float>(x);
}
CUDA_FUNC float __uint_as_float(unsigned x) {
  return cuda_bits<float>(x);
}
CUDA_FUNC unsigned __float_as_uint(float x) {
  return cuda_bits<unsigned>(x);
}
CUDA_FUNC int __ffs(unsigned x) {
  return __builtin_ffs(static_cast<int>(x));
}
CUDA_FUNC int __popc(unsigned x) {
  return __builtin_popcount(x);
}
CUDA_FUNC float __fmaf_rn(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}
CUDA_FUNC float __fmul_rn(float a, float b) {
#pragma clang fp contract(off)
  return a * b;
}
#define CUDA_MATHEMATICS(name, ...)     \
  CUDA_FUNC float name(__VA_ARGS__ x) { \
    return __builtin_##name(x);         \
  }
CUDA_MATHEMATICS(fabsf, float)
CUDA_MATHEMATICS(log2f, float)
CUDA_MATHEMATICS(tanhf, float)
CUDA_MATHEMATICS(roundf, float)
#undef CUDA_MATHEMATICS
CUDA_FUNC float fmaxf(float a, float b) {  // if one argument is NaN, the result is the other one
  return b != b || a > b ? a : b;
}
CUDA_FUNC float fminf(float a, float b) {
  return -fmaxf(-a, -b);
}

CUDA_FUNC unsigned __cvta_generic_to_shared(const void* pointer) {
  return cuda_shared_address(pointer);
}
CUDA_FUNC void* __cvta_shared_to_generic(unsigned address) {
  return cuda_shared_pointer(address);
}

CUDA_FUNC void __syncthreads(CUDA_PLACE) {
  msl_threadgroup_barrier(kFenceDevice | kFenceThreadgroup, true, file, line);
}
CUDA_FUNC int __syncthreads_and(int condition, CUDA_PLACE) {
  return msl_threadgroup_barrier(kFenceDevice | kFenceThreadgroup, condition, file, line);
}
CUDA_FUNC int __syncthreads_or(int condition, CUDA_PLACE) {
  return !msl_threadgroup_barrier(kFenceDevice | kFenceThreadgroup, !condition, file, line);
}

CUDA_FUNC void __threadfence() {
  cuda_fence();
}
CUDA_FUNC unsigned atomicAdd(unsigned* to, unsigned added) {
  return cuda_atomic_add(to, added);
}

// This exchange function (see abi.h) runs once for a warp, with the operands of all lanes.
template <class Operation>
void cuda_exchange(MslLane* lanes) {
  typename Operation::In in[kLanes];
  typename Operation::Out out[kLanes];
  for (int i = 0; i < kLanes; i++) __builtin_memcpy(&in[i], lanes[i].input, sizeof in[i]);
  Operation::apply(in, out);
  for (int i = 0; i < kLanes; i++) __builtin_memcpy(lanes[i].output, &out[i], sizeof out[i]);
}
template <class Operation>
CUDA_FUNC typename Operation::Out cuda_meet(typename Operation::In in, const char* file, int line) {
  static constexpr MslOperation operation{Operation::kName, Operation::kCounter, cuda_exchange<Operation>};
  typename Operation::Out out;
  msl_simdgroup_operation(&operation, &in, &out, 0, file, line);
  return out;
}

template <class T>
struct CudaShuffle {
  static constexpr const char* kName = "a shuffle";
  static constexpr int kCounter = kCountShuffle;
  struct In {
    unsigned mask;
    T x;
    unsigned source;
  };
  using Out = T;
  static void apply(const In* in, Out* out) {
    for (int i = 0; i < kLanes; i++) {
      if (in[i].mask != ~0u || in[i].source >= kLanes) cuda_fail("a shuffle with lanes that are not there");
      out[i] = in[in[i].source].x;
    }
  }
};
template <class T>
CUDA_FUNC T __shfl_sync(unsigned mask, T x, int lane, CUDA_PLACE) {
  return cuda_meet<CudaShuffle<T>>({mask, x, static_cast<unsigned>(lane) % kLanes}, file, line);
}
template <class T>
CUDA_FUNC T __shfl_xor_sync(unsigned mask, T x, int lanes, CUDA_PLACE) {
  return cuda_meet<CudaShuffle<T>>({mask, x, threadIdx.x % kLanes ^ lanes}, file, line);
}

struct CudaBallot {
  static constexpr const char* kName = "a vote";
  static constexpr int kCounter = kCountReduction;
  using In = bool;
  using Out = unsigned;
  static void apply(const In* in, Out* out) {
    unsigned votes = 0;
    for (int i = 0; i < kLanes; i++) votes |= static_cast<unsigned>(in[i]) << i;
    for (int i = 0; i < kLanes; i++) out[i] = votes;
  }
};
CUDA_FUNC unsigned __ballot_sync(unsigned, bool vote, CUDA_PLACE) {
  return cuda_meet<CudaBallot>(vote, file, line);
}
CUDA_FUNC int __any_sync(unsigned, bool vote, CUDA_PLACE) {
  return cuda_meet<CudaBallot>(vote, file, line) != 0;
}

struct CudaReduceOr {
  static constexpr const char* kName = "a reduction";
  static constexpr int kCounter = kCountReduction;
  using In = unsigned;
  using Out = unsigned;
  static void apply(const In* in, Out* out) {
    unsigned all = 0;
    for (int i = 0; i < kLanes; i++) all |= in[i];
    for (int i = 0; i < kLanes; i++) out[i] = all;
  }
};
CUDA_FUNC unsigned __reduce_or_sync(unsigned, unsigned x, CUDA_PLACE) {
  return cuda_meet<CudaReduceOr>(x, file, line);
}

CUDA_FUNC void __syncwarp(CUDA_PLACE) {
  static constexpr MslOperation operation{"__syncwarp", kCountNothing, nullptr};
  msl_simdgroup_operation(&operation, nullptr, nullptr, 0, file, line);
}
