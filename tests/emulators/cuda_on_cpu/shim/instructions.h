// PTX's instructions as functions. In a function's name, `_` replaces what a C++ name cannot contain. Arguments have
// PTX's order.
#pragma once

namespace ptx {

using uint = unsigned;
using ushort = unsigned short;

CUDA_FUNC void cvt_rn_f16_f32(ushort& to, float from) {
  to = cuda_bits<ushort>(static_cast<_Float16>(from));
}
CUDA_FUNC void cvt_f32_f16(float& to, ushort from) {
  to = static_cast<float>(cuda_bits<_Float16>(from));
}
CUDA_FUNC void cvt_rn_bf16_f32(ushort& to, float from) {
  to = cuda_bits<ushort>(static_cast<__bf16>(from));
}
template <class T>
CUDA_FUNC uint cuda_pair(float high, float low) {
  return uint(cuda_bits<ushort>(static_cast<T>(high))) << 16 | cuda_bits<ushort>(static_cast<T>(low));
}
CUDA_FUNC void cvt_rn_f16x2_f32(uint& to, float high, float low) {
  to = cuda_pair<_Float16>(high, low);
}
CUDA_FUNC void cvt_rn_bf16x2_f32(uint& to, float high, float low) {
  to = cuda_pair<__bf16>(high, low);
}
CUDA_FUNC void ex2_approx_ftz_f32(float& to, float from) {
  constexpr float kSmallest = __FLT_MIN__;
  to = __builtin_exp2f(from);
  if (to < kSmallest) to = 0;
}
CUDA_FUNC void min_nan_f32(float& to, float a, float b) {
  to = a != a || a < b ? a : b;
}

CUDA_FUNC void cp_async_cg_shared_global(uint to, const void* from, int size, int bytes) {
  cuda_copy(to, from, size, bytes);
}
CUDA_FUNC void cp_async_ca_shared_global(uint to, const void* from, int size, int bytes) {
  cuda_copy(to, from, size, bytes);
}
CUDA_FUNC void cp_async_commit_group() {
  cuda_commit_copies();
}
CUDA_FUNC void cp_async_wait_group(int under_way) {
  cuda_wait_for_copies(under_way);
}
CUDA_FUNC void barrier_cta_sync(int number, int threads, CUDA_PLACE) {
  cuda_named_barrier(number, threads, file, line);
}

struct Piece {
  uint words[4];
};
CUDA_FUNC Piece piece_at(uint address) {
  if (address % 16) cuda_fail("16 bytes of shared memory at an address that is no multiple of 16");
  const uint* from = static_cast<const uint*>(cuda_shared_pointer(address));
  return {{from[0], from[1], from[2], from[3]}};
}
CUDA_FUNC void ld_shared_v4_b32(uint& r0, uint& r1, uint& r2, uint& r3, uint address) {
  Piece piece = piece_at(address);
  r0 = piece.words[0], r1 = piece.words[1], r2 = piece.words[2], r3 = piece.words[3];
}

template <bool TRANSPOSED>
struct LoadMatrices {
  static constexpr const char* kName = "ldmatrix";
  static constexpr int kCounter = kCountNothing;
  using In = Piece;
  using Out = Piece;
  static void apply(const In* rows, Out* out) {
    const auto half = [&](int row, int column) { return rows[row].words[column / 2] >> column % 2 * 16 & 0xffff; };
    for (int lane = 0; lane < kLanes; lane++) {
      for (int m = 0; m < 4; m++) {
        const int row = lane / 4, column = lane % 4 * 2;
        out[lane].words[m] = TRANSPOSED ? half(m * 8 + column, row) | half(m * 8 + column + 1, row) << 16
                                        : half(m * 8 + row, column) | half(m * 8 + row, column + 1) << 16;
      }
    }
  }
};
#define CUDA_LDMATRIX(name, TRANSPOSED)                                                   \
  CUDA_FUNC void name(uint& r0, uint& r1, uint& r2, uint& r3, uint address, CUDA_PLACE) { \
    Piece piece = cuda_meet<LoadMatrices<TRANSPOSED>>(piece_at(address), file, line);     \
    r0 = piece.words[0], r1 = piece.words[1], r2 = piece.words[2], r3 = piece.words[3];   \
  }
CUDA_LDMATRIX(ldmatrix_sync_aligned_m8n8_x4_shared_b16, false)
CUDA_LDMATRIX(ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16, true)
#undef CUDA_LDMATRIX

struct TransposeMatrix {
  static constexpr const char* kName = "movmatrix";
  static constexpr int kCounter = kCountNothing;
  using In = uint;
  using Out = uint;
  static void apply(const In* rows, Out* out) {
    const auto element = [&](int row, int column) { return rows[row * 4 + column / 2] >> column % 2 * 16 & 0xffff; };
    for (int lane = 0; lane < kLanes; lane++) {
      const int row = lane / 4, column = lane % 4 * 2;
      out[lane] = element(column, row) | element(column + 1, row) << 16;
    }
  }
};
CUDA_FUNC void movmatrix_sync_aligned_m8n8_trans_b16(uint& to, uint from, CUDA_PLACE) {
  to = cuda_meet<TransposeMatrix>(from, file, line);
}

// The number of elements that a tensor core reads from one register, and the value of each.
template <class T>
struct Packed {
  static constexpr int kCount = 2;
  static float element(uint r, int i) { return static_cast<float>(cuda_bits<T>(static_cast<ushort>(r >> i * 16))); }
};
template <>
struct Packed<float> {  // TF32: the lowest 13 bits are ignored
  static constexpr int kCount = 1;
  static float element(uint r, int) { return cuda_bits<float>(r & 0xffffe000u); }
};

// mma.sync with a result of 16 x 8 elements. Each lane holds 4 registers of a and 2 registers of b.
template <class T>
struct Multiply {
  static constexpr const char* kName = "mma.sync";
  static constexpr int kCounter = kCountMma;
  struct In {
    uint a[4], b[2];
    float c[4];
  };
  struct Out {
    float d[4];
  };
  static void apply(const In* in, Out* out) {
    constexpr int kCount = Packed<T>::kCount, kHalf = 4 * kCount;
    float a[16][2 * kHalf], b[2 * kHalf][8];
    for (int lane = 0; lane < kLanes; lane++) {
      for (int r = 0; r < 4; r++) {
        for (int i = 0; i < kCount; i++) {
          const int k = r / 2 * kHalf + lane % 4 * kCount + i;
          a[lane / 4 + r % 2 * 8][k] = Packed<T>::element(in[lane].a[r], i);
          if (r % 2) b[k][lane / 4] = Packed<T>::element(in[lane].b[r / 2], i);
        }
      }
    }
    for (int lane = 0; lane < kLanes; lane++) {
      for (int e = 0; e < 4; e++) {
        float sum = in[lane].c[e];
        for (int k = 0; k < 2 * kHalf; k++) sum += a[lane / 4 + e / 2 * 8][k] * b[k][lane % 4 * 2 + e % 2];
        out[lane].d[e] = sum;
      }
    }
  }
};
#define CUDA_MMA(name, T)                                                                                       \
  CUDA_FUNC void mma_sync_aligned_##name(float& d0, float& d1, float& d2, float& d3, uint a0, uint a1, uint a2, \
                                         uint a3, uint b0, uint b1, float c0, float c1, float c2, float c3,     \
                                         CUDA_PLACE) {                                                          \
    auto out = cuda_meet<Multiply<T>>({{a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3}}, file, line);              \
    d0 = out.d[0], d1 = out.d[1], d2 = out.d[2], d3 = out.d[3];                                                 \
  }
CUDA_MMA(m16n8k16_row_col_f32_bf16_bf16_f32, __bf16)
CUDA_MMA(m16n8k16_row_col_f32_f16_f16_f32, _Float16)
CUDA_MMA(m16n8k8_row_col_f32_tf32_tf32_f32, float)
#undef CUDA_MMA

}  // namespace ptx
