// The runtime's functions for instructions of compute capability 9.0. No includes: kernels are compiled without a
// C library.
#pragma once

// Takes the place of a CUtensorMap of 16-bit elements. The code that translate.py generates fills it in.
struct CudaMap {
  char* address;
  long sizes[4];  // columns, rows, heads, batch elements
  long steps[4];  // in bytes
  int box_rows;   // a box has 64 columns
};

// A lane's operands of one wgmma: c = a b or c += a b. The result has 64 rows. Each of the four warps computes 16 rows.
struct CudaProduct {
  float* c;
  int columns;
  float (*element)(unsigned r, int i);  // the value of element i (0 or 1) in a register with the bits r
  bool adds, a_is_shared, b_is_transposed;
  unsigned a[4];
  unsigned long long a_descriptor, b_descriptor;
};

extern "C" {
void cuda_barrier_init(unsigned address, int arrivals);
void cuda_barrier_arrive(unsigned address, int expected_bytes);
void cuda_barrier_wait(unsigned address, int parity, const char* file, int line);
void cuda_copy_box(unsigned to, const CudaMap* map, int column, int row, int head, int batch, unsigned barrier);
void cuda_copy_bytes(unsigned to, const void* from, int bytes, unsigned barrier);

void cuda_begin_product(const CudaProduct* product);
void cuda_commit_products();
void cuda_wait_for_products(int under_way, const char* file, int line);
}
