// wgmma. A product is computed when the warps wait for it. Until then the kernel must not change its operands.
#include <deque>
#include <vector>

#include "cuda.h"
#include "hopper.h"
#include "memory.h"
#include "threads.h"

namespace {

constexpr int kDepth = 16;

struct Products {
  unsigned long threadgroup;
  std::vector<CudaProduct> not_committed;
  std::deque<std::vector<CudaProduct>> groups;
};

Products& products_of(int thread) {
  static std::vector<Products> of_threads(1024);
  Products& products = of_threads[thread];
  if (products.threadgroup != threadgroup_number) products = {threadgroup_number, {}, {}};
  return products;
}

// The address of an element of the matrix that the descriptor describes. The matrix has rows of 128 bytes, in groups of
// eight rows, and is swizzled by 128 bytes.
char* element_at(unsigned long long descriptor, int row, int column, bool is_transposed) {
  const unsigned start = (descriptor & 0x3fff) << 4, next_panel = (descriptor >> 16 & 0x3fff) << 4;
  const unsigned eight_rows = (descriptor >> 32 & 0x3fff) << 4;
  if (descriptor >> 62 != 1) cuda_fail("an operand that is not swizzled by 128 bytes");
  const int panel = is_transposed ? column / 64 : 0;
  const unsigned to = start + panel * next_panel + row / 8 * eight_rows + row % 8 * 128 + (column - panel * 64) * 2;
  return static_cast<char*>(cuda_shared_pointer(to ^ (to >> 7 & 7) << 4));
}

// The address of b[depth][column]. Memory holds b column by column, or row by row if b_is_transposed is true.
const char* of_b(const CudaProduct& product, int depth, int column) {
  return product.b_is_transposed ? element_at(product.b_descriptor, depth, column, true)
                                 : element_at(product.b_descriptor, column, depth, false);
}
const char* of_a(const CudaProduct& product, int row, int depth) {
  return element_at(product.a_descriptor, row, depth, false);
}

// A warp's product reads shared memory in pieces of 16 bytes. Each lane calls check_reads(), which checks some pieces.
void check_reads(const CudaProduct& product, const void* place) {
  const int lane = current_thread->index % kLanes, first_row = current_thread->index / kLanes % 4 * 16;
  const auto check = [&](const char* piece) { access_memory(piece, 16, false, place); };
  for (int i = lane; i < product.columns * kDepth / 8; i += kLanes) {
    const int in_depth = kDepth / 8;  // pieces per kDepth elements
    check(product.b_is_transposed ? of_b(product, i % kDepth, i / kDepth * 8)
                                  : of_b(product, i % in_depth * 8, i / in_depth));
  }
  if (product.a_is_shared) check(of_a(product, first_row + lane / 2, lane % 2 * 8));
}

float number(const CudaProduct& product, const char* element) {
  return product.element(*reinterpret_cast<const unsigned short*>(element), 0);
}

void multiply(const int first_thread, const std::vector<const CudaProduct*>& of_lanes) {
  const CudaProduct& any = *of_lanes[0];
  std::vector<float> a(16 * kDepth), b(kDepth * any.columns);
  for (int k = 0; k < kDepth; k++) {
    for (int column = 0; column < any.columns; column++)
      b[k * any.columns + column] = number(any, of_b(any, k, column));
    for (int row = 0; row < 16; row++) {
      const int half = k / 8, lane = row % 8 * 4 + k % 8 / 2;
      a[row * kDepth + k] = any.a_is_shared ? number(any, of_a(any, first_thread / kLanes % 4 * 16 + row, k))
                                            : any.element(of_lanes[lane]->a[half * 2 + row / 8], k % 2);
    }
  }
  for (int lane = 0; lane < kLanes; lane++) {
    for (int i = 0; i < any.columns / 2; i++) {
      const int row = lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      float sum = any.adds ? of_lanes[lane]->c[i] : 0;
      for (int k = 0; k < kDepth; k++) sum += a[row * kDepth + k] * b[k * any.columns + column];
      of_lanes[lane]->c[i] = sum;
    }
  }
}

// This exchange function (see abi.h) runs once when all lanes of a warp have reached wgmma.wait_group. Each lane passes
// its thread's index as `argument`.
void multiply_oldest_group(MslLane* lanes) {
  const int first = static_cast<int>(lanes[0].argument);
  for (size_t i = 0; i < products_of(first).groups.front().size(); i++) {
    std::vector<const CudaProduct*> of_lanes;
    for (int lane = 0; lane < kLanes; lane++) of_lanes.push_back(&products_of(first + lane).groups.front()[i]);
    multiply(first, of_lanes);
  }
  for (int lane = 0; lane < kLanes; lane++) products_of(first + lane).groups.pop_front();
}

}  // namespace

extern "C" {
void cuda_begin_product(const CudaProduct* product) {
  check_reads(*product, __builtin_return_address(0));
  products_of(current_thread->index).not_committed.push_back(*product);
}

void cuda_commit_products() {
  Products& products = products_of(current_thread->index);
  products.groups.push_back(std::move(products.not_committed));
  products.not_committed.clear();
}

void cuda_wait_for_products(int under_way, const char* file, int line) {
  static constexpr MslOperation operation{"wgmma.wait_group", kCountMma, multiply_oldest_group};
  auto& groups = products_of(current_thread->index).groups;
  while (groups.size() > static_cast<size_t>(under_way)) {
    for (const CudaProduct& product : groups.front()) check_reads(product, __builtin_return_address(0));
    msl_simdgroup_operation(&operation, nullptr, nullptr, current_thread->index, file, line);
  }
}
}
