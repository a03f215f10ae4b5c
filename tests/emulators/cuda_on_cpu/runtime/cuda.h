// What compiled CUDA kernels and their runtime know of each other, beside abi.h. No includes, either.
#pragma once

extern "C" {
// Shared memory that a launch asks for; addresses are numbers of 32 bits.
void* cuda_shared_pointer(unsigned address);
unsigned cuda_shared_address(const void* pointer);

[[noreturn]] void cuda_fail(const char* message);

// Copies of `size` bytes, 4 or 16, of which those beyond `bytes` are zeros. They take effect when their thread waits
// for them.
void cuda_copy(unsigned to, const void* from, int size, int bytes);
void cuda_commit_copies();
void cuda_wait_for_copies(int under_way);

// Threads of different blocks.
void cuda_fence();
unsigned cuda_atomic_add(unsigned* to, unsigned added);

void cuda_named_barrier(int number, int threads, const char* file, int line);
}
