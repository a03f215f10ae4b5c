// What compiled CUDA kernels need from the runtime, in addition to abi.h. No includes, as in abi.h.
#pragma once

extern "C" {
// Convert between pointers into a launch's dynamic shared memory and the 32-bit addresses that PTX uses.
void* cuda_shared_pointer(unsigned address);
unsigned cuda_shared_address(const void* pointer);

[[noreturn]] void cuda_fail(const char* message);

// cp.async. Writes `size` bytes (4 or 16): copies the first `bytes` bytes, and fills the rest with zeros. The copy
// takes effect when its thread waits for it.
void cuda_copy(unsigned to, const void* from, int size, int bytes);
void cuda_commit_copies();
void cuda_wait_for_copies(int under_way);

// __threadfence() and atomicAdd(), with which blocks synchronise.
void cuda_fence();
unsigned cuda_atomic_add(unsigned* to, unsigned added);

void cuda_named_barrier(int number, int threads, const char* file, int line);
}
