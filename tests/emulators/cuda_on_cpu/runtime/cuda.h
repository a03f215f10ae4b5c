// The runtime's functions for CUDA kernels only. abi.h has the functions for both CUDA and Metal kernels. No includes:
// kernels are compiled without a C library.
#pragma once

extern "C" {
// Convert between pointers into a launch's dynamic shared memory and the 32-bit addresses that PTX uses.
void* cuda_shared_pointer(unsigned address);
unsigned cuda_shared_address(const void* pointer);

[[noreturn]] void cuda_fail(const char* message);

// cp.async: copies `bytes` bytes and sets the rest of `size` bytes (4 or 16) to zero. The copy takes effect when the
// calling thread waits for it. Until then no thread may read the result.
void cuda_copy(unsigned to, const void* from, int size, int bytes);
void cuda_commit_copies();
void cuda_wait_for_copies(int under_way);

// Implement __threadfence() and atomicAdd(). Kernels synchronise blocks with them.
void cuda_fence();
unsigned cuda_atomic_add(unsigned* to, unsigned added);

void cuda_named_barrier(int number, int threads, const char* file, int line);
}
