// <metal_simdgroup_matrix>: 8x8 matrices, two elements in each lane.
#pragma once

namespace metal {
// Where a lane's first element is; the second is its right neighbour. Apple's layout, of which every kernel that reads
// thread_elements() knows.
struct MatrixPlace {
  int row, column;
};
METAL_FUNC MatrixPlace matrix_place(int lane) {
#ifdef MSL_WRONG_LANE_LAYOUT  // for the tests: does anything notice?
  return {lane / 4, lane % 4 * 2};
#else
  const int quad = lane / 4;
  return {(quad & 4) + lane / 2 % 4, (quad & 2) * 2 + lane % 2 * 2};
#endif
}

template <class T, int Rows, int Columns>
struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8, "Metal has 8x8 matrices only");
  vec<T, 2> elements;

  METAL_FUNC simdgroup_matrix() { __builtin_memset(&elements, 0xff, sizeof elements); }  // NaN: not initialised
  METAL_FUNC explicit simdgroup_matrix(T diagonal, MSL_PLACE);
  METAL_FUNC vec<T, 2>& thread_elements() { return elements; }
  METAL_FUNC const vec<T, 2>& thread_elements() const { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

MSL_EXCHANGE inline void tell_lane(MslLane* lanes) {
  for (int i = 0; i < kLanes; i++) *(int*)lanes[i].output = i;
}

// Waits for the other lanes, and returns the lane's place.
METAL_FUNC MatrixPlace meet(const MslOperation* operation, const char* file, int line) {
  int lane;
  msl_simdgroup_operation(operation, nullptr, &lane, 0, file, line);
  return matrix_place(lane);
}

template <class T, int Rows, int Columns>
METAL_FUNC simdgroup_matrix<T, Rows, Columns>::simdgroup_matrix(T diagonal, const char* file, int line) {
  static constexpr MslOperation operation{"simdgroup_matrix(diagonal)", kCountNothing, tell_lane};
  const MatrixPlace place = meet(&operation, file, line);
  for (int i = 0; i < 2; i++) elements[i] = place.row == place.column + i ? diagonal : (T)0.0f;
}

template <class T, int Rows, int Columns = Rows>
METAL_FUNC simdgroup_matrix<T, Rows, Columns> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Rows, Columns> result;
  result.elements[0] = result.elements[1] = value;
  return result;
}

METAL_FUNC long matrix_offset(MatrixPlace place, int i, ulong elements_per_row, ulong2 origin, bool transpose) {
  const long row = place.row, column = place.column + i;
  return ((long)origin.y + (transpose ? column : row)) * (long)elements_per_row + (long)origin.x +
         (transpose ? row : column);
}

// Each lane moves its own two elements, so that an access is known to be this lane's.
template <class T>
METAL_FUNC void simdgroup_load(simdgroup_matrix<T, 8, 8>& matrix, const T* source, ulong elements_per_row = 8,
                               ulong2 origin = ulong2{0, 0}, bool transpose = false, MSL_PLACE) {
  static constexpr MslOperation operation{"simdgroup_load", kCountNothing, tell_lane};
  const MatrixPlace place = meet(&operation, file, line);
  for (int i = 0; i < 2; i++) {
    matrix.elements[i] = source[matrix_offset(place, i, elements_per_row, origin, transpose)];
  }
}
template <class T>
METAL_FUNC void simdgroup_store(simdgroup_matrix<T, 8, 8> matrix, T* destination, ulong elements_per_row = 8,
                                ulong2 origin = ulong2{0, 0}, bool transpose = false, MSL_PLACE) {
  static constexpr MslOperation operation{"simdgroup_store", kCountNothing, tell_lane};
  const MatrixPlace place = meet(&operation, file, line);
  for (int i = 0; i < 2; i++) {
    destination[matrix_offset(place, i, elements_per_row, origin, transpose)] = matrix.elements[i];
  }
}

// How the counters name an operand's type.
template <class T>
constexpr int kTypeNumber = __is_same(T, float)  ? 0
                            : __is_same(T, half) ? 1
                                                 : 2;

template <class D, class A, class B, class C>
struct MatrixOperands {
  simdgroup_matrix<D, 8, 8>* d;
  const simdgroup_matrix<A, 8, 8>* a;
  const simdgroup_matrix<B, 8, 8>* b;
  const simdgroup_matrix<C, 8, 8>* c;  // null: zeros
};

// D = A B + C in float; D is rounded to its own type at the end.
template <class D, class A, class B, class C>
MSL_EXCHANGE void multiply_matrices(MslLane* lanes) {
  float a[8][8], b[8][8], d[8][8];
  for (int lane = 0; lane < kLanes; lane++) {
    const auto& operands = *(const MatrixOperands<D, A, B, C>*)lanes[lane].input;
    const MatrixPlace place = matrix_place(lane);
    for (int i = 0; i < 2; i++) {
      a[place.row][place.column + i] = operands.a->elements[i];
      b[place.row][place.column + i] = operands.b->elements[i];
      d[place.row][place.column + i] = operands.c ? (float)operands.c->elements[i] : 0.0f;
    }
  }
  for (int row = 0; row < 8; row++) {
    for (int k = 0; k < 8; k++) {
      for (int column = 0; column < 8; column++) d[row][column] += a[row][k] * b[k][column];
    }
  }
  for (int lane = 0; lane < kLanes; lane++) {
    const auto& operands = *(const MatrixOperands<D, A, B, C>*)lanes[lane].input;
    const MatrixPlace place = matrix_place(lane);
    for (int i = 0; i < 2; i++) operands.d->elements[i] = (D)d[place.row][place.column + i];
  }
}

template <class D, class A, class B, class C>
METAL_FUNC void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                              const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<C, 8, 8>& c,
                                              MSL_PLACE) {
  static constexpr MslOperation operation{
      "simdgroup_multiply_accumulate", kCountMma + 3 * kTypeNumber<A> + kTypeNumber<B>, multiply_matrices<D, A, B, C>};
  const MatrixOperands<D, A, B, C> operands{&d, &a, &b, &c};
  msl_simdgroup_operation(&operation, &operands, nullptr, 0, file, line);
}
template <class D, class A, class B>
METAL_FUNC void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                   const simdgroup_matrix<B, 8, 8>& b, MSL_PLACE) {
  static constexpr MslOperation operation{"simdgroup_multiply", kCountMma + 3 * kTypeNumber<A> + kTypeNumber<B>,
                                          multiply_matrices<D, A, B, D>};
  const MatrixOperands<D, A, B, D> operands{&d, &a, &b, nullptr};
  msl_simdgroup_operation(&operation, &operands, nullptr, 0, file, line);
}
}  // namespace metal
