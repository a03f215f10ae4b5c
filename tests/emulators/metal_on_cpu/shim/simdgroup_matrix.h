// <metal_simdgroup_matrix>: 8x8 matrices of floats. A lane holds two elements, which kernels may read and change.
#pragma once

namespace metal {
template <class T, int Rows, int Columns>
struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8, "Metal has 8x8 matrices only");
  vec<T, 2> elements;

  METAL_FUNC simdgroup_matrix() { __builtin_memset(&elements, 0xff, sizeof elements); }  // NaN: not initialised
  METAL_FUNC vec<T, 2>& thread_elements() { return elements; }
  METAL_FUNC const vec<T, 2>& thread_elements() const { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;

// The position of a lane's first element. The second element is in the next column. Apple's GPUs have this layout, and
// kernels that use thread_elements() rely on it.
struct MatrixPlace {
  int row, column;
};
METAL_FUNC MatrixPlace matrix_place(int lane) {
  const int quad = lane / 4;
  return {(quad & 4) + lane / 2 % 4, (quad & 2) * 2 + lane % 2 * 2};
}

struct MatrixOperands {
  simdgroup_float8x8* d;
  const simdgroup_float8x8 *a, *b, *c;
};

// D = A B + C.
MSL_EXCHANGE inline void multiply_matrices(MslLane* lanes) {
  float a[8][8], b[8][8], d[8][8];
  for (int lane = 0; lane < kLanes; lane++) {
    const auto& operands = *(const MatrixOperands*)lanes[lane].input;
    const MatrixPlace place = matrix_place(lane);
    for (int i = 0; i < 2; i++) {
      a[place.row][place.column + i] = operands.a->elements[i];
      b[place.row][place.column + i] = operands.b->elements[i];
      d[place.row][place.column + i] = operands.c->elements[i];
    }
  }
  for (int row = 0; row < 8; row++) {
    for (int k = 0; k < 8; k++) {
      for (int column = 0; column < 8; column++) d[row][column] += a[row][k] * b[k][column];
    }
  }
  for (int lane = 0; lane < kLanes; lane++) {
    const MatrixPlace place = matrix_place(lane);
    for (int i = 0; i < 2; i++) {
      ((const MatrixOperands*)lanes[lane].input)->d->elements[i] = d[place.row][place.column + i];
    }
  }
}

METAL_FUNC void simdgroup_multiply_accumulate(simdgroup_float8x8& d, const simdgroup_float8x8& a,
                                              const simdgroup_float8x8& b, const simdgroup_float8x8& c, MSL_PLACE) {
  static constexpr MslOperation operation{"simdgroup_multiply_accumulate", kCountMma, multiply_matrices};
  const MatrixOperands operands{&d, &a, &b, &c};
  msl_simdgroup_operation(&operation, &operands, nullptr, 0, file, line);
}
}  // namespace metal
